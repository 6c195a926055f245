"""Does a device encode and decode the very bytes that a format says? Test vectors, and the check against them.

\b
    python tools/conformance.py generate --out tests/vectors
    python tools/conformance.py verify --device cpu|cuda|mps

A file of vectors, `NAME-HEADSxDIM.safetensors`, opens without hiqcache. For each case it holds `CASE.values`
`[blocks, page_size, heads, dim]` BF16, `CASE.blocks` `[blocks, block_bytes]` uint8 that they encode to, and
`CASE.decoded`, the shape of the values, that those bytes decode to. Bytes and decoded values come from exact rational
arithmetic in this file, written from the formats' definition in docs/design.md, and not from the code under test.

`verify` runs every case through the representation's `encode` and `decode` on the device, and through the transfer that
serves there (fused kernels on CUDA): pages shuffled, destinations filled with noise first. It compares bit for bit, and
exits with status 1 if a bit differs. `mps` is offered and was never run.
"""

import importlib.metadata
import json
import math
import platform
import random
import struct
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

import click
import torch
from attrs import asdict, frozen
from results import Commands, writable
from rich.table import Column
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hiqcache import registry
from hiqcache.arena import ArenaShape, HostArena
from hiqcache.commands._table import print_table
from hiqcache.geometry import HiqcacheError, KVGeometry, Part
from hiqcache.representation import HostRepresentation
from hiqcache.transfer import DeviceRows, make_transfer

VECTORS = Path(__file__).parent.parent / "tests" / "vectors"
SHAPES = {(8, 128): 1, (3, 64): 4, (1, 128): 2}
"""(Heads, dim) of the vectors -> page size; int8 pads a block of each."""
BLOCKS = {1: 3, 2: 1, 4: 1}
"""Page size -> blocks of each case."""
Bits = list[int]
"""BF16 numbers by their bits."""

LARGEST, INFINITY, QUIET_NAN, NEGATIVE, ONE = 0x7F7F, 0x7F80, 0x7FC0, 0x8000, 0x3F80


# The formats, by exact arithmetic. ----------------------------------------------------------------------------------


def value(bits: int) -> Fraction:
    """The number that finite BF16 bits stand for."""
    exponent, mantissa = bits >> 7 & 0xFF, bits & 0x7F
    magnitude = Fraction(mantissa | 0x80 if exponent else mantissa) * Fraction(2) ** (max(exponent, 1) - 134)
    return -magnitude if bits & NEGATIVE else magnitude


def nearest(x: Fraction) -> int:
    """Bits of the BF16 number nearest to x, ties to even, saturated to the largest finite one."""
    sign, x = (NEGATIVE, -x) if x < 0 else (0, x)
    if not x:
        return sign
    exponent = max(math.frexp(x)[1] - 1, -126)  # float64 may round x up to a power of two, hence the correction
    exponent -= x < Fraction(2) ** exponent and exponent > -126
    units = round(x / Fraction(2) ** (exponent - 7))  # in units of the last place; Python rounds ties to even
    return sign | min((exponent + 126 << 7) + units, LARGEST)


def int8_head(head: Bits) -> tuple[list[int], int, Bits]:
    """INT8 values, bits of the scale and bits of the decoded values of one head."""
    if any(bits & INFINITY == INFINITY for bits in head):
        return [0] * len(head), QUIET_NAN, [QUIET_NAN] * len(head)
    x = [value(bits) for bits in head]
    scale_bits = nearest(max(max(map(abs, x)), Fraction(2) ** -112) / 127)
    scale = value(scale_bits)
    q = [max(-127, min(127, round(number / scale))) for number in x]
    return q, scale_bits, [nearest(number * scale) for number in q]


Block = list[list[Bits]]
"""`[page_size][heads]` of heads."""


def int8_block(tokens: Block) -> tuple[bytes, Block]:
    """Bytes of a block, and its decoded heads: INT8 of all tokens, scales of all tokens, zeros."""
    coded = [[int8_head(head) for head in heads] for heads in tokens]
    flat = [head for heads in coded for head in heads]
    payload = b"".join(struct.pack(f"<{len(q)}b", *q) for q, _, _ in flat)
    used = payload + struct.pack(f"<{len(flat)}H", *(scale for _, scale, _ in flat))
    block = used + bytes(-len(used) % math.lcm(128, len(tokens)))
    return block, [[decoded for _, _, decoded in heads] for heads in coded]


def bf16_block(tokens: Block) -> tuple[bytes, Block]:
    """The values as they are."""
    return b"".join(struct.pack(f"<{len(head)}H", *head) for heads in tokens for head in heads), tokens


def float32(x: Fraction) -> Fraction:
    """The float32 number nearest to x, ties to even, of a range without ends."""
    if not x:
        return x
    unit = Fraction(2) ** (math.frexp(x)[1] - 24)  # if float64 rounds x up to a power of two, so does float32
    return round(x / unit) * unit


def butterflies(x: list[Fraction]) -> list[Fraction]:
    """Sums and differences of float32 numbers, each rounded, in the order that docs/design.md says."""
    step, block = 1, len(x) & -len(x)
    while step < block:
        for first in (i for i in range(len(x)) if not i & step):
            a, b = x[first], x[first + step]
            x[first], x[first + step] = float32(a + b), float32(a - b)
        step *= 2
    return x


def rotated(head: Bits) -> list[Fraction]:
    x = [value(bits) for bits in head]
    block = len(x) & -len(x)
    return butterflies([number / block if abs(number) >= Fraction(2) ** -100 else Fraction(0) for number in x])


def rotated_back(y: list[Fraction]) -> Bits:
    block = len(y) & -len(y)
    return [nearest(number * block) for number in butterflies([number / block for number in y])]


def coarse(largest: Fraction, levels: int, mantissa_bits: int) -> Fraction:
    """The scale for a largest magnitude: of one half less than `levels`, rounded half up to few bits."""
    if not largest:
        return Fraction(0)
    quotient = float32(largest / (levels - Fraction(1, 2)))
    unit = Fraction(2) ** (math.frexp(quotient)[1] - 1 - mantissa_bits)
    return (quotient / unit + Fraction(1, 2)).__floor__() * unit


def exponent_of(scale: Fraction) -> int:
    """As a float32 number stores it; 0 of zero."""
    return math.frexp(scale)[1] + 126 if scale else 0


def code_of(y: Fraction, scale: Fraction, levels: int) -> int:
    quotient = float32(float32(y * float32(1 / scale)) + levels) if scale else Fraction(levels)
    return int(min(max(quotient, Fraction(0)), Fraction(2 * levels - 1)))


def middle(code: int, scale: Fraction, levels: int) -> Fraction:
    return (code - levels + Fraction(1, 2)) * scale


def packed(codes: list[int], bits: int) -> bytes:
    """The first of neighbours in the lowest bits."""
    count = 8 // bits
    return bytes(sum(codes[i + j] << bits * j for j in range(count)) for i in range(0, len(codes), count))


Sections = tuple[bytes, ...]
"""What one head adds to each section of its block."""


def lost(head: Bits) -> bool:
    return any(bits & INFINITY == INFINITY for bits in head)


def four_bit_head(head: Bits, size: int) -> tuple[Sections, Bits]:
    """Codes, bytes of groups and byte of the head; decoded values."""
    y = rotated([0] * len(head) if lost(head) else head)
    groups = [y[i : i + size] for i in range(0, len(y), size)]
    scales = [coarse(max(map(abs, group)), 8, 3) for group in groups]
    top = exponent_of(max(scales))
    if top:
        scales = [max(scale, Fraction(2) ** (top - 127 - 3)) for scale in scales]
    codes = [code_of(number, scale, 8) for group, scale in zip(groups, scales, strict=True) for number in group]
    mantissas = [int(scale * 8 / Fraction(2) ** (exponent_of(scale) - 127)) - 8 if scale else 0 for scale in scales]
    below = bytes(top - exponent_of(s) << 3 | m for s, m in zip(scales, mantissas, strict=True))
    decoded = rotated_back([middle(code, scales[i // size], 8) for i, code in enumerate(codes)])
    sections = packed(codes, 4), below, bytes([255 if lost(head) else top])
    return sections, [QUIET_NAN] * len(head) if lost(head) else decoded


def six_bit_head(head: Bits) -> tuple[Sections, Bits]:
    """Upper and lower bits of the codes, the scale; decoded values."""
    y = rotated([0] * len(head) if lost(head) else head)
    scale = coarse(max(map(abs, y)), 32, 5)
    codes = [code_of(number, scale, 32) for number in y]
    bits = QUIET_NAN if lost(head) else nearest(scale)
    sections = (
        packed([code >> 2 for code in codes], 4),
        packed([code & 3 for code in codes], 2),
        struct.pack("<H", bits),
    )
    decoded = rotated_back([middle(code, scale, 32) for code in codes])
    return sections, [QUIET_NAN] * len(head) if lost(head) else decoded


def in_sections(code: Callable[[Bits], tuple[Sections, Bits]]) -> Callable[[Block], tuple[bytes, Block]]:
    """Blocks of heads: each section of all tokens and heads after the other, zeros."""

    def block(tokens: Block) -> tuple[bytes, Block]:
        coded = [[code(head) for head in heads] for heads in tokens]
        used = b"".join(map(b"".join, zip(*(sections for heads in coded for sections, _ in heads), strict=True)))
        return used + bytes(-len(used) % math.lcm(128, len(tokens))), [[head for _, head in heads] for heads in coded]

    return block


FORMATS: dict[str, dict[tuple[Part, ...], Callable[[Block], tuple[bytes, Block]]]] = {
    "bf16": {tuple(Part): bf16_block},
    "int4": {tuple(Part): in_sections(lambda head: four_bit_head(head, 16))},
    "int8": {tuple(Part): int8_block},
    "k6v4": {(Part.K,): in_sections(six_bit_head), (Part.V,): in_sections(lambda head: four_bit_head(head, 32))},
}
"""Representation -> parts that are stored alike -> bytes and decoded heads of one block."""


# What is encoded. ---------------------------------------------------------------------------------------------------


def rounded(x: float) -> int:
    return nearest(Fraction(x))


def unit(rng: random.Random, dim: int) -> Bits:
    return [rounded(rng.gauss(0, 1)) for _ in range(dim)]


def model_shaped(rng: random.Random, dim: int) -> Bits:
    """As K looks in real models: an offset and a spread of its own for each channel, a few of them large."""
    channels = random.Random(dim)
    means = [channels.gauss(0, 8) if channels.random() < 0.05 else channels.gauss(0, 0.5) for _ in range(dim)]
    spreads = [math.exp(channels.gauss(-0.5, 0.7)) for _ in range(dim)]
    return [rounded(rng.gauss(mean, spread)) for mean, spread in zip(means, spreads, strict=True)]


def large(rng: random.Random, dim: int) -> Bits:
    exponent = rng.randrange(60, 126)
    return [rounded(rng.gauss(0, 0.3) * 2.0**exponent) for _ in range(dim)]


def zero(rng: random.Random, dim: int) -> Bits:
    return [rng.choice((0, NEGATIVE)) for _ in range(dim)]


def exact_grid(rng: random.Random, dim: int) -> Bits:
    """Multiples of a power of two up to 127: int8 gives them back exactly."""
    exponent = rng.randrange(-60, 60)
    numbers = [127, *(rng.randrange(-127, 128) for _ in range(dim - 1))]
    return [rounded(number * 2.0**exponent) for number in numbers]


def outliers(rng: random.Random, dim: int) -> Bits:
    head = unit(rng, dim)
    head[rng.randrange(dim)] = rounded(rng.choice((-1, 1)) * rng.uniform(50, 5000))
    return head


def subnormal(rng: random.Random, dim: int) -> Bits:
    """Subnormal numbers and the smallest normal ones; in every other head, beside an ordinary value."""
    head = [rng.randrange(0, 0x0100) | rng.choice((0, NEGATIVE)) for _ in range(dim)]
    if rng.random() < 0.5:
        head[rng.randrange(dim)] = ONE
    return head


def largest(rng: random.Random, dim: int) -> Bits:
    head = [rng.choice((LARGEST, rng.randrange(0x7E00, LARGEST))) | rng.choice((0, NEGATIVE)) for _ in range(dim)]
    head[0] = LARGEST
    return head


def ties(rng: random.Random, dim: int) -> Bits:
    """Halves of a step, which round to even."""
    exponent = rng.randrange(-40, 40)
    return [
        rounded(number * 2.0**exponent) for number in [127, *(rng.randrange(-64, 64) + 0.5 for _ in range(dim - 1))]
    ]


def not_finite(rng: random.Random, dim: int) -> Bits:
    """NaN of several kinds and infinities, in two heads of three."""
    head = unit(rng, dim)
    for _ in range(rng.randrange(3)):
        head[rng.randrange(dim)] = rng.choice((INFINITY, NEGATIVE | INFINITY, QUIET_NAN, 0xFFC0, 0x7F81, 0xFFFF))
    return head


CASES = {
    "random-unit": unit,
    "model-shaped": model_shaped,
    "large": large,
    "all-zero": zero,
    "exact-grid": exact_grid,
    "ties": ties,
    "outliers": outliers,
    "subnormal": subnormal,
    "largest-bf16": largest,
    "nan-and-infinity": not_finite,
}
"""Name -> one head of `dim` BF16 numbers."""


def tensor(numbers: object, dtype: torch.dtype) -> torch.Tensor:
    """Nested lists of bits as a tensor of `dtype` (BF16 or uint8)."""
    wide = torch.tensor(numbers, dtype=torch.int32)
    return wide.to(torch.uint8) if dtype == torch.uint8 else wide.to(torch.int16).view(dtype)


def expected(name: str, parts: tuple[Part, ...], values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a format's definition says of `values`.

    Args:
        name: a key of `FORMATS`.
        parts: a key of that.
        values: `[blocks, page_size, heads, dim]` BF16.

    Returns:
        `[blocks, block_bytes]` uint8, and decoded values in the shape of `values`.
    """
    bits = (values.view(torch.int16).int() & 0xFFFF).tolist()
    blocks = [FORMATS[name][parts](block) for block in bits]
    return tensor([list(raw) for raw, _ in blocks], torch.uint8), tensor([each for _, each in blocks], torch.bfloat16)


def file_name(name: str, parts: tuple[Part, ...], heads: int, dim: int) -> str:
    return "-".join([name, *(part.value for part in parts if len(parts) < len(Part)), f"{heads}x{dim}.safetensors"])


@click.group(cls=Commands, help=__doc__)
def main() -> None:
    pass


@main.command()
@click.option("--out", default=VECTORS, show_default=True, type=click.Path(path_type=Path), help="Folder to write to.")
def generate(out: Path) -> None:
    """Write the vectors."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.ClickException(f"cannot make {out}: {error.strerror} (--out)") from error
    for (heads, dim), page_size in SHAPES.items():
        rng = random.Random(f"{heads}x{dim}")
        values = {
            case: tensor(
                [[[head(rng, dim) for _ in range(heads)] for _ in range(page_size)] for _ in range(BLOCKS[page_size])],
                torch.bfloat16,
            )
            for case, head in CASES.items()
        }
        for name, parts in ((name, parts) for name, formats in FORMATS.items() for parts in formats):
            tensors = {}
            for case, given in values.items():
                blocks, decoded = expected(name, parts, given)
                tensors |= {f"{case}.values": given, f"{case}.blocks": blocks, f"{case}.decoded": decoded}
            metadata = {
                "representation": name,
                "format_tag": registry.get(name).format_tag,
                "parts": "".join(part.value for part in parts),
                "heads": str(heads),
                "dim": str(dim),
                "page_size": str(page_size),
                "expected": "exact rational arithmetic, tools/conformance.py",
            }
            path = out / file_name(name, parts, heads, dim)
            save_file({key: value.contiguous() for key, value in tensors.items()}, path, metadata)
            click.echo(f"{path}: {len(values)} cases, {path.stat().st_size:,} bytes")


# The check. ---------------------------------------------------------------------------------------------------------


@frozen
class Outcome:
    """One case on one device by one road; errors are of finite heads, against the values given.

    Attributes:
        road: `codec` (encode and decode) or the class of the transfer.
        wrong_bytes, wrong_values: differences from the vectors.
        max_steps: largest error in units of the head's scale; None where the format has no scales.
        mean_error, p99_error: of the absolute error; None where nothing is finite.
    """

    file: str
    case: str
    road: str
    wrong_bytes: int
    wrong_values: int
    max_steps: float | None
    mean_error: float | None
    p99_error: float | None


@frozen
class Case:
    """One case of a file, on the CPU; `parts` are those of which it is true."""

    file: str
    name: str
    parts: list[Part]
    values: torch.Tensor
    blocks: torch.Tensor
    decoded: torch.Tensor


def load(path: Path) -> tuple[HostRepresentation, list[Case]]:
    """A file's representation, bound to its geometry, and its cases.

    Raises:
        HiqcacheError: it is no file of vectors, or the installed representation has another format.
    """
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise HiqcacheError(f"{path} cannot be read: {error}") from error
    if not {"representation", "format_tag"} <= about.keys():
        raise HiqcacheError(f"{path} is a safetensors file, but holds no vectors of this tool (--vectors)")
    cls = registry.get(about["representation"])
    if cls.format_tag != about["format_tag"]:
        raise HiqcacheError(
            f"{path} holds {about['format_tag']!r}, but {cls.name!r} here is {cls.format_tag!r}: use the vectors that "
            "belong to this version (--vectors)"
        )
    names, kinds = sorted({key.rpartition(".")[0] for key in tensors}), ("values", "blocks", "decoded")
    if not names or tensors.keys() != {f"{name}.{kind}" for name in names for kind in kinds}:
        raise HiqcacheError(f"{path} has no vectors, or parts of some are missing (--vectors)")
    try:
        heads, dim, page_size = (int(about[key]) for key in ("heads", "dim", "page_size"))
        geometry = KVGeometry(layers=2, heads=heads, head_dim=dim, v_head_dim=dim, page_size=page_size)
    except (KeyError, ValueError) as error:
        raise HiqcacheError(f"{path} does not say which heads, dim and page_size its vectors have") from error
    if not (parts := [part for part in Part if part.value in about.get("parts", "")]):
        raise HiqcacheError(f"{path} does not say of which parts its vectors are; allowed: k, v, kv")
    representation = cls(geometry)
    values = torch.bfloat16, [page_size, heads, dim]
    wanted = dict(
        zip(kinds, (values, (torch.uint8, [representation.layouts[parts[0]].block_bytes]), values), strict=True)
    )
    for name in names:
        counts = {len(tensors[f"{name}.{kind}"]) for kind in kinds}
        found = {kind: (tensors[f"{name}.{kind}"].dtype, [*tensors[f"{name}.{kind}"].shape[1:]]) for kind in kinds}
        if found != wanted or len(counts) > 1 or counts == {0}:
            raise HiqcacheError(f"{path}: {name} holds {found} of {counts} blocks; wanted {wanted}, of one number")
    return representation, [
        Case(path.stem, name, parts, *(tensors[f"{name}.{kind}"] for kind in kinds)) for name in names
    ]


def by_codec(representation: HostRepresentation, case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks that the device encodes, and values that it decodes from the vectors' blocks, for each part."""
    results = []
    for part in case.parts:
        blocks = torch.full_like(case.blocks, 0x55, device=device)
        decoded = torch.full_like(case.decoded, -7, device=device)
        representation.encode(case.values.to(device), part, blocks)
        representation.decode(case.blocks.to(device), part, decoded)
        results.append((blocks.cpu(), decoded.cpu()))
    return tuple(torch.stack(tensors) for tensors in zip(*results, strict=True))  # pyright: ignore[reportReturnType]


def by_transfer(
    representation: HostRepresentation, case: Case, device: str, arrangement: str
) -> tuple[torch.Tensor, torch.Tensor, str]:
    """The same through the transfer that a host pool would use there, every layer and part, pages reversed."""
    geometry = representation.geometry
    pages, page_size = len(case.values), geometry.page_size
    shape = ArenaShape.of(representation, pages, arrangement)
    buffer = torch.full((shape.total_bytes,), 0x55, dtype=torch.uint8)
    arena = HostArena(shape, buffer.pin_memory() if device == "cuda" else buffer)
    filled = [[case.values.flatten(0, 1).to(device, copy=True) for _ in range(geometry.layers)] for _ in Part]
    rows = DeviceRows(*filled)
    transfer = make_transfer(representation, arena, rows)
    slots = torch.arange(pages * page_size)
    reversed_pages = slots.view(pages, page_size).flip(0).flatten()
    host = reversed_pages.to(transfer.host_indices_device)

    transfer.backup(host, slots.to(device))
    if device == "cuda":
        torch.cuda.synchronize()
    blocks = torch.stack([arena.blocks(part).flip(1).clone() for part in case.parts])

    for part in case.parts:
        arena.blocks(part).copy_(case.blocks.flip(0).expand(geometry.layers, -1, -1))
        for row in rows.of(part):
            row.fill_(-7)
    for layer in range(geometry.layers):
        transfer.restore(layer, host, slots.to(device))
    if device == "cuda":
        torch.cuda.synchronize()
    decoded = torch.stack([torch.stack([row.cpu() for row in rows.of(part)]) for part in case.parts])
    return blocks, decoded.view(*decoded.shape[:2], *case.decoded.shape), type(transfer).__name__


def judge(
    representation: HostRepresentation, case: Case, road: str, blocks: torch.Tensor, decoded: torch.Tensor
) -> Outcome:
    """Compare `[..., *case.blocks.shape]` and `[..., *case.decoded.shape]` with the vectors."""
    wrong_bytes = int((blocks != case.blocks).sum())
    wrong_values = int((decoded.view(torch.int16) != case.decoded.view(torch.int16)).sum())
    finite = case.values.isfinite().all(-1)
    errors = (decoded.double() - case.values.double()).abs()[..., finite, :]
    layout = representation.layouts[case.parts[0]]
    steps = None
    if "scales" in layout and errors.numel():
        scales = layout.view(case.blocks, "scales").double()[finite]
        steps = float((errors / scales[..., None]).max())
    return Outcome(
        case.file,
        case.name,
        road,
        wrong_bytes,
        wrong_values,
        steps,
        float(errors.mean()) if errors.numel() else None,
        float(errors.flatten().quantile(0.99)) if errors.numel() else None,
    )


def outcomes(paths: list[Path], device: str) -> Iterator[Outcome]:
    """Every case by every road."""
    for path in paths:
        representation, cases = load(path)
        for case in cases:
            yield judge(representation, case, "codec", *by_codec(representation, case, device))
            for arrangement in ("page_first", "layer_first") if device != "mps" else ():
                blocks, decoded, road = by_transfer(representation, case, device, arrangement)
                yield judge(representation, case, f"{road} {arrangement}", blocks, decoded)


def available(device: str) -> bool:
    return {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}[device]


def write(out: Path, device: str, found: list[Outcome]) -> None:
    result = {
        "what": "encoder and decoder of each representation against committed vectors, bit for bit",
        "command": f"python tools/conformance.py verify --device {device}",
        "device": torch.cuda.get_device_name() if device == "cuda" else f"{device}, {platform.machine()}",
        "versions": {name: importlib.metadata.version(name) for name in ("hiqcache", "torch")},
        "outcomes": [asdict(outcome) for outcome in found],
    }
    out.write_text(json.dumps(result, indent=1) + "\n")


def number(x: float | None) -> str:
    return "-" if x is None else f"{x:.4g}"


@main.command()
@click.option("--device", type=click.Choice(("cpu", "cuda", "mps")), default="cpu", show_default=True)
@click.option(
    "--vectors", default=VECTORS, show_default=True, type=click.Path(exists=True, path_type=Path), help="Their folder."
)
@click.option("--out", type=click.Path(path_type=Path), callback=writable, help="JSON file to write.")
def verify(device: str, vectors: Path, out: Path | None) -> None:
    """Check a device's encoders and decoders against the vectors."""
    paths = sorted(vectors.glob("*.safetensors"))
    if not paths:
        raise click.ClickException(f"no *.safetensors in {vectors}; name the folder of the vectors with --vectors")
    if not available(device):
        raise click.ClickException(f"PyTorch sees no {device} device here; choose another with --device")
    if device == "mps":
        click.echo("mps: never run by this project; its transfer is not checked, only encode and decode", err=True)
    found = list(outcomes(paths, device))
    titles = ("wrong bytes", "wrong values", "max |x^-x|/s", "mean |x^-x|", "p99 |x^-x|")
    rows = []
    for o in found:
        figures = map(number, (o.max_steps, o.mean_error, o.p99_error))
        rows.append((o.file, o.case, o.road, str(o.wrong_bytes), str(o.wrong_values), *figures))
    print_table(["vectors", "case", "road", *(Column(title, justify="right") for title in titles)], rows)
    if out:
        write(out, device, found)
    wrong = sum(1 for outcome in found if outcome.wrong_bytes or outcome.wrong_values)
    click.echo(f"{device}: {len(found) - wrong} of {len(found)} checks agree in every bit")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
