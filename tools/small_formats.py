"""Candidates for formats below 8 bits, as arithmetic on values: no byte is packed here."""

import math
from functools import cache

import torch
from attrs import evolve, frozen

WIDER = {64: 1.087}
"""Root mean square of the largest of 128 normal numbers over that of so many.

Bytes are stated for heads of 128. A scale for a whole head of 64 would look better than it is, so `Grid.wider` takes
the head's largest magnitude for so much larger, as a head of 128 would have it.
"""


def bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def hadamard(like: torch.Tensor) -> torch.Tensor:
    """The orthogonal matrix of 1 and -1, scaled, that turns the last axis of `like`; its size is a power of two."""
    return _hadamard(like.shape[-1], like.dtype, like.device)


@cache
def _hadamard(dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Kept: to make it anew in each call takes a GPU longer than to turn by it."""
    matrix = torch.ones(1, 1, dtype=dtype, device=device)
    while len(matrix) < dim:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(len(matrix))


def coarse(x: torch.Tensor, mantissa_bits: int, steps: int = 0) -> torch.Tensor:
    """Positive float32 rounded half up to so many mantissa bits, then moved by whole steps of the last one."""
    dropped = 23 - mantissa_bits
    bits = (x.clamp(min=2.0**-100).view(torch.int32) + (1 << dropped - 1) >> dropped) + steps
    return (bits << dropped).view(torch.float32)


def near_the_largest(scales: torch.Tensor, farthest: int) -> torch.Tensor:
    """`[..., groups, 1]` raised to the power of two that is `farthest` below that of the head's largest."""
    top = scales.amax(-2, keepdim=True).view(torch.int32) >> 23 << 23
    return torch.maximum(scales, top.view(torch.float32) * 2.0**-farthest)


@frozen
class Grid:
    """Evenly spaced numbers for each group of neighbouring values.

        u = floor(y / s + z + levels / 2), from 0 to levels - 1        y^ = (u - (levels - 1) / 2 - z) s

    With an odd number of levels 0 is one of the numbers, with an even one they lie half a step beside it. The scale s
    is the group's largest magnitude / `largest`, rounded to `mantissa_bits`.

    Attributes:
        levels: numbers that a code tells apart.
        group: neighbouring values with one scale; None for the whole head.
        mantissa_bits: of a scale.
        farthest: a group's exponent lies this far below that of its head's largest at most, so few bits hold it.
        largest: steps of the largest magnitude; None for those of the outermost number, (levels - 1) / 2.
        signed: the scale has a sign, and the largest magnitude is the outermost number, -levels / 2 steps; 0 is one of
            the numbers.
        wider: scales of whole heads as of heads of 128; further trips then are not what they would be.
        offset: the numbers may lie `z` = -4 to 3 steps lower. Then s is about the group's range / (levels - 1), and of
            eight pairs of s and z next to the middle the one with the least squared error is taken.
    """

    levels: int
    group: int | None
    mantissa_bits: int
    farthest: int = 3
    largest: float | None = None
    signed: bool = False
    offset: bool = False
    wider: bool = False

    def encode(self, y: torch.Tensor) -> torch.Tensor:
        """Codes, scales and offsets `[..., groups, size + 2]` of `[..., dim]`; float32, which holds each exactly."""
        groups = y.unflatten(-1, (-1, min(self.group or y.shape[-1], y.shape[-1])))
        if self.offset:
            return self._searched(groups)
        high, low = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True)
        largest = torch.maximum(high, -low)
        if self.group is None and self.wider:
            largest = largest * WIDER.get(y.shape[-1], 1.0)
        outermost = self.levels / 2 if self.signed else (self.levels - 1) / 2
        scales = coarse(largest / (self.largest or outermost), self.mantissa_bits)
        fine = scales
        if self.group is not None:
            scales = near_the_largest(scales, self.farthest)
        if not self.signed:
            return self._codes(groups, scales, torch.zeros_like(scales))
        # Not where a scale was raised: there no value need be the outermost, and a tie would turn the sign again.
        signs = torch.where((high > -low) & (scales == fine), -1.0, 1.0)
        return self._codes(groups, signs * scales, torch.full_like(scales, 0.5))

    def decode(self, coded: torch.Tensor) -> torch.Tensor:
        """`[..., dim]` of what `encode` gave."""
        codes, scales, offsets = coded[..., :-2], coded[..., -2:-1], coded[..., -1:]
        return ((codes - (self.levels - 1) / 2 - offsets) * scales).flatten(-2)

    def _codes(self, groups: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        codes = (groups / scales + offsets + self.levels / 2).floor().clamp(0, self.levels - 1)
        return torch.cat([codes, scales, offsets], -1)

    def _searched(self, groups: torch.Tensor) -> torch.Tensor:
        high, low = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True)
        found, least = None, None
        for steps in (-1, 0, 1, 2):
            scales = coarse((high - low) / (self.levels - 1), self.mantissa_bits, steps)
            scales = near_the_largest(scales, self.farthest)
            for more in (0, 1):
                offsets = (((high + low) / -2 / scales).floor() + more).clamp(-4, 3)
                coded = self._codes(groups, scales, offsets)
                wrong = (self.decode(coded).view_as(groups) - groups).square().sum(-1, keepdim=True)
                better = wrong < least if least is not None else torch.ones_like(wrong, dtype=torch.bool)
                found = coded if found is None else torch.where(better, coded, found)
                least = wrong if least is None else torch.minimum(wrong, least)
        assert found is not None
        return found


@frozen
class Rotated:
    """Heads turned by a Hadamard matrix, put on a grid, turned back and rounded to BF16."""

    grid: Grid

    def wider(self) -> "Rotated":
        return evolve(self, grid=evolve(self.grid, wider=True))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.grid.encode(x @ hadamard(x))

    def decode(self, coded: torch.Tensor) -> torch.Tensor:
        y = self.grid.decode(coded)
        return bf16(y @ hadamard(y).T)


def changed(codec: Rotated, x: torch.Tensor) -> float:
    """Share of groups of which a second trip changes a byte."""
    coded = codec.encode(x)
    return float((codec.encode(codec.decode(coded)) != coded).any(-1).float().mean())
