"""A Hadamard rotation of each head: outliers are spread over all of its values, so that fewer bits hold it.

`y = H x / block`, `x = H y`, where H is the Hadamard matrix of `block` rows of 1 and -1, applied to each `block`
neighbouring values. It is computed by butterflies: log2(block) rounds of float32 additions in a fixed order, and a
power of two. Every device that adds float32 numbers as IEEE 754 says gives the same bits; a matrix product would not.
"""

import torch

LARGEST_BF16 = torch.finfo(torch.bfloat16).max
TINY = 2.0**-100
"""Values below it are taken for zero, so that no sum of theirs is a subnormal float32, which devices treat apart."""


def block_of(dim: int) -> int:
    """Neighbouring values that are rotated together: the largest power of two that divides `dim`."""
    return dim & -dim


def rotate(x: torch.Tensor) -> torch.Tensor:
    """`H x / block`.

    Args:
        x: `[..., dim]` float32, finite BF16 numbers.

    Returns:
        The same shape. Its largest magnitude is at most that of x.
    """
    return _butterflies(torch.where(x.abs() < TINY, 0.0, x) / block_of(x.shape[-1]))


def rotate_back(y: torch.Tensor) -> torch.Tensor:
    """`H y`, saturated to the largest finite BF16.

    Args:
        y: `[..., dim]` float32 multiples of numbers from 2**-116 on.

    Returns:
        The same shape, float32.
    """
    block = block_of(y.shape[-1])
    largest = LARGEST_BF16 / block
    return _butterflies(y / block).clamp_(-largest, largest).mul_(block)  # divided first: no sum overflows


def bound_of(steps: torch.Tensor, decoded: torch.Tensor) -> torch.Tensor:
    """Largest error of values whose rotated ones are each off by `steps` at most, `[..., dim]` float64.

    All errors of a block may add up in one value. The rest is for rounding: of 24 bits in the rotations, which is some
    thousandths of a step, of 8 bits in the output, and for values that were taken for zero.
    """
    blocks = steps.unflatten(-1, (-1, block_of(steps.shape[-1])))
    sums = blocks.sum(-1, keepdim=True).expand_as(blocks).flatten(-2)
    return sums * (1 + 2**-8) + 2**-8 * decoded.double().abs() + TINY


def _butterflies(x: torch.Tensor) -> torch.Tensor:
    step, dim = 1, x.shape[-1]
    while step < block_of(dim):
        a, b = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x = torch.stack([a + b, a - b], dim=-2).flatten(-3)
        step *= 2
    return x
