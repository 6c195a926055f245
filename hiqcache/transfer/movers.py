"""Two ways to move encoded blocks between the arena and staging, unchanged.

Both see staging as `[page][layer]` of cells, which are the arena's. A mover serves one direction, and keeps what it
needs from call to call: no array is made for a transfer.
"""

import abc

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
    """Moves the blocks of some pages and some layers in one direction.

    Args:
        arena: where blocks lie.
        page_size: tokens in a page.
        to_host: from staging to the arena; else the other way.
        wanted_run: contiguous bytes that keep the link busy.
    """

    def __init__(self, arena: HostArena, page_size: int, to_host: bool, wanted_run: int):
        self._shape, self._page_size, self._to_host = arena.shape, page_size, to_host
        self.run_layers = run_layers(arena.shape, wanted_run)
        """Layers to move at a time for runs of `wanted_run`."""

    @abc.abstractmethod
    def locate(self, host_indices: torch.Tensor) -> None:
        """From now on, move the pages of these slots `[pages * page_size]`; may enqueue on the current stream."""

    @abc.abstractmethod
    def move(self, pages: slice, layers: range, staging: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        """Enqueue one move.

        Args:
            pages: of those that `locate` was given.
            layers: neighbouring layers.
            staging: uint8 on the GPU, as large as the blocks or larger.
            stream: not the legacy default one; None on the current one, once, to compile.
        """


def run_layers(shape: ArenaShape, wanted_run: int) -> int:
    """Layers whose cells make a run of `wanted_run` bytes; 1 where layers do not lie side by side."""
    return -(-wanted_run // shape.cell_bytes) if shape.arrangement == "page_first" else 1


class CopyEngineMover(Mover):
    """One copy for each page of a `page_first` arena: the fastest path for long runs, and it takes no SM.

    Args:
        arena, page_size, to_host: as for `Mover`.
        device: the GPU.
    """

    WANTED_RUN = 128 << 10
    """Bytes of one copy: at this size one stream gives 46 of 55 GB/s, and two nearly all of it."""

    def __init__(self, arena: HostArena, page_size: int, device: torch.device, to_host: bool):
        super().__init__(arena, page_size, to_host, self.WANTED_RUN)
        self._base, self._engine = arena.buffer.data_ptr(), CopyEngine(device, to_host)
        pages = arena.shape.pages
        self._addresses, self._places = np.empty(pages, dtype=np.int64), np.arange(pages)
        self._copies = np.empty((3, pages), dtype=np.int64)

    @classmethod
    def pays(cls, shape: ArenaShape) -> bool:
        """Whether the pages of an arena are long enough for this path to be the better one."""
        return shape.arrangement == "page_first" and run_layers(shape, cls.WANTED_RUN) <= shape.layers

    def locate(self, host_indices: torch.Tensor) -> None:
        slots = host_indices.numpy()[:: self._page_size]
        addresses = self._addresses[: len(slots)]
        np.floor_divide(slots, self._page_size, out=addresses)
        addresses *= self._shape.page_stride
        addresses += self._base

    def move(self, pages: slice, layers: range, staging: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        assert stream is not None, "there is nothing to compile"
        addresses = self._addresses[pages]
        count, run = len(addresses), len(layers) * self._shape.cell_bytes
        copies = self._copies[:, :count]
        far, near = (copies[0], copies[1]) if self._to_host else (copies[1], copies[0])
        np.add(addresses, layers.start * self._shape.layer_stride, out=far)
        np.multiply(self._places[:count], run, out=near)
        near += staging.data_ptr()
        copies[2] = run
        self._engine.copy(copies, stream)


class KernelMover(Mover):
    """A kernel that reads and writes pinned memory itself: any page size and arrangement, slots on the GPU.

    Args:
        arena, page_size, to_host: as for `Mover`.
        device: the GPU; in Triton's interpreter the CPU.
    """

    WANTED_RUN = 4 << 10
    """Contiguous bytes of one run: longer ones gained nothing measurable, scattered runs of 1,152 bytes lost much."""

    def __init__(self, arena: HostArena, page_size: int, device: torch.device, to_host: bool):
        super().__init__(arena, page_size, to_host, self.WANTED_RUN)
        shape = arena.shape
        if any(stride % LINE_BYTES for stride in (shape.cell_bytes, shape.page_stride)):
            raise ValueError(
                f"cells of {shape.cell_bytes} bytes, pages {shape.page_stride} bytes apart; needed: multiples of "
                f"{LINE_BYTES}"
            )
        self._device = device
        self._kernel = Launcher(move_blocks, 16, TO_HOST=to_host, LINES=LINES)
        words = device_alias(arena.buffer, device).view(torch.int64)
        self._from_layer = [
            words[shape.offset(Part.K, layer, 0) // WORD_BYTES :] for layer in range(shape.layers if shape.pages else 0)
        ]
        # Whatever is read here is the number of a page: if ever a wait is missed, pages are wrong, and no address is.
        self._pages = torch.zeros(max(1, shape.pages), dtype=torch.int64, device=device)
        self._uploads: list[_Upload] = []

    def locate(self, host_indices: torch.Tensor) -> None:
        slots = host_indices[:: self._page_size]
        pages = self._pages[: len(slots)]
        if host_indices.device == self._device:
            torch.div(slots, self._page_size, rounding_mode="floor", out=pages)
            return
        upload = next((upload for upload in self._uploads if upload.done.query()), None)
        if upload is None:
            self._uploads.append(upload := _Upload(len(self._pages)))
        np.floor_divide(slots.numpy(), self._page_size, out=upload.array[: len(slots)])
        pages.copy_(upload.pinned[: len(slots)], non_blocking=True)
        upload.done.record()

    def move(self, pages: slice, layers: range, staging: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        shape = self._shape
        cell_lines = shape.cell_bytes // LINE_BYTES
        side_by_side = shape.arrangement == "page_first"
        segments, segment_lines = (1, len(layers) * cell_lines) if side_by_side else (len(layers), cell_lines)
        self._kernel(
            (PROGRAMS, 1, 1),
            stream,
            self._from_layer[layers.start],
            staging.view(torch.int64),
            self._pages[pages.start :],
            pages.stop - pages.start,
            segments,
            segment_lines,
            shape.page_stride // LINE_BYTES,
            shape.layer_stride // LINE_BYTES,
        )


class _Upload:
    """Pinned room for page numbers; free once the copy before `done` has run."""

    def __init__(self, pages: int):
        self.pinned = torch.empty(pages, dtype=torch.int64, pin_memory=True)
        self.array = self.pinned.numpy()
        self.done = torch.cuda.Event()
