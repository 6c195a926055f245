"""The one host buffer of encoded blocks, and the address of every block in it.

The K and V blocks of one page and layer lie side by side: a *cell*.

layer_first    [layer][page] of cells
page_first     [page][layer] of cells: a page is one run of bytes, and may have a trailer behind it
"""

from collections.abc import Mapping

import torch
from attrs import frozen

from hiqcache.geometry import HiqcacheError, Part
from hiqcache.representation import BlockLayout, HostRepresentation

LAYOUTS = ("layer_first", "page_first")
"""Arrangements that an arena can have, by SGLang's names for `--hicache-mem-layout`."""


@frozen
class ArenaShape:
    """Where blocks lie, before any memory exists.

    Attributes:
        layouts: the block layout of each part.
        layers: layers of each page.
        pages: pages of each layer.
        arrangement: `layer_first` or `page_first`.
        trailer_bytes: bytes behind each `page_first` page that belong to no block.

    Raises:
        ValueError: there is no such arrangement, or a trailer where pages are no runs.
        HiqcacheError: a block would start where its sections cannot be viewed as their element types.
    """

    layouts: Mapping[Part, BlockLayout]
    layers: int
    pages: int
    arrangement: str
    trailer_bytes: int = 0

    def __attrs_post_init__(self) -> None:
        if self.arrangement not in LAYOUTS:
            raise ValueError(f"arena arrangement {self.arrangement!r}; allowed: {', '.join(LAYOUTS)}")
        if self.trailer_bytes < 0 or (self.trailer_bytes and self.arrangement != "page_first"):
            raise ValueError(f"a trailer of {self.trailer_bytes} bytes in a {self.arrangement} arena; allowed: 0")
        for part, layout in self.layouts.items():
            steps = (self.part_offset(part), self.layer_stride, self.page_stride)
            for section in layout.sections:
                if any(step % section.dtype.itemsize for step in steps):
                    raise HiqcacheError(
                        f"{part.name} blocks lie {steps[0]} bytes into cells {self.cell_bytes} bytes apart, which are "
                        f"not whole {section.dtype} elements of section {section.name!r}; pad the blocks"
                    )

    @classmethod
    def of(cls, representation: HostRepresentation, pages: int, arrangement: str) -> "ArenaShape":
        """The arena that holds `pages` pages of `representation`'s geometry."""
        return cls(representation.layouts, representation.geometry.layers, pages, arrangement)

    @property
    def cell_bytes(self) -> int:
        """Bytes of one page in one layer, K and V."""
        return sum(layout.block_bytes for layout in self.layouts.values())

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers, K and V; in `page_first` they are one run."""
        return self.layers * self.cell_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole arena."""
        return self.pages * (self.page_bytes + self.trailer_bytes)

    def part_offset(self, part: Part) -> int:
        """Byte of a cell at which the block of `part` starts."""
        return 0 if part is Part.K else self.layouts[Part.K].block_bytes

    @property
    def layer_stride(self) -> int:
        """Bytes between the cells of one page in neighbouring layers."""
        return self.cell_bytes * self.pages if self.arrangement == "layer_first" else self.cell_bytes

    @property
    def page_stride(self) -> int:
        """Bytes between the cells of one layer in neighbouring pages."""
        return self.cell_bytes if self.arrangement == "layer_first" else self.page_bytes + self.trailer_bytes

    def offset(self, part: Part, layer: int, page: int) -> int:
        """Byte of the arena at which a block starts."""
        return self.part_offset(part) + layer * self.layer_stride + page * self.page_stride


class HostArena:
    """Blocks in a buffer that somebody else allocated (and pinned).

    Args:
        shape: where blocks lie.
        buffer: `[shape.total_bytes]` uint8 on the CPU, or its alias on the GPU.

    Raises:
        ValueError: the buffer's dtype, size or contiguity is not what `shape` needs.
    """

    def __init__(self, shape: ArenaShape, buffer: torch.Tensor):
        if buffer.dtype != torch.uint8 or buffer.shape != (shape.total_bytes,) or not buffer.is_contiguous():
            raise ValueError(
                f"arena buffer: {buffer.dtype} {tuple(buffer.shape)}; needed: contiguous torch.uint8 "
                f"({shape.total_bytes},)"
            )
        self.shape = shape
        self.buffer = buffer

    def blocks(self, part: Part) -> torch.Tensor:
        """Every block of `part`, `[layers, pages, block_bytes]` uint8, without a copy."""
        shape = self.shape
        return self.buffer.as_strided(
            (shape.layers, shape.pages, shape.layouts[part].block_bytes),
            (shape.layer_stride, shape.page_stride, 1),
            self.buffer.storage_offset() + shape.part_offset(part),
        )

    def section(self, part: Part, name: str) -> torch.Tensor:
        """Section `name` of every block of `part`, `[layers, pages, *section.shape]`, without a copy."""
        return self.shape.layouts[part].view(self.blocks(part), name)
