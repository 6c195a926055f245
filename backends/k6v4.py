"""k6v4: heads rotated, K in 6 bits with a scale for each head, V in 4 bits with one for each 32 values."""

from collections.abc import Iterator

import torch

from hiqcache.geometry import KVGeometry, Part, Violation
from hiqcache.numerics import groups, planes
from hiqcache.numerics.rotation import bound_of, rotate, rotate_back
from hiqcache.numerics.scales import dequantise, from_bits, quantise, scale_bits
from hiqcache.registry import register
from hiqcache.representation import BlockLayout, HostRepresentation, Tiles, without_gain

ALIGN = 128
"""Bytes: the GPU kernels move whole lines of this size."""
GROUP = 32
"""Of V."""
LEVELS, MANTISSA_BITS = 32, 5
"""Of K."""


@register
class K6V4(HostRepresentation):
    """Block format of K: the upper 4 bits of all tokens' codes, their lower 2, a BF16 scale for each head, zeros.

    Each head is rotated (`hiqcache/numerics/rotation.py`). Its scale and codes are those of
    `hiqcache/numerics/scales.py` for 32 levels and 5 mantissa bits. A head with infinity or NaN in it has the scale NaN
    and decodes to NaN throughout.

    V is in the format of `hiqcache/numerics/groups.py`. Encoding again what was decoded gives the same bytes.
    """

    name = "k6v4"
    format_tag = "k6v4-rotated-v1"
    summary = "rotated, K in 6 bits and V in 4: 3.05x, closer to BF16 than FP8 KV"

    @classmethod
    def requirements(cls, geometry: KVGeometry) -> Iterator[Violation]:
        yield from super().requirements(geometry)
        for dim in sorted({geometry.head_dim, geometry.v_head_dim}):
            yield from groups.requirements(dim)
            yield from without_gain(geometry, dim, dim * 3 // 4 + 2, ALIGN)

    def block_layout(self, part: Part) -> BlockLayout:
        heads, dim = self.geometry.heads, self.geometry.dim(part)
        if part is Part.V:
            return BlockLayout.arrays(self.geometry.page_size, ALIGN, **groups.sections(heads, dim, GROUP))
        return BlockLayout.arrays(
            self.geometry.page_size,
            ALIGN,
            upper=(torch.uint8, (heads, dim // 2)),
            lower=(torch.uint8, (heads, dim // 4)),
            scales=(torch.bfloat16, (heads,)),
        )

    def encode(self, values: torch.Tensor, part: Part, out: torch.Tensor) -> None:
        if part is Part.K:
            self._encode_k(values, out)
        else:
            groups.encode(values, GROUP, self.layouts[part], out)

    def decode(self, blocks: torch.Tensor, part: Part, out: torch.Tensor) -> None:
        if part is Part.K:
            self._decode_k(blocks, out)
        else:
            groups.decode(blocks, self.layouts[part], out)

    def _encode_k(self, values: torch.Tensor, out: torch.Tensor) -> None:
        layout, x = self.layouts[Part.K], values.float()
        finite = x.isfinite().all(-1)
        y = rotate(x.masked_fill(~finite[..., None], 0))
        scales = _scale(y)
        codes = quantise(y, scales[..., None], LEVELS)
        layout.view(out, "upper").copy_(planes.pack(codes >> 2, 4))
        layout.view(out, "lower").copy_(planes.pack(codes & 3, 2))
        layout.view(out, "scales").copy_(scales.bfloat16().masked_fill_(~finite, torch.nan))
        layout.clear_padding(out)

    def _decode_k(self, blocks: torch.Tensor, out: torch.Tensor) -> None:
        layout = self.layouts[Part.K]
        scales = layout.view(blocks, "scales").float()[..., None]
        upper, lower = (planes.unpack(layout.view(blocks, name), bits) for name, bits in (("upper", 4), ("lower", 2)))
        x = rotate_back(dequantise(upper << 2 | lower, scales.nan_to_num(0.0), LEVELS))
        out.copy_(x).masked_fill_(scales.isnan(), torch.nan)

    def tiles(self, part: Part) -> Tiles:
        from hiqcache.backends import k6v4_tiles as tiles

        if part is Part.V:
            return Tiles(tiles.encode_v, tiles.decode_v, ("codes", "groups", "heads"))
        return Tiles(tiles.encode_k, tiles.decode_k, ("upper", "lower", "scales"))

    def error_bound(self, values: torch.Tensor, decoded: torch.Tensor, part: Part) -> torch.Tensor:
        """Half a step in each rotated value; all of a block may add up in one value."""
        if part is Part.V:
            return groups.error_bound(values, decoded, GROUP)
        scales = _scale(rotate(values.float())).double()[..., None]
        return bound_of(scales.expand(values.shape) / 2, decoded)


def _scale(y: torch.Tensor) -> torch.Tensor:
    """Scales `[...]` float32 of rotated K heads `[..., dim]`."""
    return from_bits(scale_bits(y.abs().amax(-1), LEVELS, MANTISSA_BITS), MANTISSA_BITS)
