"""Unsigned integers of 2, 4 and 6 bits in bytes. Neighbours share a byte, the first of them in its lowest bits.

Six bits are a plane of four, the upper ones, and a plane of two: each plane is a section of its own.
"""

import torch


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """`[..., n]` integers below `2**bits` -> `[..., n * bits / 8]` uint8; bits is 2 or 4, n a multiple of 8 / bits."""
    neighbours = codes.to(torch.uint8).unflatten(-1, (-1, 8 // bits))
    packed = neighbours[..., 0].clone()
    for place in range(1, 8 // bits):
        packed |= neighbours[..., place] << bits * place
    return packed


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The reverse of `pack`."""
    places = [packed >> bits * place & (1 << bits) - 1 for place in range(8 // bits)]
    return torch.stack(places, dim=-1).flatten(-2)
