"""int8: symmetric INT8 with one BF16 scale for each head of each token."""

from collections.abc import Iterator

import torch

from hiqcache.geometry import KVGeometry, Part, Violation
from hiqcache.registry import register
from hiqcache.representation import BlockLayout, HostRepresentation, Tiles, without_gain

ALIGN = 128
"""Bytes: the GPU kernels move whole lines of this size."""
SMALLEST_ABSMAX = 2.0**-112
"""A head is never scaled finer than this, so that `q * s` is a normal float32 number on every device."""
LARGEST_BF16 = torch.finfo(torch.bfloat16).max


@register
class Int8(HostRepresentation):
    """Block format: INT8 of all tokens and heads, one BF16 scale for each of them, zeros up to a multiple of 128 bytes.

    Per head: `s = bf16(max(max|x|, 2**-112) / 127)`, `q = clamp(round_half_even(x / s), -127, 127)` with the quotient
    in float32 by the stored scale, `x^ = bf16(q * s)`, saturated to the largest finite BF16.

    All-zero heads decode to exact zero. A head that holds NaN or infinity is stored as scale NaN and payload zero and
    decodes to NaN throughout, on every device: what was broken on the device stays visibly broken.
    """

    name = "int8"
    format_tag = "int8-head-v2"
    older_tags = ("int8-head-v1",)  # which had padding in other places, and no dump has padding
    summary = "symmetric INT8, one BF16 scale per head and token, blocks padded to 128 bytes"

    @classmethod
    def requirements(cls, geometry: KVGeometry) -> Iterator[Violation]:
        yield from super().requirements(geometry)
        tokens, heads = geometry.page_size, geometry.heads
        for dim in sorted({geometry.head_dim, geometry.v_head_dim}):
            if (values := tokens * heads * dim) % 2:
                yield Violation(
                    rule="INT8 values before the BF16 scales of a block",
                    seen=f"{tokens} tokens x {heads} local KV heads x {dim} = {values}",
                    allowed="an even number",
                    flag="--page-size (an even one)",
                )
            yield from without_gain(geometry, dim, dim + 2, ALIGN)

    def block_layout(self, part: Part) -> BlockLayout:
        heads, dim = self.geometry.heads, self.geometry.dim(part)
        return BlockLayout.arrays(
            self.geometry.page_size, ALIGN, payload=(torch.int8, (heads, dim)), scales=(torch.bfloat16, (heads,))
        )

    def encode(self, values: torch.Tensor, part: Part, out: torch.Tensor) -> None:
        layout = self.layouts[part]
        x = values.float()
        absmax = x.abs().amax(dim=-1)
        finite = absmax.isfinite()
        scales = (absmax.clamp(min=SMALLEST_ABSMAX) / 127).bfloat16()
        quotients = (x / scales.float()[..., None]).round_().clamp_(-127, 127)
        layout.view(out, "payload").copy_(quotients.masked_fill_(~finite[..., None], 0))
        layout.view(out, "scales").copy_(scales.masked_fill_(~finite, torch.nan))
        layout.clear_padding(out)

    def decode(self, blocks: torch.Tensor, part: Part, out: torch.Tensor) -> None:
        layout = self.layouts[part]
        scales = layout.view(blocks, "scales").float()[..., None]
        x = layout.view(blocks, "payload").float().mul_(scales).clamp_(-LARGEST_BF16, LARGEST_BF16)
        # The literal NaN, because what `0 * NaN` leaves in the payload bits differs between devices.
        out.copy_(x).masked_fill_(scales.isnan(), torch.nan)

    def tiles(self, part: Part) -> Tiles:
        from hiqcache.backends import int8_tiles

        return Tiles(int8_tiles.encode, int8_tiles.decode, ("payload", "scales"))

    def error_bound(self, values: torch.Tensor, decoded: torch.Tensor, part: Part) -> torch.Tensor:
        """`(0.5 + 2**-8) * s + 2**-8 * |x^|`: half a step, slack for the float32 quotient, the output's rounding."""
        absmax = values.double().abs().amax(dim=-1, keepdim=True)
        scales = (absmax.float().clamp(min=SMALLEST_ABSMAX) / 127).bfloat16().double()
        return (0.5 + 2**-8) * scales + 2**-8 * decoded.double().abs()
