"""Dump files that claim more than they hold: memory is taken for what is in a file, and not for what it says.

Each case runs in a process of its own with a memory limit: 96 MiB, and what the case's file pays for.
"""

import json
import math
import multiprocessing
import pathlib
import resource
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from attrs import frozen

from hiqcache.inspect.format import DTYPES

MIB = 1 << 20
SLACK = 96 * MIB
"""For pieces of 4 million values, counters, and what libraries take at their first use."""
LONGEST_OUTPUT = 5000
"""Characters of a refusal."""

Tensors = Mapping[str, tuple[str, Sequence[int]]]
"""Element type and axes of each tensor of a file."""


def header(tensors: Tensors, **text: str) -> dict[str, Any]:
    """Of a dump whose tensors lie one after the other; `text` changes the metadata."""
    fields = {
        "hiqcache.dump": "1",
        "hiqcache.representation": "bf16",
        "hiqcache.format_tag": "bf16-v1",
        "hiqcache.geometry": geometry(),
        "hiqcache.page_ids": "0",
        "hiqcache.pool_pages": "1000000000",
        "hiqcache.tp_rank": "0",
        "hiqcache.version": "0.1.0",
    }
    entries: dict[str, Any] = {"__metadata__": fields | {f"hiqcache.{name}": value for name, value in text.items()}}
    begin: int = 0
    for name, (dtype, shape) in tensors.items():
        end = begin + math.prod(shape) * DTYPES[dtype].itemsize
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    return entries


def geometry(layers: int = 1, heads: int = 1, dim: int = 1, page_size: int = 1) -> str:
    fields = {"layers": layers, "heads": heads, "head_dim": dim, "v_head_dim": dim, "page_size": page_size}
    return json.dumps(fields | {"dtype": "bfloat16", "tp_size": 1})


def both(dtype: str, *shape: int, name: str = "payload") -> dict[str, tuple[str, Sequence[int]]]:
    """The same section of K and of V."""
    return {f"k.{name}": (dtype, shape), f"v.{name}": (dtype, shape)}


def write(file: pathlib.Path, head: dict[str, Any] | bytes | str, data: int | None = None) -> None:
    """A file with this header and so many bytes of zeros behind it, by default as many as the header claims."""
    if isinstance(head, dict):
        if data is None:
            data = max(entry["data_offsets"][1] for name, entry in head.items() if name != "__metadata__")
        head = json.dumps(head)
    assert data is not None
    raw = head.encode() if isinstance(head, str) else head
    with file.open("wb") as opened:
        opened.write(len(raw).to_bytes(8, "little") + raw)
        opened.truncate(8 + len(raw) + data)  # a hole, which costs no disk


def changed(tensors: Tensors, entry: dict[str, Any], **text: str) -> dict[str, Any]:
    """A header whose tensors are not what they claim."""
    found = header(tensors, **text)
    for name in tensors:
        found[name] |= entry
    return found


@frozen
class Case:
    """A file, a command line, and what comes of it.

    Attributes:
        make: writes the file.
        message: what the refusal says; None for a file that can be read.
        times: memory it may take for each byte of the file, beside the file itself, which is mapped.
        words: of the command, behind the file's name. FILE stands for the file, OUT for one that is not there.
        more: bytes beyond SLACK, for a picture.
    """

    make: Callable[[pathlib.Path], None]
    message: str | None
    times: int = 0
    words: tuple[str, ...] = ()
    more: int = 0


COMPARING = 256 * MIB
"""For float64 of some 4 million values, and more of them at a time."""
DRAWING = 128 * MIB
PAYLOAD = both("I8", 1, 1, 1, 1, 1)
HEADS = 200_000
MANY_HEADS = both("I8", 1, 1, 1, HEADS, 1) | both("BF16", 1, 1, 1, HEADS, name="scales")
MANY_LAYERS = both("I8", 200_000, 1, 1, 1, 1)
DIM = 256
TOKENS = 1 << 15
"""Of a block with 8 million values of K: 16 MiB in BF16."""


def _many_heads(file: pathlib.Path) -> None:
    write(file, header(MANY_HEADS, geometry=geometry(heads=HEADS)))


def _many_maps(file: pathlib.Path) -> None:
    tensors = {f"{part}.s{number}": ("I8", (60, 1, 1, 30, 1)) for number in range(16) for part in "kv"}
    write(file, header(tensors, geometry=geometry(layers=60, heads=30)))


def _text(piece: str, times: int) -> Callable[[pathlib.Path], None]:
    """A header of one JSON text and a long repetition of another."""
    before, repeated, after = piece.split("|")
    return lambda file: write(file, before + repeated * times + after, 0)


def _entry(**entry: Any) -> Callable[[pathlib.Path], None]:
    return lambda file: write(file, changed(PAYLOAD, entry), 1000)


def _metadata(tensors: Tensors = PAYLOAD, **text: str) -> Callable[[pathlib.Path], None]:
    return lambda file: write(file, header(tensors, **text))


def _large_block(tokens: int) -> Callable[[pathlib.Path], None]:
    return _metadata(both("BF16", 1, 1, tokens, 1, DIM), geometry=geometry(dim=DIM, page_size=tokens))


def _long(**text: str) -> Callable[[pathlib.Path], None]:
    """Metadata of which each entry is repeated to 10 MB."""
    return lambda file: write(file, header(PAYLOAD, **{name: piece * 10_000_000 for name, piece in text.items()}))


def _twice(file: pathlib.Path) -> None:
    text = json.dumps(header(PAYLOAD))
    again = '"k.payload":{"dtype":"I8","shape":[1,1,1,1,0],"data_offsets":[0,0]}'
    write(file, text[:-1] + "," + again + "}", 2)


CASES = {
    # Pages and their ids.
    "a billion pages in 842 bytes": Case(
        lambda file: write(file, changed(PAYLOAD, {"shape": [1, 10**9, 1, 1, 1]}, page_ids="0-999999999"), 842),
        "has 1 bytes in the file; axes [1, 1000000000, 1, 1, 1] of I8 need 1,000,000,000",
    ),
    "millions of ranges": Case(
        lambda file: write(file, header(PAYLOAD, page_ids=",".join(map(str, range(0, 2_000_000, 2))))),
        "there are 1,000,000 of them",
    ),
    "one endless page id": Case(_long(page_ids="1"), "'11111"),
    "a pool beyond int64": Case(_metadata(pool_pages="9" * 19), "allowed: a whole number of up to 18 digits"),
    "as many pages as bytes": Case(
        _metadata(both("I8", 1, 8 * MIB, 1, 1, 1), page_ids=f"0-{8 * MIB - 1}"), None, times=4
    ),
    "as many pages as bytes, compared": Case(
        _metadata(both("BF16", 1, 8 * MIB, 1, 1, 1), page_ids=f"0-{8 * MIB - 1}"),
        None,
        times=7,
        words=("--compare", "FILE"),
        more=COMPARING,
    ),
    # The geometry.
    "200,000 heads": Case(_many_heads, None, times=20),
    "200,000 heads as JSON": Case(_many_heads, None, times=20, words=("--json",)),
    "200,000 heads drawn": Case(_many_heads, None, times=20, words=("--plot", "OUT.png"), more=DRAWING),
    "600,000 heads": Case(
        _metadata(both("I8", 1, 1, 1, 600_000, 1), geometry=geometry(heads=600_000)),
        "it has 1,200,000 heads over all layers and tensors; allowed: up to 1,048,576",
    ),
    "200,000 layers": Case(
        _metadata(MANY_LAYERS, geometry=geometry(layers=200_000)), "it has 200,000 layers; allowed: up to 1,024"
    ),
    "16 sections drawn": Case(_many_maps, None, words=("--plot", "OUT.png"), more=DRAWING),
    "a block of 8 million values in 2 MiB": Case(
        _metadata(both("I8", 1, 1, 1, 1, MIB), geometry=geometry(dim=DIM, page_size=TOKENS)), None
    ),
    "a geometry beyond int64": Case(_metadata(geometry=geometry(heads=2**63)), "has a number beyond"),
    "a deep geometry": Case(_long(geometry="["), "allowed: up to 1,000"),
    # Blocks.
    "one element of 64 MiB": Case(_metadata(both("I8", 1, 1, 1, 1, 64 * MIB)), None),
    "one element of 64 MiB, 16 bits": Case(_metadata(both("BF16", 1, 1, 1, 1, 32 * MIB)), None),
    "one element of 64 MiB, 64 bits": Case(_metadata(both("F64", 1, 1, 1, 1, 8 * MIB)), None),
    "elements of 64 MiB beside the heads": Case(_metadata(both("I8", 1, 1, 64 * MIB)), None),
    "a large block": Case(_large_block(TOKENS), None),
    "a large block decoded": Case(_large_block(TOKENS), None, times=1, words=("--decode", "OUT")),
    "a large block compared": Case(
        _large_block(2 * TOKENS), None, times=1, words=("--compare", "FILE"), more=COMPARING
    ),
    # Tensors.
    "axes that overflow": Case(_entry(shape=[2**40, 2**40, 2**40]), "of I8 need 1,329,227,995"),
    "axes beyond int64": Case(_entry(shape=[1, 2**64, 0]), "is not described as safetensors does"),
    "axes that cannot be printed": Case(
        lambda file: write(file, json.dumps(header(PAYLOAD)).replace("[1, 1, 1, 1, 1]", str([10**4000] * 2)), 2),
        "is not described as safetensors does",
    ),
    "20,000 axes": Case(_entry(shape=[1] * 20_000, data_offsets=[0, 1]), "has 20,000 axes; allowed: up to 8"),
    "offsets beyond int64": Case(_entry(data_offsets=[0, 2**64]), "is not described as safetensors does"),
    "offsets that run backwards": Case(_entry(data_offsets=[1, 0]), "has -1 bytes in the file"),
    "one tensor twice": Case(_twice, "two entries of its header have the same name"),
    "34 tensors": Case(
        _metadata({f"{part}.s{number}": ("I8", (1, 1, 1, 1, 1)) for number in range(17) for part in "kv"}),
        "it has 34 tensors; allowed: up to 32",
    ),
    "a name of 10 MB": Case(
        lambda file: write(file, header({"k." + "x" * 10_000_000: ("I8", (1, 1, 1, 1, 1))})),
        "has a name of 10,000,002 characters",
    ),
    "a name that moves the cursor": Case(_metadata({"k.\x1b[2J": ("I8", (1, 1, 1, 1, 1))}), "all of them printable"),
    "a type of 10 MB": Case(
        lambda file: write(file, changed(PAYLOAD, {"dtype": "x" * 10_000_000}), 2),
        "has element type 'xxxx",
    ),
    # Other metadata.
    "a representation of 10 MB": Case(_long(representation="x"), "10,000,000 characters"),
    "a version of 10 MB": Case(_long(dump="2"), "a dump of version '222"),
    "a version that moves the cursor": Case(_metadata(version="\x1b[2J"), "all of them printable"),
    # The header.
    "100 MB of tensors": Case(
        _text('{"a":{}|,"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}|}', 1_900_000), "far more in it"
    ),
    "100 MB of numbers": Case(
        _text('{"a":{"dtype":"U8","shape":[0|,1000000|],"data_offsets":[0,0]}}', 12_000_000), "far more in it", times=1
    ),
    "100 MB of UTF-16": Case(
        lambda file: write(file, '{"\\"":[0'.encode("utf-16-le") + ",1000".encode("utf-16-le") * 9_000_000, 0),
        "its header is not JSON",
        times=1,
    ),
    "100 MB of escapes": Case(_text(r'{"a":"|\n|"}', 49_000_000), "far more in it"),
    "a deep header": Case(_text('{"a":|[|', 200_000), "its header is not JSON"),
}


def run_limited(words: Sequence[str], more: int, output: pathlib.Path) -> None:
    """`hiqcache inspect` with so many bytes more than this process has; exits as the command does, or with 3."""
    torch.set_num_threads(1)  # each thread has memory of its own
    from hiqcache.__main__ import main

    (line,) = (line for line in pathlib.Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    limit = int(line.split()[1]) * 1024 + more
    with output.open("w") as file:
        sys.stdout = sys.stderr = file
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        try:
            main(["inspect", *words], prog_name="hiqcache")
        except Exception:
            traceback.print_exc()
            sys.exit(3)


@pytest.fixture(scope="module")
def processes() -> Any:
    """A context whose processes are forked from one that has the libraries, and nothing else, in memory."""
    context = multiprocessing.get_context("forkserver")
    modules = ["commands.inspect", "inspect.decode", "inspect.plot", "registry"]
    context.set_forkserver_preload(["rich.progress", *(f"hiqcache.{module}" for module in modules)])
    return context


@pytest.mark.parametrize("name", CASES)
def test_memory_is_bounded_by_the_file(name: str, processes: Any, tmp_path: pathlib.Path):
    case, file, output = CASES[name], tmp_path / "file", tmp_path / "output"
    if "--plot" in case.words:
        pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    case.make(file)
    size = file.stat().st_size
    words = [word.replace("FILE", str(file)).replace("OUT", str(tmp_path / "out")) for word in case.words]
    mapped = 1 + words.count(str(file))
    more = SLACK + (case.times + mapped) * size + case.more
    process = processes.Process(target=run_limited, args=([str(file), *words], more, output))
    process.start()
    process.join(120)
    process.kill()
    said = output.read_text()
    file.unlink()
    assert process.exitcode == (0 if case.message is None else 1), said[-LONGEST_OUTPUT:]
    if case.message is not None:
        assert case.message in said
        assert len(said) < LONGEST_OUTPUT
