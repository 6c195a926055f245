"""Dump files: written from arenas, read back by plain safetensors, measured, compared, decoded, damaged.

Statistics are checked against blocks whose codes, zeros and scales were chosen, values against the plain codec.
"""

import json
import math
import os
import pathlib
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import safetensors.torch
import torch
from click.testing import CliRunner, Result
from distributions import HALF, install
from transfers import after_backup, geometry, random_arena, random_rows, same_bits

from hiqcache import registry
from hiqcache.__main__ import main
from hiqcache.arena import HostArena
from hiqcache.backends.bf16 import Bf16
from hiqcache.backends.int8 import Int8
from hiqcache.geometry import KVGeometry, Part
from hiqcache.inspect import reader, writer
from hiqcache.inspect.compare import compare
from hiqcache.inspect.decode import write_decoded
from hiqcache.inspect.format import DumpError, Metadata, page_ranges, parse_ranges
from hiqcache.inspect.reader import Dump
from hiqcache.inspect.statistics import measure
from hiqcache.inspect.writer import SafetensorsWriter, TensorSpec, dump_arena, dump_tensors, write_pages
from hiqcache.representation import HostRepresentation
from hiqcache.transfer import DeviceRows

PAGES = 12
GEOMETRY = geometry((3, 64), page_size=4, layers=2)
PAGE_IDS = (0, 1, 2, 5, 9)


def metadata(of: HostRepresentation, page_ids: tuple[int, ...] = PAGE_IDS, **changes: Any) -> Metadata:
    found = Metadata(
        representation=of.name,
        format_tag=of.format_tag,
        geometry=of.geometry,
        page_ids=page_ids,
        pool_pages=PAGES,
        tp_rank=0,
        hiqcache_version="0.1.0",
        sglang_version="0.5.23",
    )
    return attrs.evolve(found, **changes)


def normal_rows(of: KVGeometry, slots: int, seed: int = 0) -> DeviceRows:
    generator = torch.Generator().manual_seed(seed)
    shape = (slots, of.heads, of.head_dim)
    return DeviceRows(*([torch.randn(shape, generator=generator).bfloat16() for _ in range(of.layers)] for _ in Part))


def filled(of: HostRepresentation, rows: DeviceRows, arrangement: str = "page_first") -> HostArena:
    """An arena whose page `p` holds the rows of its slots, by the reference codec."""
    arena = random_arena(of, PAGES, arrangement, torch.Generator().manual_seed(1))
    slots = torch.arange(PAGES * of.geometry.page_size)
    return HostArena(arena.shape, after_backup(of, arena, rows, slots, slots))


def dumped(file: pathlib.Path, of: HostRepresentation, rows: DeviceRows, **changes: Any) -> pathlib.Path:
    dump_arena(filled(of, rows), metadata(of, **changes), file)
    return file


@pytest.fixture
def int8(tmp_path: pathlib.Path) -> pathlib.Path:
    return dumped(tmp_path / "int8.safetensors", Int8(GEOMETRY), normal_rows(GEOMETRY, PAGES * 4))


@pytest.fixture
def bf16(tmp_path: pathlib.Path) -> pathlib.Path:
    return dumped(tmp_path / "bf16.safetensors", Bf16(GEOMETRY), normal_rows(GEOMETRY, PAGES * 4))


def run(*words: object) -> Result:
    """`hiqcache inspect`; an exception that would be a traceback fails the test."""
    result = CliRunner().invoke(main, ["inspect", *map(str, words)], prog_name="hiqcache")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


# -- writing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arrangement", ["page_first", "layer_first"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("representation", [Int8, Bf16])
def test_every_byte_of_every_section(
    tmp_path: pathlib.Path, representation: type[HostRepresentation], page_size: int, arrangement: str
):
    """Read by safetensors alone, whatever the arena looks like and however small the pieces are."""
    of = representation(geometry((3, 64), page_size, layers=3))
    arena = random_arena(of, PAGES, arrangement, torch.Generator().manual_seed(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "CHUNK_BYTES", 2 * 3 * of.layouts[Part.K].block_bytes)  # two pages at a time
        dump_arena(arena, metadata(of), tmp_path / "file")
    with safetensors.safe_open(tmp_path / "file", framework="pt") as opened:
        names = [name for name in ("payload", "scales") if name in of.layouts[Part.K]]
        assert sorted(opened.keys()) == sorted(f"{part.value}.{name}" for part in Part for name in names)
        for part in Part:
            for name in names:
                stored = opened.get_tensor(f"{part.value}.{name}")
                expected = arena.section(part, name)[:, list(PAGE_IDS)]
                assert stored.shape == expected.shape
                assert stored.dtype == expected.dtype
                assert torch.equal(stored.view(torch.uint8), expected.contiguous().view(torch.uint8))
        text = opened.metadata()
    assert text["hiqcache.representation"] == of.name
    assert text["hiqcache.format_tag"] == of.format_tag
    assert text["hiqcache.page_ids"] == "0-2,5,9"
    assert text["sglang.version"] == "0.5.23"
    assert json.loads(text["hiqcache.geometry"]) == {
        "layers": 3,
        "heads": 3,
        "head_dim": 64,
        "v_head_dim": 64,
        "page_size": page_size,
        "dtype": "bfloat16",
        "tp_size": 1,
    }


def test_a_dump_opens_without_hiqcache(int8: pathlib.Path):
    code = (
        "import sys, safetensors\n"
        f"with safetensors.safe_open({str(int8)!r}, framework='pt') as file:\n"
        "    print(list(file.get_tensor('v.scales').shape), file.metadata()['hiqcache.representation'])\n"
        "print([name for name in sys.modules if name.partition('.')[0] == 'hiqcache'])\n"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.splitlines() == ["[2, 5, 4, 3] int8", "[]"]


def test_memory_does_not_grow_with_the_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """What is written at once is a chunk's worth, however many pages there are."""
    of = Int8(GEOMETRY)
    arena = random_arena(of, 600, "page_first", torch.Generator().manual_seed(0))
    page = GEOMETRY.layers * of.layouts[Part.K].block_bytes
    monkeypatch.setattr(writer, "CHUNK_BYTES", 10 * page)
    sizes = []
    with SafetensorsWriter(tmp_path / "file", dump_tensors(arena.shape, 600)) as opened:
        put = opened._put
        monkeypatch.setattr(
            opened, "_put", lambda offset, data: (sizes.append(memoryview(data).nbytes), put(offset, data))
        )
        steps: list[int] = []
        write_pages(opened, arena, metadata(of, tuple(range(600)), pool_pages=600), steps.append)
        header = sum(sizes) - 600 * 2 * 2 * 4 * (3 * 64 + 3 * 2)
    assert header < 1500
    assert max(sizes) == 10 * 4 * 3 * 64  # ten pages of one layer's payload
    assert steps == list(range(10, 601, 10))


def test_a_file_appears_only_when_it_is_complete(tmp_path: pathlib.Path):
    spec = TensorSpec("a", torch.int8, (2, 3))
    with SafetensorsWriter(tmp_path / "file", [spec]) as opened:
        opened.begin({})
        opened.write("a", torch.arange(3, dtype=torch.int8), 1)
        opened.finish()
        (partial,) = tmp_path.iterdir()
        assert partial.name.startswith(".file.")
        assert stat.S_IMODE(partial.stat().st_mode) == 0o600
        opened.commit()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    tensor = safetensors.torch.load_file(tmp_path / "file")["a"]
    assert tensor.tolist() == [[0, 0, 0], [0, 1, 2]]


def test_what_fails_leaves_nothing(tmp_path: pathlib.Path):
    with SafetensorsWriter(tmp_path / "file", [TensorSpec("a", torch.int8, (1,))]) as opened:
        opened.begin({})
        assert list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("other", ["file", "link to nothing", "folder"])
def test_nothing_is_replaced(tmp_path: pathlib.Path, other: str):
    target = tmp_path / "target"
    {"file": target.touch, "folder": target.mkdir, "link to nothing": lambda: target.symlink_to("nowhere")}[other]()
    with pytest.raises(DumpError, match="target exists; no dump replaces a file"):
        SafetensorsWriter(target, [])
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_nothing_is_replaced_that_came_meanwhile(tmp_path: pathlib.Path):
    with SafetensorsWriter(tmp_path / "file", []) as opened:
        opened.begin({})
        (tmp_path / "file").write_text("somebody's")
        opened.finish()
        with pytest.raises(DumpError, match="exists"):
            opened.commit()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "somebody's"


def free_space(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 10**12 - free, free))


def test_a_short_disk_is_refused_before_anything_is_written(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    free_space(monkeypatch, 1000)
    with pytest.raises(DumpError, match=r"too full: the dump needs 5,000 bytes \(0.00 GB\), and 1,000 bytes"):
        SafetensorsWriter(tmp_path / "file", [TensorSpec("a", torch.uint8, (5000,))])
    assert not list(tmp_path.iterdir())


def test_exactly_enough_room_is_enough(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    spec = [TensorSpec("a", torch.uint8, (5000,))]
    free_space(monkeypatch, 4999)
    with pytest.raises(DumpError, match="too full"):
        SafetensorsWriter(tmp_path / "file", spec)
    free_space(monkeypatch, 5000)
    with SafetensorsWriter(tmp_path / "file", spec) as opened:
        opened.begin({"some": "text"})
        opened.finish()
        opened.commit()
    assert (tmp_path / "file").stat().st_size == opened.total_bytes > 5000


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_disk_that_fills_up_meanwhile(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a tmpfs")
    try:
        real = shutil.disk_usage(tmp_path)
        free_space(monkeypatch, 10**9)  # room there was when it was asked for
        spec = [TensorSpec("a", torch.uint8, (100_000,))]
        with SafetensorsWriter(tmp_path / "file", spec) as opened:
            opened.begin({})
            with pytest.raises(DumpError, match=r"is full: file needs 100,\d+ bytes"):
                opened.write("a", torch.zeros(100_000, dtype=torch.uint8))
        monkeypatch.undo()
        assert not list(tmp_path.iterdir())
        assert shutil.disk_usage(tmp_path).free == real.free
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("folder", ["missing", "a file"])
def test_a_folder_that_is_none(tmp_path: pathlib.Path, folder: str):
    (tmp_path / "a file").touch()
    with pytest.raises(DumpError, match=r"cannot write .*: (No such file|Not a directory)"):
        SafetensorsWriter(tmp_path / folder / "file", [TensorSpec("a", torch.uint8, (1,))])


def test_a_pool_has_the_pages_asked_for(tmp_path: pathlib.Path):
    of = Int8(GEOMETRY)
    arena = random_arena(of, PAGES, "page_first", torch.Generator())
    with pytest.raises(DumpError, match="there is no page 12; the pool's are 0 to 11"):
        dump_arena(arena, metadata(of, (3, 12)), tmp_path / "file")
    with pytest.raises(DumpError, match="there is no page to dump"):
        dump_arena(arena, metadata(of, ()), tmp_path / "file")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("ids", [(0,), (0, 1, 2), (3, 5, 6, 7, 100), (9,), (2, 4, 6)])
def test_page_ids_survive_as_text(ids: tuple[int, ...]):
    assert tuple(parse_ranges(page_ranges(ids), 101).tolist()) == ids


def test_page_ids_are_written_short():
    assert page_ranges(range(1_000_000)) == "0-999999"
    assert page_ranges([0, 1, 3, 7, 8, 9]) == "0-1,3,7-9"


@pytest.mark.parametrize(
    "text", ["", "a", "1-", "-1", "3-2", "1,1", "5,4", "1-2-3", "1, 2", "٣", "1.5", "9" * 5000, "0x1"]
)
def test_what_is_no_page(text: str):
    with pytest.raises(DumpError):
        parse_ranges(text, 10**15)


def test_a_wrong_number_does_not_become_a_long_list():
    with pytest.raises(DumpError, match="no page 999999999999999; the pool's are 0 to 9"):
        parse_ranges("0-999999999999999", 10)
    with pytest.raises(DumpError, match="there are 1,000,000,000,000,000 of them, and 5 pages in the file"):
        parse_ranges("0-999999999999999", 10**18, most=5)


# -- measuring ---------------------------------------------------------------------------------------------------------


def chosen(tmp_path: pathlib.Path, choose: Callable[[HostArena], None]) -> pathlib.Path:
    """A dump of an int8 arena that `choose` has put values into."""
    of = Int8(GEOMETRY)
    arena = random_arena(of, PAGES, "page_first", torch.Generator())
    arena.buffer.zero_()
    choose(arena)
    dump_arena(arena, metadata(of), tmp_path / "file")
    return tmp_path / "file"


def test_statistics_of_chosen_codes(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """Head 0: four codes equally often, 2 bits. Head 1: one code, 0 bits. Head 2: a quarter zero, a quarter -127."""
    monkeypatch.setattr(reader, "CHUNK_VALUES", 4 * 3 * 64 * 2)  # two pages at a time, the last one alone

    def choose(arena: HostArena) -> None:
        for part in Part:
            payload = arena.section(part, "payload")
            payload[..., 0, :] = torch.tensor([5, -5, 6, 7], dtype=torch.int8).repeat(16)
            payload[..., 1, :] = -3
            payload[..., 2, :] = torch.tensor([0, -127, 3, 3], dtype=torch.int8).repeat(16)
            scales = arena.section(part, "scales")
            scales[:] = 2
            scales[1, 5, 2, 1] = 0.25  # layer 1, page 5, token 2, head 1
            scales[1, 9, 0, 1] = 16
            scales[1, 3] = 1000  # a page that is not dumped

    with Dump(chosen(tmp_path, choose)) as dump:
        found = {each.name: each for each in measure(dump)}
    assert list(found) == ["k.payload", "k.scales", "v.payload", "v.scales"]
    for part in ("k", "v"):
        payload, scales = found[f"{part}.payload"], found[f"{part}.scales"]
        assert (payload.payload, payload.per_head, payload.code_bits) == (True, True, 8)
        assert (scales.payload, scales.per_head, scales.code_bits) == (False, True, 16)
        assert payload.count == len(PAGE_IDS) * 4 * 64
        assert payload.bits is not None
        assert payload.bits.tolist() == [[2, 0, 1.5]] * 2
        assert payload.zero is not None
        assert payload.zero.tolist() == [[0, 0, 0.25]] * 2
        assert payload.saturated is not None
        assert payload.saturated.tolist() == [[0, 0, 0.25]] * 2
        assert payload.smallest.tolist() == [[-5, -3, -127]] * 2
        assert payload.largest.tolist() == [[7, -3, 3]] * 2
        assert scales.smallest.tolist() == [[2, 2, 2], [2, 0.25, 2]]
        assert scales.largest.tolist() == [[2, 2, 2], [2, 16, 2]]
        assert not payload.not_finite.any()


def test_nan_is_a_finding_and_no_failure(tmp_path: pathlib.Path):
    def choose(arena: HostArena) -> None:
        arena.section(Part.V, "scales")[:] = 1
        arena.section(Part.V, "scales")[1, 5, 0, 2] = math.nan
        arena.section(Part.V, "scales")[1, 5, 1, 2] = math.inf
        arena.section(Part.K, "scales")[:] = math.nan

    file = chosen(tmp_path, choose)
    with Dump(file) as dump:
        found = {each.name: each for each in measure(dump)}
    assert found["v.scales"].not_finite.tolist() == [[0, 0, 0], [0, 0, 2]]
    assert found["v.scales"].largest.tolist() == [[1, 1, 1]] * 2
    assert found["k.scales"].not_finite.sum() == found["k.scales"].count * 6
    assert found["k.scales"].smallest.isnan().all()
    result = run(file)
    assert result.exit_code == 0
    assert "finding: v.scales has 2 elements that are NaN or infinite (layers 1)" in result.stdout
    assert "none finite" in result.stdout
    document = json.loads(run(file, "--json").stdout, parse_constant=pytest.fail)
    assert document["sections"]["k.scales"]["smallest"] == [[None] * 3] * 2


def test_a_head_of_zeros_is_a_finding(tmp_path: pathlib.Path):
    def choose(arena: HostArena) -> None:
        for part in Part:
            arena.section(part, "payload")[:] = 1
        arena.section(Part.K, "payload")[1, :, :, 2] = 0

    result = run(chosen(tmp_path, choose))
    assert [line for line in result.stdout.splitlines() if line.startswith("finding")] == [
        "finding: k.payload: layer 1, head 2 is zero throughout"
    ]


def test_statistics_of_bf16(tmp_path: pathlib.Path):
    """16-bit codes are counted too; the largest BF16 is saturated."""
    rows = normal_rows(GEOMETRY, PAGES * 4)
    rows.k[0][:, 1] = 1.5
    rows.k[0][:, 2] = 0
    rows.k[0][:, 2, :16] = torch.finfo(torch.bfloat16).max
    with Dump(dumped(tmp_path / "file", Bf16(GEOMETRY), rows)) as dump:
        payload = measure(dump)[0]
    assert payload.bits is not None
    assert payload.zero is not None
    assert payload.saturated is not None
    assert payload.bits[0, 1] == 0
    assert payload.bits[0, 2] == pytest.approx(0.811278, abs=1e-6)  # entropy of 1/4 and 3/4
    assert payload.zero[0, 2] == 0.75
    assert payload.saturated[0].tolist() == [0, 0, 0.25]
    # 1280 normal values rounded to BF16: fewer bits than were drawn, many more than INT8 has.
    assert 8 < payload.bits[1, 0] < math.log2(1280)


TYPES = [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.float16, torch.float32, torch.float64]
TYPES += [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_element_type_is_measured(tmp_path: pathlib.Path, dtype: torch.dtype):
    """Sections of any type, written by safetensors itself: 1, 2 and 0 in turns, in one head the type's largest."""
    of = Int8(GEOMETRY)
    values = torch.tensor([1, 2, 0, 2], dtype=torch.float64).repeat(2, 5, 4, 3, 16)
    values[:, :, :, 1, 0] = (torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max
    stored = values.to(dtype) if dtype.is_floating_point else values.long().to(dtype)
    tensors = {"k.payload": stored, "v.payload": stored.clone()}
    safetensors.torch.save_file(tensors, tmp_path / "file", metadata(of).to_text())
    with Dump(tmp_path / "file") as dump:
        payload, _ = measure(dump)
    signed = dtype.is_floating_point or dtype.is_signed
    assert payload.smallest.tolist() == [[0, 0, 0]] * 2
    assert payload.largest.tolist() == [[2, float(stored[0, 0, 0, 1, 0].double()), 2]] * 2
    assert (payload.zero is not None) == signed
    if payload.zero is not None and payload.saturated is not None:
        assert payload.zero.tolist() == [[0.25] * 3] * 2
        assert payload.saturated.tolist() == [[0, 1 / 64, 0]] * 2
    assert (payload.bits is None) == (dtype.itemsize > 2)
    if payload.bits is not None:
        assert payload.bits[:, 0].tolist() == [1.5, 1.5]
    assert not payload.not_finite.any()


# -- comparing, decoding -----------------------------------------------------------------------------------------------


def test_the_error_of_int8(int8: pathlib.Path, bf16: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """By head, against a codec written out here."""
    monkeypatch.setattr(reader, "CHUNK_VALUES", 4 * 3 * 64 * 2)
    rows = normal_rows(GEOMETRY, PAGES * 4)
    slots = (torch.tensor(PAGE_IDS)[:, None] * 4 + torch.arange(4)).flatten()
    with Dump(int8) as dump, Dump(bf16) as reference:
        both = compare(dump, reference)
    for differences in both:
        for layer, values in enumerate(rows.of(differences.part)):
            x = values[slots].double()
            scale = (x.abs().amax(2, keepdim=True).float() / 127).bfloat16().double()
            decoded = ((x.float() / scale.float()).round().double() * scale).bfloat16().double()
            error = (decoded - x).square().mean((0, 2)).sqrt()
            assert torch.allclose(differences.error[layer], error, rtol=1e-9)
            assert torch.allclose(differences.size[layer], x.square().mean((0, 2)).sqrt(), rtol=1e-9)
            assert torch.equal(differences.largest_error[layer], (decoded - x).abs().amax((0, 2)))
        assert differences.count == len(PAGE_IDS) * 4 * 64
        assert differences.beyond_bound is not None
        assert not differences.beyond_bound.any()
        assert not differences.not_finite.any()
        assert (differences.relative_error < 0.01).all()


def test_a_dump_compared_with_itself(bf16: pathlib.Path):
    with Dump(bf16) as dump, Dump(bf16) as same:
        for differences in compare(dump, same):
            assert not differences.error.any()
            assert not differences.relative_error.any()
            assert differences.size.all()


def test_effective_bits_of_channels(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """A channel of standard deviation 2**a, with an error of 2**b everywhere, has a - b bits; its mean is no signal."""
    monkeypatch.setattr(reader, "CHUNK_VALUES", 4 * 3 * 64 * 2)
    slots = torch.arange(PAGES * GEOMETRY.page_size)
    signs = torch.where(slots % 2 == 0, 1.0, -1.0)[:, None, None]
    exact, off = normal_rows(GEOMETRY, len(slots)), normal_rows(GEOMETRY, len(slots))
    channels = torch.arange(64)
    bits = channels % 5 + 1  # BF16 holds them all exactly
    for part in Part:
        for layer, (before, after) in enumerate(zip(exact.of(part), off.of(part), strict=True)):
            size = torch.full((3, 64), 2.0**layer)
            before.copy_(signs * size + (part is Part.K) * 2 * size)
            after.copy_(before.float() + torch.where(slots % 4 < 2, 1.0, -1.0)[:, None, None] * size * 0.5**bits)
            after[:, 1, 7] = before[:, 1, 7]
            before[:, 2, 9] = 1.0
            after[:, 2, 9] = 1.5
    first, second = (dumped(tmp_path / name, Bf16(GEOMETRY), rows) for name, rows in (("off", off), ("exact", exact)))
    with Dump(first) as dump, Dump(second) as reference:
        for each in compare(dump, reference):
            found = each.channel_bits
            assert found.shape == (2, 3, 64)
            assert bool(found[:, 1, 7].isinf().all())
            assert bool(found[:, 2, 9].isnan().all())
            expected = bits.double().expand(2, 3, 64).clone()
            expected[:, 1, 7], expected[:, 2, 9] = found[:, 1, 7], found[:, 2, 9]
            torch.testing.assert_close(found, expected, equal_nan=True)
    shown = run(first, "--compare", second).stdout
    assert re.search(r"K +0 .* 3\.00 +none +2:9 ", shown), shown
    assert json.loads(run(first, "--compare", second, "--json").stdout)["k"]["channel_bits"][0][1][6:9] == [2, None, 4]


def test_only_common_pages_are_compared(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """Pages 2 and 9 are in both, at other places; everything else there is poison."""
    monkeypatch.setattr(reader, "CHUNK_VALUES", 4 * 3 * 64 * 2)
    rows, poisoned = normal_rows(GEOMETRY, PAGES * 4), normal_rows(GEOMETRY, PAGES * 4, seed=5)
    for part in Part:
        for values, clean in zip(poisoned.of(part), rows.of(part), strict=True):
            for page in (2, 9):
                values[4 * page : 4 * page + 4] = clean[4 * page : 4 * page + 4]
    first = dumped(tmp_path / "first", Bf16(GEOMETRY), rows, page_ids=(0, 1, 2, 5, 9))
    second = dumped(tmp_path / "second", Bf16(GEOMETRY), poisoned, page_ids=(2, 3, 4, 6, 7, 8, 9, 10))
    with Dump(first) as dump, Dump(second) as reference:
        for differences in compare(dump, reference):
            assert not differences.error.any()
            assert differences.count == 2 * 4 * 64
    assert "2 pages in both" in run(first, "--compare", second).stdout


def test_other_kv_is_noticed(tmp_path: pathlib.Path, int8: pathlib.Path):
    other = dumped(tmp_path / "other", Bf16(GEOMETRY), normal_rows(GEOMETRY, PAGES * 4, seed=9))
    result = run(int8, "--compare", other)
    assert result.exit_code == 0
    assert "finding: K differs by more than its own size: the two do not hold the same KV" in result.stdout
    assert "values are further off than the codec can be" in result.stdout


def test_nan_on_one_side_is_counted_and_left_out(tmp_path: pathlib.Path, bf16: pathlib.Path):
    rows = normal_rows(GEOMETRY, PAGES * 4)
    rows.v[1][4 * 5 + 1, 2, 7] = math.nan  # page 5, token 1, head 2
    broken = dumped(tmp_path / "broken", Int8(GEOMETRY), rows)
    with Dump(broken) as dump, Dump(bf16) as reference:
        _, values = compare(dump, reference)
    assert values.not_finite.tolist() == [[0, 0, 0], [0, 0, 64]]  # int8 gives the whole head up
    assert values.error.isfinite().all()
    assert "finding: V: 64 values are NaN or infinite in one of the two alone" in run(broken, "--compare", bf16).stdout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_ids": (3, 4)}, "have no page in common"),
        ({"tp_rank": 1}, "cannot be compared: TP rank 0 and 1"),
        ({"geometry": attrs.evolve(GEOMETRY, tp_size=2)}, "cannot be compared: tp_size 1 and 2"),
    ],
)
def test_dumps_that_cannot_be_compared(
    tmp_path: pathlib.Path, int8: pathlib.Path, changes: dict[str, Any], message: str
):
    other = dumped(tmp_path / "other", Bf16(GEOMETRY), normal_rows(GEOMETRY, PAGES * 4), **changes)
    result = run(int8, "--compare", other)
    assert result.exit_code == 1
    assert message in result.output


@pytest.mark.parametrize("representation", [Int8, Bf16])
def test_decoded_values(
    tmp_path: pathlib.Path, representation: type[HostRepresentation], monkeypatch: pytest.MonkeyPatch
):
    """NaN, infinities and subnormals included: the bits that the plain codec gives."""
    monkeypatch.setattr(reader, "CHUNK_VALUES", 4 * 3 * 64 * 2)
    of = representation(GEOMETRY)
    rows = random_rows(GEOMETRY, PAGES * 4, torch.Generator().manual_seed(0))
    file = dumped(tmp_path / "file", of, rows)
    result = run(file, "--decode", tmp_path / "decoded")
    assert result.exit_code == 0
    decoded = safetensors.torch.load_file(tmp_path / "decoded")
    assert sorted(decoded) == ["k", "v"]
    slots = (torch.tensor(PAGE_IDS)[:, None] * 4 + torch.arange(4)).flatten()
    for part in Part:
        for layer, values in enumerate(rows.of(part)):
            blocks = torch.empty(len(PAGE_IDS), of.layouts[part].block_bytes, dtype=torch.uint8)
            of.encode(values[slots].unflatten(0, (-1, 4)), part, blocks)
            expected = torch.empty(len(PAGE_IDS), 4, 3, 64, dtype=torch.bfloat16)
            of.decode(blocks, part, expected)
            assert same_bits(decoded[part.value][layer], expected)
    again = run(file, "--decode", tmp_path / "decoded")
    assert again.exit_code == 1
    assert "decoded exists" in again.output
    assert "no dump of hiqcache" in run(tmp_path / "decoded").output


def test_a_third_party_whose_sections_have_other_names(tmp_path: pathlib.Path, site: pathlib.Path):
    """`half` keeps the upper byte of each BF16 as `upper`, uint8: which code that is, nobody has said."""
    install(site, "half-kv", {"half_kv": HALF}, {"half": "half_kv:Half"})
    rows = normal_rows(GEOMETRY, PAGES * 4)
    file = dumped(tmp_path / "half.safetensors", registry.get("half")(GEOMETRY), rows)
    document = json.loads(run(file, "--json").stdout)
    upper = document["sections"]["k.upper"]
    assert upper["payload"]
    assert upper["zero"] is None
    assert upper["saturated"] is None
    assert 2 < upper["bits"][0][0] < 8
    assert any("k.upper has uint8 elements, which may be several codes each" in line for line in document["unknown"])
    reference = dumped(tmp_path / "bf16", Bf16(GEOMETRY), rows)
    compared = json.loads(run(file, "--compare", reference, "--json").stdout)
    assert compared["k"]["beyond_bound"] is None  # it states no bound
    assert 0.3 < compared["k"]["relative_rms_error"] < 0.75  # a power of 4 is left of each value


def test_a_third_party_that_is_not_installed(tmp_path: pathlib.Path, int8: pathlib.Path):
    """Its bytes can be measured, its values cannot be had."""
    file = rewritten(int8, tmp_path / "file", **{"hiqcache.representation": "elsewhere"})
    result = run(file)
    assert result.exit_code == 0
    assert "unknown: values: " in result.stdout
    assert "unknown representation 'elsewhere'; registered: " in result.stdout
    refused = run(file, "--decode", tmp_path / "out")
    assert refused.exit_code == 1
    assert "unknown representation 'elsewhere'" in refused.output
    assert not (tmp_path / "out").exists()


# -- damaged and foreign files -----------------------------------------------------------------------------------------


def rewritten(file: pathlib.Path, to: pathlib.Path, **text: str | None) -> pathlib.Path:
    """The same tensors with other metadata; None takes an entry away."""
    with safetensors.safe_open(file, framework="pt") as opened:
        found = opened.metadata() | text
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (it is no dict)
    safetensors.torch.save_file(tensors, to, {name: value for name, value in found.items() if value is not None})
    return to


def _geometry(**changes: object) -> dict[str, str]:
    fields = attrs.asdict(GEOMETRY) | {"dtype": "bfloat16"} | changes
    return {"hiqcache.geometry": json.dumps(fields)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"hiqcache.dump": None}, "no dump of hiqcache"),
        ({"hiqcache.dump": "2"}, "a dump of version '2'; this hiqcache reads version '1'"),
        ({"hiqcache.format_tag": None}, "its metadata has no 'hiqcache.format_tag'"),
        ({"hiqcache.geometry": "{"}, "its metadata's geometry makes no sense"),
        ({"hiqcache.geometry": "[]"}, "its metadata's geometry makes no sense"),
        ({"hiqcache.geometry": "[" * 1000}, "its metadata's geometry makes no sense"),
        ({"hiqcache.geometry": "[" * 20_000}, "'..., 20,000 characters; allowed: up to 1,000, all of them printable"),
        (_geometry(heads=3.0), "('heads' must be <class 'int'> (got 3.0 that is a <class 'float'>).)"),
        (_geometry(heads=10**11), "25,600,000,000,000 values of K in a block, which cannot be in the 792 bytes"),
        (_geometry(page_size=10**12), "values of K in a block, which cannot be in the 792 bytes"),
        ({"hiqcache.geometry": '{"dtype": "float99"}'}, "its metadata's geometry makes no sense"),
        ({"hiqcache.geometry": '{"dtype": "bfloat16", "layers": -1}'}, "its metadata's geometry makes no sense"),
        ({"hiqcache.page_ids": "0-3"}, "has axes [2, 5, 4, 3]; the metadata names 2 layers and 4 pages"),
        ({"hiqcache.page_ids": "5,1"}, "page ids make no sense: pages '1' do not ascend"),
        ({"hiqcache.page_ids": "0-4,7"}, "page ids make no sense: there are 6 of them, and 5 pages in the file"),
        ({"hiqcache.pool_pages": "9"}, "page ids make no sense: there is no page 9; the pool's are 0 to 8"),
        ({"hiqcache.pool_pages": "many"}, "hiqcache.pool_pages = 'many'; allowed: a whole number"),
    ],
    ids=lambda value: str(value)[:80],
)
def test_metadata_that_is_wrong(tmp_path: pathlib.Path, int8: pathlib.Path, text: dict, message: str):
    file = rewritten(int8, tmp_path / "file", **text)
    result = run(file)
    assert result.exit_code == 1
    assert message in result.output
    assert str(file) in result.output
    assert len(result.output.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"hiqcache.format_tag": "int8-v0"}, "format 'int8-v0' of representation 'int8', and the installed one reads"),
        (
            {"hiqcache.representation": "bf16", "hiqcache.format_tag": "bf16-v1"},
            "format 'bf16-v1' has payload bfloat16",
        ),
    ],
    ids=str,
)
def test_values_that_cannot_be_had(tmp_path: pathlib.Path, int8: pathlib.Path, text: dict, message: str):
    file = rewritten(int8, tmp_path / "file", **text)
    assert run(file).exit_code == 0
    refused = run(file, "--decode", tmp_path / "out")
    assert refused.exit_code == 1
    assert message in refused.output


def header_of(file: pathlib.Path) -> tuple[dict, bytes]:
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def with_header(file: pathlib.Path, header: object, data: bytes) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def _tensor(**changes: Any) -> Callable[[pathlib.Path], None]:
    def damage(file: pathlib.Path) -> None:
        header, data = header_of(file)
        header["k.scales"] |= changes
        with_header(file, header, data)

    return damage


def _more_tensors(name: str, shape: list[int]) -> Callable[[pathlib.Path], None]:
    def damage(file: pathlib.Path) -> None:
        header, data = header_of(file)
        end = len(data) + math.prod(shape)
        header[name] = {"dtype": "U8", "shape": shape, "data_offsets": [len(data), end]}
        with_header(file, header, data.ljust(end, b"x"))

    return damage


def _metadata_of_numbers(file: pathlib.Path) -> None:
    header, data = header_of(file)
    header["__metadata__"]["hiqcache.tp_rank"] = 0
    with_header(file, header, data)


def _endless_pages(file: pathlib.Path) -> None:
    """A page axis of any length takes no bytes where another axis is 0."""
    header, _ = header_of(file)
    text = {"hiqcache.page_ids": "0-999999999", "hiqcache.pool_pages": "1000000000"}
    entry = {"dtype": "U8", "shape": [2, 10**9, 0], "data_offsets": [0, 0]}
    tensors = {name: entry for name in header if name != "__metadata__"}
    with_header(file, tensors | {"__metadata__": header["__metadata__"] | text}, b"")


def _pipe(file: pathlib.Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _without_v(file: pathlib.Path) -> None:
    header, data = header_of(file)
    with_header(file, {name: entry for name, entry in header.items() if not name.startswith("v.")}, data)


DAMAGES: dict[str, tuple[Callable[[pathlib.Path], Any], str]] = {
    "empty": (lambda file: file.write_bytes(b""), "no safetensors file: it has 0 bytes"),
    "text": (lambda file: file.write_text("hello, this is text"), "first 8 bytes are no length of a header"),
    "half": (lambda file: os.truncate(file, file.stat().st_size // 2), "truncated: its tensors need"),
    "one byte short": (lambda file: os.truncate(file, file.stat().st_size - 1), "truncated: its tensors need"),
    "half a header": (lambda file: os.truncate(file, 100), "truncated: its header has"),
    "no JSON": (lambda file: with_header(file, b"{not json}", b""), "its header is not JSON"),
    "no table": (lambda file: with_header(file, [1, 2], b""), "its header is not a table of tensors"),
    "metadata no table": (lambda file: with_header(file, {"__metadata__": 3}, b""), "is not a table of tensors"),
    "nothing in it": (lambda file: with_header(file, {}, b""), "no dump of hiqcache"),
    "a foreign model": (
        lambda file: safetensors.torch.save_file({"weight": torch.zeros(3)}, file),
        "it is a safetensors file, but no dump of hiqcache",
    ),
    "more at the end": (lambda file: file.write_bytes(file.read_bytes() + b"x"), "safetensors cannot open it"),
    "unknown type": (_tensor(dtype="F3"), "tensor 'k.scales' has element type 'F3'; known: BOOL, U8"),
    "negative axis": (_tensor(shape=[-2, 5, 4, 3]), "tensor 'k.scales' is not described as safetensors does"),
    "no shape": (_tensor(shape=None), "tensor 'k.scales' is not described as safetensors does"),
    "other layers": (_tensor(shape=[1, 10, 4, 3]), "tensor 'k.scales' has axes [1, 10, 4, 3]"),
    "shape larger than its bytes": (
        _tensor(shape=[2, 5, 4, 4]),
        "has 240 bytes in the file; axes [2, 5, 4, 4] of BF16 need 320",
    ),
    "overlapping": (_tensor(data_offsets=[0, 240]), "safetensors cannot open it"),
    "foreign tensor": (_more_tensors("q.payload", [1]), "tensor 'q.payload' is none of a dump's"),
    "a pipe": (_pipe, "it is no regular file"),
    "metadata of numbers": (_metadata_of_numbers, "its metadata is not all text"),
    "an empty tensor": (_more_tensors("k.more", [2, 5, 0]), "tensor 'k.more' has axes [2, 5, 0], and so no elements"),
    "endless pages": (_endless_pages, "there are 1,000,000,000 of them, and 0 pages in the file"),
    "no V": (_without_v, "it has no tensor of V"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_and_foreign_files(int8: pathlib.Path, damage: str):
    change, message = DAMAGES[damage]
    change(int8)
    result = run(int8)
    assert result.exit_code == 1
    assert message in result.output
    assert f"{int8}: " in result.output
    assert len(result.output.splitlines()) == 1


@pytest.mark.parametrize("seed", range(40))
def test_random_damage_is_a_sentence_or_a_result(int8: pathlib.Path, seed: int):
    """Bytes of the header changed at random: no traceback, whatever comes out."""
    generator = torch.Generator().manual_seed(seed)
    raw = bytearray(int8.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    for place in torch.randint(8 + length, (3,), generator=generator).tolist():
        raw[place] = int(torch.randint(256, (1,), generator=generator))
    int8.write_bytes(raw)
    assert run(int8).exit_code in (0, 1)


def test_a_file_that_is_not_there(tmp_path: pathlib.Path):
    result = run(tmp_path / "nothing")
    assert result.exit_code == 1
    assert "nothing: No such file or directory" in result.output


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_tables(int8: pathlib.Path, bf16: pathlib.Path):
    lines = run(int8).stdout.splitlines()
    assert "int8 (int8-head-v2)" in lines[0]
    assert lines[1] == "TP rank 0 of 1: 2 layers, 3 local KV heads x 64; 5 of 12 pages of 4, 20 tokens"
    rows = [line.split() for line in lines if line[:2] in ("K ", "V ")]
    assert [row[:2] for row in rows] == [["K", "0"], ["K", "1"], ["V", "0"], ["V", "1"]]
    for row in rows:
        assert row[3] == "-127..127"
        assert row[7] == "8"
        # Each of a head's 64 values has one of the largest magnitude, and few have two.
        assert 1.56 <= float(row[5].rstrip("%")) < 3
    (worst,) = (line for line in lines if line.startswith("fewest effective bits: "))
    figures = [float(piece.split()[-1]) for piece in worst.split(",")]
    assert figures == sorted(figures)
    assert len(figures) == 8
    compared = run(int8, "--compare", bf16).stdout
    assert "relative RMS error: K 0." in compared
    assert "finding" not in compared


def test_json(int8: pathlib.Path):
    document = json.loads(run(int8, "--json").stdout)
    assert document["representation"] == "int8"
    assert document["page_ids"] == "0-2,5,9"
    assert document["pages"] == 5
    assert document["geometry"]["dtype"] == "bfloat16"
    payload = document["sections"]["v.payload"]
    assert [len(row) for row in payload["bits"]] == [3, 3]
    smallest = min(min(row) for name in ("k", "v") for row in document["sections"][f"{name}.payload"]["bits"])
    assert next(iter(document["worst_heads"].values())) == smallest


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plots(tmp_path: pathlib.Path, int8: pathlib.Path, bf16: pathlib.Path, suffix: str):
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    begins = {"png": b"\x89PNG", "svg": b"<?xml"}[suffix]
    for number, words in enumerate([(int8,), (bf16,), (int8, "--compare", bf16)]):
        file = tmp_path / f"{number}.{suffix}"
        assert run(*words, "--plot", file).exit_code == 0
        assert file.read_bytes().startswith(begins)
    if suffix == "svg":
        text = (tmp_path / "0.svg").read_text()
        assert "K: effective bits" in text
        assert "V: saturated (%)" in text
        assert "K: largest of scales" in text


def test_a_plot_takes_no_files_place(tmp_path: pathlib.Path, int8: pathlib.Path):
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    dump, out, link = int8.rename(tmp_path / "dump.png"), tmp_path / "out.png", tmp_path / "link.png"
    link.symlink_to(dump)
    before = dump.read_bytes()
    for words in [(dump, "--plot", dump), (dump, "--plot", link), (dump, "--decode", out, "--plot", out)]:
        result = run(*words)
        assert result.exit_code == 2
        assert "is another file of this command" in result.output
    assert dump.read_bytes() == before
    assert not out.exists()


def test_a_plot_that_cannot_be(tmp_path: pathlib.Path, int8: pathlib.Path):
    result = run(int8, "--plot", tmp_path / "picture.jpg")
    assert result.exit_code == 2
    assert "does not end in .png or .svg" in result.output
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    result = run(int8, "--plot", tmp_path / "missing" / "picture.png")
    assert result.exit_code == 2
    assert f"there is no folder '{tmp_path / 'missing'}'" in result.output


def test_reading_takes_little_memory(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """No more is read at once than a chunk of one layer."""
    monkeypatch.setattr(reader, "CHUNK_VALUES", 4 * 3 * 64 * 2)
    of = Int8(GEOMETRY)
    dump_arena(
        random_arena(of, 60, "page_first", torch.Generator().manual_seed(0)),
        metadata(of, tuple(range(60)), pool_pages=60),
        tmp_path / "file",
    )
    largest = 0
    read = Dump.read

    def watched(self, *arguments):
        nonlocal largest
        found = read(self, *arguments)
        largest = max(largest, found.nbytes)
        return found

    monkeypatch.setattr(Dump, "read", watched)
    with Dump(tmp_path / "file") as dump:
        measure(dump)
        write_decoded(dump, tmp_path / "decoded")
    assert largest == 2 * 4 * 3 * 64
