"""The one host buffer of encoded blocks, and the address of every block in it.

layer_first    [part][layer][page] of blocks
page_first     [part][page][layer] of blocks: a page of one part is one contiguous run of bytes
"""

from collections.abc import Mapping

import torch
from attrs import frozen

from hiqcache.geometry import Part
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
    """

    layouts: Mapping[Part, BlockLayout]
    layers: int
    pages: int
    arrangement: str

    def __attrs_post_init__(self) -> None:
        if self.arrangement not in LAYOUTS:
            raise ValueError(f"arena arrangement {self.arrangement!r}; allowed: {', '.join(LAYOUTS)}")

    @classmethod
    def of(cls, representation: HostRepresentation, pages: int, arrangement: str) -> "ArenaShape":
        """The arena that holds `pages` pages of `representation`'s geometry."""
        return cls(representation.layouts, representation.geometry.layers, pages, arrangement)

    def part_bytes(self, part: Part) -> int:
        """Bytes of all blocks of `part`."""
        return self.layers * self.pages * self.layouts[part].block_bytes

    def part_offset(self, part: Part) -> int:
        """Byte at which the blocks of `part` start."""
        return 0 if part is Part.K else self.part_bytes(Part.K)

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole arena."""
        return sum(self.part_bytes(part) for part in Part)

    def layer_stride(self, part: Part) -> int:
        """Bytes between the blocks of one page in neighbouring layers."""
        block_bytes = self.layouts[part].block_bytes
        return block_bytes * self.pages if self.arrangement == "layer_first" else block_bytes

    def page_stride(self, part: Part) -> int:
        """Bytes between the blocks of one layer in neighbouring pages."""
        block_bytes = self.layouts[part].block_bytes
        return block_bytes if self.arrangement == "layer_first" else block_bytes * self.layers

    def offset(self, part: Part, layer: int, page: int) -> int:
        """Byte of the arena at which a block starts."""
        return self.part_offset(part) + layer * self.layer_stride(part) + page * self.page_stride(part)

    @property
    def page_run_bytes(self) -> int | None:
        """Bytes of the run that a `page_first` page of one part is; None where pages are no equal, contiguous runs."""
        runs = {self.page_stride(part) for part in Part}
        return runs.pop() if self.arrangement == "page_first" and len(runs) == 1 else None


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
            (shape.layer_stride(part), shape.page_stride(part), 1),
            self.buffer.storage_offset() + shape.part_offset(part),
        )

    def section(self, part: Part, name: str) -> torch.Tensor:
        """Section `name` of every block of `part`, `[layers, pages, *section.shape]`, without a copy."""
        return self.shape.layouts[part].view(self.blocks(part), name)
