"""Rotated heads in 4 bits a value, with a one-byte scale for each group of neighbouring values.

Scales and codes are those of `hiqcache/numerics/scales.py` for 8 levels and 3 mantissa bits, but no scale is below
`2**(E - 3)`, where `2**E` is the power of two below the head's largest. A group's byte holds how far its exponent is
below E, and the mantissa; the head's byte holds E. A head of zeros has the byte 0, one with infinity or NaN in it has
255 and decodes to NaN throughout.
"""

from collections.abc import Iterator

import torch

from hiqcache.geometry import Violation
from hiqcache.numerics import planes
from hiqcache.numerics.rotation import block_of, bound_of, rotate, rotate_back
from hiqcache.numerics.scales import dequantise, from_bits, quantise, scale_bits
from hiqcache.representation import BlockLayout

LEVELS, MANTISSA_BITS = 8, 3
FARTHEST = 3
"""A group's exponent lies this far below its head's at most."""
NOT_FINITE = 255
SMALLEST_BLOCK = 16
"""Narrower rotations spread too little to be worth a format."""


def size_of(dim: int, wanted: int) -> int:
    """Values in a group: `wanted`, or fewer where blocks of the rotation are smaller."""
    return min(wanted, block_of(dim))


def pair_bytes(dim: int, wanted: int) -> int:
    """Bytes of one token and head."""
    return dim // 2 + dim // size_of(dim, wanted) + 1


def sections(heads: int, dim: int, wanted: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """For one token, as `BlockLayout.arrays` takes them: packed codes, a byte for each group, one for each head."""
    return {
        "codes": (torch.uint8, (heads, dim // 2)),
        "groups": (torch.uint8, (heads, dim // size_of(dim, wanted))),
        "heads": (torch.uint8, (heads,)),
    }


def requirements(dim: int) -> Iterator[Violation]:
    """The rule that heads are wide enough to be rotated, if `dim` breaks it."""
    if dim % SMALLEST_BLOCK:
        yield Violation(
            rule="values of a head, which are rotated in blocks of a power of two",
            seen=str(dim),
            allowed=f"a multiple of {SMALLEST_BLOCK}",
            flag="the model (its head_dim)",
        )


def encode(values: torch.Tensor, wanted: int, layout: BlockLayout, out: torch.Tensor) -> None:
    """Rotate and encode blocks whose layout has `sections`; arguments as for `HostRepresentation.encode`."""
    x = values.float()
    finite = x.isfinite().all(-1)
    y = _grouped(rotate(x.masked_fill(~finite[..., None], 0)), wanted)
    group, head = _scale_bytes(y)
    codes = quantise(y, _scales(group, head)[..., None], LEVELS)
    layout.view(out, "codes").copy_(planes.pack(codes.flatten(-2), 4))
    layout.view(out, "groups").copy_(group)
    layout.view(out, "heads").copy_(head.masked_fill(~finite, NOT_FINITE))
    layout.clear_padding(out)


def decode(blocks: torch.Tensor, layout: BlockLayout, out: torch.Tensor) -> None:
    """Decode what `encode` wrote; arguments as for `HostRepresentation.decode`."""
    group, head = layout.view(blocks, "groups"), layout.view(blocks, "heads")
    lost = head == NOT_FINITE
    scales = _scales(group, head.masked_fill(lost, 0))
    codes = planes.unpack(layout.view(blocks, "codes"), 4).unflatten(-1, (scales.shape[-1], -1))
    x = rotate_back(dequantise(codes, scales[..., None], LEVELS).flatten(-2))
    out.copy_(x).masked_fill_(lost[..., None], torch.nan)


def error_bound(values: torch.Tensor, decoded: torch.Tensor, wanted: int) -> torch.Tensor:
    """As `HostRepresentation.error_bound` has it: half a step of its group in each rotated value."""
    y = _grouped(rotate(values.float()), wanted)
    scales = _scales(*_scale_bytes(y)).double()
    return bound_of(scales.repeat_interleave(y.shape[-1], -1) / 2, decoded)


def _grouped(y: torch.Tensor, wanted: int) -> torch.Tensor:
    """`[..., dim]` -> `[..., groups, size]`."""
    return y.unflatten(-1, (-1, size_of(y.shape[-1], wanted)))


def _scale_bytes(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of the groups `[..., groups]` and of the heads `[...]` of rotated values `[..., groups, size]`."""
    bits = scale_bits(y.abs().amax(-1), LEVELS, MANTISSA_BITS)
    head = bits.amax(-1) >> MANTISSA_BITS
    bits = torch.maximum(bits, head[..., None] - FARTHEST << MANTISSA_BITS)
    below = head[..., None] - (bits >> MANTISSA_BITS)
    return (below << MANTISSA_BITS | bits & _MANTISSA).to(torch.uint8), head.to(torch.uint8)


def _scales(group: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """Scales `[..., groups]` float32 from bytes."""
    exponent = head.int()[..., None] - (group.int() >> MANTISSA_BITS)
    return from_bits(exponent << MANTISSA_BITS | group.int() & _MANTISSA, MANTISSA_BITS)


_MANTISSA = (1 << MANTISSA_BITS) - 1
