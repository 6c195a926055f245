"""Key biases, and the powers of two that take them out of K before it is encoded.

Qwen2, Qwen2.5 and some other models add a bias to K, and in some layers a few channels of it lie hundreds of standard
deviations above the rest. A format with one scale for each head of each token would spend its steps on those channels.
The others, which decide what attention does, would be lost between two steps.

So each channel is divided by 2**e, with

    e = round(log2(max(1, A / (3 sigma))))

`A` is the amplitude of the channel's RoPE pair, sqrt(a**2 + b**2), because RoPE turns its two channels into one another
as the position grows. `sigma` is the channel's own standard deviation, of which ordinary values reach three times. So a
biased channel becomes as large as the ordinary ones, and a channel without a bias stays as it is, however large: what a
channel's own spread means for attention, the weights of K alone do not tell.
"""

import torch

from hiqcache.exponents import MOST

PAGE = "docs/quality.md#key-biases"
"""Where the figures are."""


def amplitudes(biases: torch.Tensor, rotary_dim: int, interleaved: bool) -> torch.Tensor:
    """What RoPE can make of each channel's bias at some position.

    Args:
        biases: `[..., dim]`.
        rotary_dim: leading channels that RoPE turns; 0 for a model without RoPE.
        interleaved: pairs are channels 2i and 2i + 1, instead of i and i + rotary_dim / 2.

    Returns:
        `[..., dim]`: sqrt(a**2 + b**2) for both channels of a pair, the absolute value beyond `rotary_dim`.
    """
    turned = biases[..., :rotary_dim].unflatten(-1, (-1, 2) if interleaved else (2, -1))
    axis = -1 if interleaved else -2
    pairs = turned.norm(dim=axis, keepdim=True).expand_as(turned).flatten(-2)
    return torch.cat([pairs, biases[..., rotary_dim:].abs()], dim=-1)


def exponents(amplitude: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
    """Exponents of channels, int8.

    Args:
        amplitude: `[heads, dim]`, from `amplitudes`.
        spread: standard deviation of each channel, the same shape. One of 0 counts as the median of its head.
    """
    typical = spread.median(-1, keepdim=True).values
    sigma = torch.where(spread > 0, spread, typical).clamp(min=torch.finfo(torch.float32).tiny)
    return (amplitude / (3 * sigma)).clamp(1, 2.0**MOST).log2().round().to(torch.int8)
