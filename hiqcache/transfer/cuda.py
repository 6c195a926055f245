"""The CUDA transfer: encoded pages cross the link in long runs, and a fused kernel encodes or decodes a chunk of them.

A transfer is cut into chunks, some pages of some layers, that pass through staging on the device:

    backup      rows --encode--> staging --move--> arena
    restore     arena --move--> staging --decode--> rows

Encoding and decoding run on the caller's stream and moves on a stream of their own, so the link works on one half of
the staging while the GPU works on the other. A restore takes the layers in groups, the first ones first, because
SGLang computes a layer as soon as its rows are in place.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from attrs import define

from hiqcache.arena import HostArena
from hiqcache.representation import HostRepresentation
from hiqcache.transfer import copy_engine
from hiqcache.transfer.base import DeviceRows, Transfer
from hiqcache.transfer.clock import Clock
from hiqcache.transfer.codec import BlockCodec
from hiqcache.transfer.kernels import LINE_BYTES
from hiqcache.transfer.movers import CopyEngineMover, KernelMover, Mover

BACKUP_STAGING, RESTORE_STAGING = 32 << 20, 96 << 20
"""Bytes of staging for each direction, where the caller brings none. More of it means fewer chunks and so less of the
host's time, for which the request behind a restore waits and the one behind a backup does not."""
SMALL = 64 << 20
"""Encoded bytes up to which a transfer is moved by the kernel, one launch of which costs the host less than a batch of
copies does: the host's time is what limits small transfers."""
FIRST_BYTES = 8 << 20
"""Encoded bytes that a transfer begins with, or more where few layers at a time would starve the link."""
GROWTH = 2
"""How many times larger each chunk of a transfer is than the one before it.

What begins small begins early: the link under a backup, SGLang's first layers under a restore. What grows is enqueued
by few calls, and moves in long runs.
"""


Step = Callable[[torch.Tensor, torch.cuda.Stream], None]
"""Enqueues work on some staging, on a stream."""


def obstacle(representation: HostRepresentation) -> str | None:
    """Why `CudaTransfer` cannot move blocks of `representation`; None if it can."""
    for part, layout in representation.layouts.items():
        if representation.tiles(part) is None:
            return f"no tile functions for {part.name} blocks"
        if layout.block_bytes % LINE_BYTES:
            return f"{part.name} blocks of {layout.block_bytes} bytes, no multiple of {LINE_BYTES}"
    return None


class CudaTransfer(Transfer):
    """Fused kernels, long copies, and both at once.

    Large transfers of long `page_first` pages whose slots are on the CPU go through the copy engine, in runs of its
    `WANTED_RUN` and more; everything else through a kernel that reads and writes pinned memory.

    Args:
        representation: gives tile functions.
        arena: where blocks lie; its buffer is registered with CUDA.
        rows: the device pool.
        staging: up to two device tensors that nobody else uses, for backups and for restores. One that is missing or
            smaller than `BACKUP_STAGING` or `RESTORE_STAGING` is replaced by one of that size.

    Raises:
        ValueError: `obstacle(representation)` has an answer; rows are strided or unaligned; the blocks of one page and
            layer are larger than half the staging.
    """

    def __init__(
        self,
        representation: HostRepresentation,
        arena: HostArena,
        rows: DeviceRows,
        staging: Sequence[torch.Tensor] = (),
    ):
        if reason := obstacle(representation):
            raise ValueError(f"{representation.name}: {reason}")
        for tensor in (*rows.k, *rows.v):
            if not tensor.is_contiguous() or tensor.data_ptr() % 16:
                raise ValueError(
                    f"device rows at {tensor.data_ptr():#x} with strides {tensor.stride()}; needed: contiguous rows at "
                    "a multiple of 16 bytes"
                )
        super().__init__(rows.device, representation.geometry.page_size)
        self._layers = representation.geometry.layers
        self._layer_bytes = sum(layout.block_bytes for layout in representation.layouts.values())
        self._codec = BlockCodec(representation, rows)
        self._kernel_mover = KernelMover(arena, self._page_size, self._device)
        self._mover: Mover = self._kernel_mover
        if copy_engine.available() and CopyEngineMover.pays(arena.shape):
            self._mover = CopyEngineMover(arena, self._page_size, self._device)

        self._own_bytes = 0
        self._backup_lane, self._restore_lane = (
            _Lane(self._staging(given, wanted))
            for given, wanted in zip_longest(staging, (BACKUP_STAGING, RESTORE_STAGING))
        )
        if self._layer_bytes > (allowed := min(self._backup_lane.capacity, self._restore_lane.capacity)):
            raise ValueError(
                f"one layer of one page has {self._layer_bytes} encoded bytes; allowed: {allowed}, which a smaller "
                "--page-size gives"
            )
        none = torch.empty(0, dtype=torch.int64, device=self._device)
        self._restoring = self._begin_restore(none, none)
        self._warm_up()

    @property
    def host_indices_device(self) -> torch.device:
        return self._mover.indices_device

    @property
    def staging_bytes(self) -> int:
        return self._own_bytes

    def _staging(self, given: torch.Tensor | None, wanted: int) -> torch.Tensor:
        if given is not None and given.nbytes >= wanted:
            return given.view(torch.uint8).view(-1)
        self._own_bytes += wanted
        return torch.empty(wanted, dtype=torch.uint8, device=self._device)

    def _backup(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        mover = self._mover_for(host_indices)
        pages, slots = mover.locate(host_indices), device_indices.reshape(-1, self._page_size)
        lane, current = self._backup_lane, torch.cuda.current_stream(self._device)
        step = min(self._layers, lane.capacity // self._layer_bytes)
        for first in range(0, self._layers, step):
            layers = range(first, min(first + step, self._layers))
            for span in self._growing_spans(len(slots), layers, lane.capacity):
                encode = partial(self._timed, self.encode_clock, self._codec.encode, slots[span], layers)
                move = partial(mover.move, pages[span], layers, True)
                lane.relay(current, encode, lane.stream, move)
        lane.join(current)

    def _restore(self, layer: int, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        lane = self._restore_lane
        if layer == 0:
            self._restoring = self._begin_restore(host_indices, device_indices)
            lane.fork(torch.cuda.current_stream(self._device))
        restoring = self._restoring
        if layer != restoring.next_layer:
            raise ValueError(f"restore of layer {layer}; allowed: {restoring.next_layer}, or 0 to begin another")
        restoring.next_layer += 1
        group = restoring.groups.get(layer)
        if group is None:
            return  # enqueued with the first layer of its group
        mover, layers = group
        pages = restoring.pages[mover]
        current = torch.cuda.current_stream(self._device)
        for span in self._spans(len(restoring.slots), layers, lane.capacity):
            move = partial(mover.move, pages[span], layers, False)
            decode = partial(self._timed, self.decode_clock, self._codec.decode, restoring.slots[span], layers)
            lane.relay(lane.stream, move, current, decode)

    def _timed(
        self,
        clock: Clock,
        code: Callable,
        slots: torch.Tensor,
        layers: range,
        staging: torch.Tensor,
        stream: torch.cuda.Stream,
    ) -> None:
        clock.start()
        code(slots, layers, staging, stream)
        clock.stop(slots.numel() * len(layers) / self._layers)

    def _begin_restore(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> "_Restore":
        slots = device_indices.reshape(-1, self._page_size)
        groups = self._groups(len(slots), self._mover_for(host_indices))
        pages = {mover: mover.locate(host_indices) for mover in {mover for mover, _ in groups.values()}}
        return _Restore(pages, slots, groups)

    def _mover_for(self, host_indices: torch.Tensor) -> Mover:
        encoded = len(host_indices) // self._page_size * self._layers * self._layer_bytes
        return self._kernel_mover if host_indices.is_cuda or encoded <= SMALL else self._mover

    def _groups(self, pages: int, mover: Mover) -> dict[int, tuple[Mover, range]]:
        """The layers to restore at a time, by the first of them, and what moves them: `mover` where its runs are long.

        The first group is small, so that SGLang can start computing; the later ones are larger, because long runs use
        the link best.
        """
        size = max(_ceil_div(mover.run_layers, GROWTH), _ceil_div(FIRST_BYTES, max(1, pages) * self._layer_bytes))
        most = self._restore_lane.capacity // self._layer_bytes
        groups, start = {}, 0
        while start < self._layers:
            size = min(size, most, self._layers - start)
            suited = mover if size >= mover.run_layers else self._kernel_mover
            groups[start] = suited, range(start, start + size)
            start, size = start + size, size * GROWTH
        return groups

    def _spans(self, pages: int, layers: range, limit: int) -> Iterator[slice]:
        """Even slices of `pages`, whose blocks in `layers` take `limit` bytes at most, or are those of one page."""
        most = max(1, limit // (len(layers) * self._layer_bytes))
        step = _ceil_div(pages, max(1, _ceil_div(pages, most)))
        return (slice(start, start + step) for start in range(0, pages, max(1, step)))

    def _growing_spans(self, pages: int, layers: range, limit: int) -> Iterator[slice]:
        """Slices of `pages`, the first of about `FIRST_BYTES`, each longer than the last; `limit` as for `_spans`."""
        page_bytes = len(layers) * self._layer_bytes
        start, size = 0, max(1, FIRST_BYTES // page_bytes)
        while start < pages:
            size = min(size, max(1, limit // page_bytes))
            yield slice(start, start + size)
            start, size = start + size, size * GROWTH

    def _warm_up(self) -> None:
        """Compile and load every kernel, with nothing to do: their variants do not depend on a transfer's size."""
        none, layers = self._restoring.slots, range(1)
        staging = self._restore_lane.halves[0]
        with torch.cuda.device(self._device):
            for to_host in (True, False):
                self._kernel_mover.move(none, layers, to_host, staging, None)
            self._codec.encode(none, layers, staging, None)
            self._codec.decode(none, layers, staging, None)


@define
class _Restore:
    """The restore under way: where it stands between the calls for its layers."""

    pages: dict[Mover, Any]
    slots: torch.Tensor
    groups: dict[int, tuple[Mover, range]]
    next_layer: int = 0


class _Lane:
    """One direction's staging, its halves used in turn, and the stream that moves run on."""

    def __init__(self, staging: torch.Tensor):
        self.capacity = staging.numel() // 2 // LINE_BYTES * LINE_BYTES
        self.halves = staging[: 2 * self.capacity].split(self.capacity)
        self.stream = torch.cuda.Stream(staging.device)
        self._forked, self._joined = torch.cuda.Event(), torch.cuda.Event()
        self._filled = (torch.cuda.Event(), torch.cuda.Event())
        self._emptied = (torch.cuda.Event(), torch.cuda.Event())
        self._turn = 0

    def fork(self, current: torch.cuda.Stream) -> None:
        """What is enqueued on the lane's stream from now on waits for what `current` has."""
        self._forked.record(current)
        self.stream.wait_event(self._forked)

    def join(self, current: torch.cuda.Stream) -> None:
        """The reverse of `fork`."""
        self._joined.record(self.stream)
        current.wait_event(self._joined)

    def relay(self, filler: torch.cuda.Stream, fill: Step, emptier: torch.cuda.Stream, empty: Step) -> None:
        """Enqueue `fill` of a half on one stream, then `empty` of that half on another."""
        self._turn ^= 1
        half, filled, emptied = self.halves[self._turn], self._filled[self._turn], self._emptied[self._turn]
        filler.wait_event(emptied)
        fill(half, filler)
        filled.record(filler)
        emptier.wait_event(filled)
        empty(half, emptier)
        emptied.record(emptier)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
