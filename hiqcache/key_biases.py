"""Key biases that are too large for a representation: found in a model's weights, told in one warning.

Qwen2, Qwen2.5 and some other models add a bias to K, and in some layers a few channels of it lie hundreds of standard
deviations above the rest. A format with one scale for each head of each token then spends its steps on those channels.
The others, which decide what attention does, are lost between two steps.

**The criterion.** The step of 8 bits is max|K| / 127, and a bias of amplitude A makes max|K| about A. The error that
this adds to an ordinary channel is proportional to A / 127, and what that costs depends on the channel's own standard
deviation, sigma. So a head is reported where A > limit * sigma. `HostRepresentation.key_bias_limit` is the limit, and
`tools/key_biases.py` calibrates it: at 14, int8's error of the attention output is what a plain FP8 cast makes, 5.5%;
at 60 it is 23%, at 151 more than half.

`A` is the amplitude of a RoPE pair, sqrt(a**2 + b**2), because RoPE turns its two channels into one another as the
position grows. `sigma` is the median of the head's channels, so the few that are biased do not count.
"""

from collections.abc import Collection, Iterator

import torch
from attrs import frozen

PAGE = "docs/quality.md#key-biases"
"""Where the figures are."""


@frozen
class BiasedHead:
    """A KV head with a bias beyond the limit.

    Attributes:
        layer: of the model.
        head: KV head of the whole model.
        bias: amplitude of its largest bias, in K's units before RoPE.
        spread: typical standard deviation of its channels, in the same units.
    """

    layer: int
    head: int
    bias: float
    spread: float

    @property
    def multiple(self) -> float:
        """The bias in standard deviations."""
        return self.bias / self.spread if self.spread else float("inf")


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


def biased_heads(
    layer: int, first_head: int, amplitude: torch.Tensor, spread: torch.Tensor, limit: float
) -> Iterator[BiasedHead]:
    """Heads of one layer whose largest bias is more than `limit` standard deviations.

    Args:
        layer: of the model.
        first_head: number, in the whole model, of the first head given.
        amplitude: `[heads, dim]`, from `amplitudes`.
        spread: standard deviation of each channel, `[heads, dim]`.
        limit: a representation's `key_bias_limit`.
    """
    largest, typical = amplitude.amax(-1).tolist(), spread.median(-1).values.tolist()
    for head, (bias, sigma) in enumerate(zip(largest, typical, strict=True), first_head):
        if bias > limit * sigma:
            yield BiasedHead(layer, head, bias, sigma)


def warning(name: str, limit: float, heads: Collection[BiasedHead]) -> str:
    """What a server says of `heads`, at least one, that representation `name` does not suit."""
    worst = max(heads, key=lambda head: head.multiple)
    layers = len({head.layer for head in heads})
    return (
        f"this model has key biases that {name} does not bear: in {layers} layer(s), {len(heads)} KV head(s), a bias "
        f"of K is more than {limit:g} standard deviations of the other channels. The worst is layer {worst.layer}, "
        f"head {worst.head}: {worst.bias:.4g} against {worst.spread:.3g}, {worst.multiple:.0f} times. What comes "
        "back from L2 is less accurate than FP8 KV, and answers may be wrong. Use --hicache-representation bf16, or "
        f"--kv-cache-dtype fp8_e4m3 without hiqcache. {PAGE} has figures"
    )
