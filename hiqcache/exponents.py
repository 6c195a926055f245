"""Powers of two that bring the channels of K to one size before they are encoded.

Some models add a bias to K that is hundreds of times a channel's own spread, in a few channels of a head. A format with
one scale for a head would spend its steps on those. So each channel is divided by a fixed power of two first, and
multiplied by it after decoding: exactly, without a byte more, and for any representation, which does not know of it.

Where a power comes from is `hiqcache/key_biases.py`'s to say; here is what is done with it.
"""

import hashlib

import torch
from attrs import field, frozen

from hiqcache.geometry import KVGeometry

MOST = 24
"""Largest exponent: a channel 2**24 times the others is no bias, and BF16 has no more precision to lose."""
LARGEST_BF16 = torch.finfo(torch.bfloat16).max


def _checked(values: torch.Tensor) -> torch.Tensor:
    values = values.to("cpu", torch.int8, copy=True).contiguous()
    if values.dim() != 3 or bool((values < 0).any()) or bool((values > MOST).any()):
        raise ValueError(f"exponents of shape {tuple(values.shape)}; needed: [layers, heads, dim] from 0 to {MOST}")
    return values


@frozen(eq=False)
class KeyExponents:
    """One exponent for each K channel that a rank holds.

    Attributes:
        values: `[layers, heads, head_dim]` int8 on the CPU, from 0 to `MOST`.

    Raises:
        ValueError: they are not.
    """

    values: torch.Tensor = field(converter=_checked)

    @classmethod
    def none(cls, geometry: KVGeometry) -> "KeyExponents":
        """All 0, which changes nothing."""
        return cls(torch.zeros(geometry.layers, geometry.heads, geometry.head_dim, dtype=torch.int8))

    @property
    def any(self) -> bool:
        """Whether a channel is divided at all."""
        return bool(self.values.any())

    @property
    def digest(self) -> str:
        """Names the exponents, as 16 hexadecimal digits."""
        shape = "x".join(map(str, self.values.shape)).encode()
        return hashlib.sha256(shape + self.values.numpy().tobytes()).hexdigest()[:16]

    def factors(self, device: torch.device) -> torch.Tensor:
        """`2**exponent`, float32 in the shape of `values`, on a device."""
        bits = self.values.int() + 127 << 23  # no pow is exact everywhere
        return bits.view(torch.float32).to(device)


def divide(k: torch.Tensor, factors: torch.Tensor) -> None:
    """Divide K in place.

    Args:
        k: `[..., heads, head_dim]` BF16 of one layer.
        factors: `[heads, head_dim]`, that layer's of `KeyExponents.factors`.
    """
    k.copy_(k.float() / factors)


def multiply(k: torch.Tensor, factors: torch.Tensor) -> None:
    """The reverse of `divide`, saturated to the largest finite BF16; what is not finite stays as it is."""
    product = (k.float() * factors).clamp_(-LARGEST_BF16, LARGEST_BF16).bfloat16()
    k.copy_(torch.where(k.isfinite(), product, k))
