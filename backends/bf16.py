"""bf16: the device's own bytes, block by block. The control that isolates what the pool itself costs."""

import torch

from hiqcache.geometry import Part
from hiqcache.registry import register
from hiqcache.representation import BlockLayout, HostRepresentation, Tiles


@register
class Bf16(HostRepresentation):
    """`page_size x heads x dim` BF16 values, bit for bit, NaN payloads included."""

    name = "bf16"
    format_tag = "bf16-v1"
    summary = "BF16 as on the device, bit for bit; saves nothing, isolates the cost of the pool"
    scales_keys = False

    def block_layout(self, part: Part) -> BlockLayout:
        shape = (self.geometry.heads, self.geometry.dim(part))
        return BlockLayout.records(self.geometry.page_size, payload=(torch.bfloat16, shape))

    def encode(self, values: torch.Tensor, part: Part, out: torch.Tensor) -> None:
        self.layouts[part].view(out, "payload").copy_(values)

    def decode(self, blocks: torch.Tensor, part: Part, out: torch.Tensor) -> None:
        out.copy_(self.layouts[part].view(blocks, "payload"))

    def tiles(self, part: Part) -> Tiles:
        from hiqcache.backends import bf16_tiles

        return Tiles(bf16_tiles.encode, bf16_tiles.decode, ("payload",))

    def error_bound(self, values: torch.Tensor, decoded: torch.Tensor, part: Part) -> torch.Tensor:
        return torch.zeros_like(values, dtype=torch.float64)
