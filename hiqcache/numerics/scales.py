"""Codes and scales that a second trip to the host does not change.

A code is one of `2 * levels` whole numbers, each for a step of width s:

    u = floor(clamp(y * r + levels, 0, 2 * levels - 1))     stands for     (u - levels + 1/2) s

which is the middle of its step. r is 1 / s, and quotient, product and sum are float32: a division for each scale costs
less than one for each value. The scale s is m / (levels - 1/2), m the largest magnitude that it is for, rounded half
away from zero to 1 + `mantissa_bits` bits. That is coarse enough for two things. First, m always falls into the
outermost step, and so decodes to `(levels - 1/2) s`. Second, decoded values are rounded to BF16, which moves them by a
thousandth or so after another rotation; from the middle of a step, that reaches neither the next step nor another
scale. So encoding what was decoded finds the same scale and the same codes.
"""

import torch

FLOAT_BITS = 23
SMALLEST = 2.0**-108
"""The largest magnitude of a rotated head is below it only if all are zero; then its scale is 0."""


def scale_bits(largest: torch.Tensor, levels: int, mantissa_bits: int) -> torch.Tensor:
    """Exponent and mantissa of scales, as int32 `exponent << mantissa_bits | mantissa`.

    Args:
        largest: float32 magnitudes, zero or from `SMALLEST` on.
        levels: of one sign.
        mantissa_bits: to keep.
    """
    dropped = FLOAT_BITS - mantissa_bits
    return (largest / (levels - 0.5)).view(torch.int32) + (1 << dropped - 1) >> dropped


def from_bits(bits: torch.Tensor, mantissa_bits: int) -> torch.Tensor:
    """Scales, float32, from `scale_bits`."""
    return (bits << FLOAT_BITS - mantissa_bits).view(torch.float32)


def quantise(y: torch.Tensor, scales: torch.Tensor, levels: int) -> torch.Tensor:
    """Codes, uint8, of `y` by scales that broadcast to it."""
    reciprocals = 1 / scales.clamp(min=torch.finfo(torch.float32).tiny)  # zeros by the scale 0 are zeros
    return (y * reciprocals).add_(levels).clamp_(0, 2 * levels - 1).to(torch.uint8)


def dequantise(codes: torch.Tensor, scales: torch.Tensor, levels: int) -> torch.Tensor:
    """What codes stand for, float32."""
    return codes.float().sub_(levels - 0.5).mul_(scales)
