"""Data and expectations for the tests of transfers: what a backup and a restore must leave behind, block by block."""

import torch

from hiqcache.arena import ArenaShape, HostArena
from hiqcache.exponents import KeyExponents
from hiqcache.geometry import KVGeometry, Part
from hiqcache.representation import HostRepresentation
from hiqcache.transfer import DeviceRows

SHAPES = [(8, 128), (4, 128), (2, 128), (3, 64)]
"""(Heads, dim) that the format tests cover too."""
AWKWARD = (0x0000, 0x8000, 0x0001, 0x807F, 0x0080, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF)
"""BF16 bits: zeros, subnormals, the smallest normal, the largest, infinities, NaNs."""


def geometry(shape: tuple[int, int], page_size: int, layers: int) -> KVGeometry:
    heads, dim = shape
    return KVGeometry(layers=layers, heads=heads, head_dim=dim, v_head_dim=dim, page_size=page_size)


def random_rows(of: KVGeometry, slots: int, generator: torch.Generator, device: str = "cpu") -> DeviceRows:
    """Rows of heads that differ in magnitude; in a quarter of them some values are awkward, and some are all one."""

    def layer() -> torch.Tensor:
        shape = (slots, of.heads, of.head_dim)
        exponent = torch.randint(-120, 120, (slots, of.heads, 1), generator=generator)
        bits = (torch.randn(shape, generator=generator) * 2.0**exponent).bfloat16().view(torch.int16)
        awkward = torch.tensor(AWKWARD, dtype=torch.int32).to(torch.int16)
        chosen = awkward[torch.randint(len(AWKWARD), shape, generator=generator)]
        alike = awkward[torch.randint(len(AWKWARD), (slots, of.heads, 1), generator=generator)].expand(shape)
        kind = torch.randint(8, (slots, of.heads, 1), generator=generator)
        rare = torch.rand(shape, generator=generator) < 0.02
        bits = torch.where((kind == 0) & rare, chosen, torch.where(kind == 1, alike, bits))
        return bits.view(torch.bfloat16).to(device)

    return DeviceRows([layer() for _ in range(of.layers)], [layer() for _ in range(of.layers)])


def random_arena(
    representation: HostRepresentation, pages: int, arrangement: str, generator: torch.Generator, pin: bool = False
) -> HostArena:
    """An arena full of noise."""
    shape = ArenaShape.of(representation, pages, arrangement)
    noise = torch.randint(0, 256, (shape.total_bytes,), dtype=torch.uint8, generator=generator)
    return HostArena(shape, noise.pin_memory() if pin else noise)


def random_slots(pages: int, of: int, page_size: int, generator: torch.Generator) -> torch.Tensor:
    """Slots of `pages` different pages out of `of`, shuffled."""
    chosen = torch.randperm(of, generator=generator)[:pages]
    return (chosen[:, None] * page_size + torch.arange(page_size)).flatten()


def random_exponents(of: KVGeometry, generator: torch.Generator) -> KeyExponents:
    """Exponents of which most are 0 and a few are large."""
    shape = (of.layers, of.heads, of.head_dim)
    return KeyExponents(
        torch.randint(0, 12, shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.2)
    )


def scaled(values: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """BF16 values times powers of two, by float64: which is exact before the one rounding and saturation."""
    largest = torch.finfo(torch.bfloat16).max
    exact = values.double() * 2.0 ** exponents.double()
    return torch.where(values.isfinite(), exact.clamp(-largest, largest).bfloat16(), values)


def after_backup(
    representation: HostRepresentation, arena: HostArena, rows: DeviceRows, host: torch.Tensor, device: torch.Tensor,
    exponents: KeyExponents | None = None,
) -> torch.Tensor:  # fmt: skip
    """The arena's bytes after a backup of CPU slots, by the reference codec."""
    expected = HostArena(arena.shape, arena.buffer.clone())
    page_size = representation.geometry.page_size
    for part in Part:
        for layer, source in enumerate(rows.of(part)):
            values = source.cpu()[device].unflatten(0, (-1, page_size))
            blocks = torch.empty(len(values), arena.shape.layouts[part].block_bytes, dtype=torch.uint8)
            if exponents is not None and part is Part.K:
                values = scaled(values, -exponents.values[layer].int())
            representation.encode(values, part, blocks)
            expected.blocks(part)[layer][host[::page_size] // page_size] = blocks
    return expected.buffer


def after_restore(
    representation: HostRepresentation, arena: HostArena, rows: DeviceRows, host: torch.Tensor, device: torch.Tensor,
    exponents: KeyExponents | None = None,
) -> DeviceRows:  # fmt: skip
    """The rows, on the CPU, after a restore of CPU slots, by the reference codec."""
    page_size = representation.geometry.page_size

    def layer(part: Part, number: int) -> torch.Tensor:
        result = rows.of(part)[number].cpu().clone()
        blocks = arena.blocks(part)[number][host[::page_size] // page_size]
        values = torch.empty(len(blocks), page_size, *result.shape[1:], dtype=result.dtype)
        representation.decode(blocks, part, values)
        if exponents is not None and part is Part.K:
            values = scaled(values, exponents.values[number].int())
        result[device] = values.flatten(0, 1)
        return result

    layers = range(representation.geometry.layers)
    return DeviceRows(*([layer(part, number) for number in layers] for part in Part))


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether BF16 tensors agree in every bit, NaN included."""
    return torch.equal(actual.cpu().view(torch.int16), expected.cpu().view(torch.int16))
