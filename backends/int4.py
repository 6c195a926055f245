"""int4: heads rotated, 4 bits a value, a one-byte scale for each 16 of them."""

from collections.abc import Iterator

import torch

from hiqcache.geometry import KVGeometry, Part, Violation
from hiqcache.numerics import groups
from hiqcache.registry import register
from hiqcache.representation import BlockLayout, HostRepresentation, Tiles, without_gain

ALIGN = 128
"""Bytes: the GPU kernels move whole lines of this size."""
GROUP = 16


@register
class Int4(HostRepresentation):
    """Block format: packed codes of all tokens and heads, a byte for each group of 16, a byte for each head, zeros.

    Each head is rotated (`hiqcache/numerics/rotation.py`) and its groups are quantised (`hiqcache/numerics/groups.py`).
    Encoding again what was decoded gives the same bytes.
    """

    name = "int4"
    format_tag = "int4-rotated-v1"
    summary = "rotated INT4, one-byte scales for groups of 16: 3.5x, for where room matters more than the last token"

    @classmethod
    def requirements(cls, geometry: KVGeometry) -> Iterator[Violation]:
        yield from super().requirements(geometry)
        for dim in sorted({geometry.head_dim, geometry.v_head_dim}):
            yield from groups.requirements(dim)
            yield from without_gain(geometry, dim, groups.pair_bytes(dim, GROUP), ALIGN)

    def block_layout(self, part: Part) -> BlockLayout:
        heads, dim = self.geometry.heads, self.geometry.dim(part)
        return BlockLayout.arrays(self.geometry.page_size, ALIGN, **groups.sections(heads, dim, GROUP))

    def encode(self, values: torch.Tensor, part: Part, out: torch.Tensor) -> None:
        groups.encode(values, GROUP, self.layouts[part], out)

    def decode(self, blocks: torch.Tensor, part: Part, out: torch.Tensor) -> None:
        groups.decode(blocks, self.layouts[part], out)

    def tiles(self, part: Part) -> Tiles:
        from hiqcache.backends import int4_tiles

        return Tiles(int4_tiles.encode, int4_tiles.decode, ("codes", "groups", "heads"))

    def error_bound(self, values: torch.Tensor, decoded: torch.Tensor, part: Part) -> torch.Tensor:
        return groups.error_bound(values, decoded, GROUP)
