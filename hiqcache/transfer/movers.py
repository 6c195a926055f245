"""Two ways to move encoded blocks between the arena and staging, unchanged.

Both see staging as `[part][page][layer]` of blocks.
"""

import abc
from typing import Any

import numpy as np
import torch

from hiqcache.arena import ArenaShape, HostArena
from hiqcache.geometry import Part
from hiqcache.transfer.copy_engine import CopyEngine
from hiqcache.transfer.eager import device_alias
from hiqcache.transfer.kernels import LINE_BYTES, WORD_BYTES, move_blocks
from hiqcache.transfer.launch import Launcher

PROGRAMS = 32
"""Programs of the mover kernel, of 16 warps each: enough to fill the link, and a quarter of an H200."""
LINES = 256
"""Lines that one program has under way at once: 32 KiB."""


class Mover(abc.ABC):
    """Moves the blocks of some pages and some layers.

    Args:
        arena: where blocks lie.
        page_size: tokens in a page.
        indices_device: where host slots are best.
        wanted_run: contiguous bytes that keep the link busy.
    """

    def __init__(self, arena: HostArena, page_size: int, indices_device: torch.device, wanted_run: int):
        self._arena, self._page_size = arena, page_size
        self.indices_device = indices_device
        self.run_layers = run_layers(arena.shape, wanted_run)
        """Layers to move at a time for runs of `wanted_run`."""

    @abc.abstractmethod
    def locate(self, host_indices: torch.Tensor) -> Any:
        """The pages of host slots `[pages * page_size]`, as `move` takes them; slices of it are slices of the pages."""

    @abc.abstractmethod
    def move(
        self, pages: Any, layers: range, to_host: bool, staging: torch.Tensor, stream: torch.cuda.Stream | None
    ) -> None:
        """Enqueue one move.

        Args:
            pages: what `locate` returned, or a slice of it.
            layers: neighbouring layers.
            to_host: from staging to the arena; else the other way.
            staging: uint8 on the GPU, as large as the blocks or larger.
            stream: not the legacy default one; None on the current one, once, to compile.
        """


def run_layers(shape: ArenaShape, wanted_run: int) -> int:
    """Layers whose blocks make a run of `wanted_run` bytes; 1 where layers do not lie side by side."""
    smallest = min(layout.block_bytes for layout in shape.layouts.values())
    return -(-wanted_run // smallest) if shape.arrangement == "page_first" else 1


class CopyEngineMover(Mover):
    """One copy for each page and part of a `page_first` arena: the fastest road for long runs, and it takes no SM."""

    WANTED_RUN = 128 << 10
    """Bytes of one copy: at this size one stream gives 46 of 55 GB/s, and two nearly all of it."""

    def __init__(self, arena: HostArena, page_size: int, device: torch.device):
        super().__init__(arena, page_size, torch.device("cpu"), self.WANTED_RUN)
        shape = arena.shape
        # `[parts]` each, so that one expression finds the addresses of all copies.
        self._first = np.array([arena.buffer.data_ptr() + shape.part_offset(part) for part in Part])
        self._page_stride = np.array([shape.page_stride(part) for part in Part])
        self._block_bytes = np.array([shape.layouts[part].block_bytes for part in Part])
        self._engines = {to_host: CopyEngine(device, to_host) for to_host in (True, False)}

    @classmethod
    def pays(cls, shape: ArenaShape) -> bool:
        """Whether the pages of an arena are long enough for this road to be the better one."""
        return shape.arrangement == "page_first" and run_layers(shape, cls.WANTED_RUN) <= shape.layers

    def locate(self, host_indices: torch.Tensor) -> np.ndarray:
        """Addresses of the pages, `[pages, parts]`."""
        pages = host_indices.numpy()[:: self._page_size] // self._page_size
        return self._first + pages[:, None] * self._page_stride

    def move(
        self, pages: np.ndarray, layers: range, to_host: bool, staging: torch.Tensor, stream: torch.cuda.Stream | None
    ) -> None:
        assert stream is not None, "there is nothing to compile"
        run = self._block_bytes * len(layers)
        parts = staging.data_ptr() + np.array([0, len(pages) * run[0]])
        far, near = (0, 1) if to_host else (1, 0)
        copies = np.empty((3, *pages.shape), dtype=np.int64)
        copies[far] = pages + self._block_bytes * layers.start
        copies[near] = parts + np.arange(len(pages))[:, None] * run
        copies[2] = run
        self._engines[to_host].copy(copies.reshape(3, -1), stream)


class KernelMover(Mover):
    """A kernel that reads and writes pinned memory itself: any page size and arrangement, slots on the GPU."""

    WANTED_RUN = 4 << 10
    """Contiguous bytes of one run: longer ones gained nothing measurable, scattered records of 1152 bytes lose much."""

    def __init__(self, arena: HostArena, page_size: int, device: torch.device):
        super().__init__(arena, page_size, device, self.WANTED_RUN)
        self._kernels = {
            to_host: Launcher(move_blocks, 16, TO_HOST=to_host, PAGE_SIZE=page_size, LINES=LINES)
            for to_host in (True, False)
        }
        self._words = device_alias(arena.buffer, device).view(torch.int64)
        layouts = arena.shape.layouts
        alike = layouts[Part.K].block_bytes == layouts[Part.V].block_bytes
        self._launches = [(Part.K, Part.V)] if alike else [(Part.K,), (Part.V,)]

    def locate(self, host_indices: torch.Tensor) -> torch.Tensor:
        return host_indices.to(self.indices_device, non_blocking=True).reshape(-1, self._page_size)

    def move(
        self, pages: torch.Tensor, layers: range, to_host: bool, staging: torch.Tensor, stream: torch.cuda.Stream | None
    ) -> None:
        shape, words, begin = self._arena.shape, staging.view(torch.int64), 0
        side_by_side = shape.arrangement == "page_first"
        for parts in self._launches:
            block_lines = shape.layouts[parts[0]].block_bytes // LINE_BYTES
            segments, segment_lines = (1, len(layers) * block_lines) if side_by_side else (len(layers), block_lines)
            self._kernels[to_host](
                (PROGRAMS, 1, 1),
                stream,
                self._words[shape.offset(parts[0], layers.start, 0) // WORD_BYTES :],
                words[begin // WORD_BYTES :],
                pages,
                len(parts),
                len(pages),
                segments,
                segment_lines,
                shape.part_bytes(parts[0]) // LINE_BYTES,
                shape.page_stride(parts[0]) // LINE_BYTES,
                shape.layer_stride(parts[0]) // LINE_BYTES,
            )
            begin += len(parts) * len(pages) * len(layers) * block_lines * LINE_BYTES
