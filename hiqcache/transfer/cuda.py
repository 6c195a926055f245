"""The CUDA transfer: encoded pages cross the link in long runs, and a fused kernel encodes or decodes a chunk of them.

A transfer is cut into chunks, some pages of some layers, that pass through staging on the device:

    backup      rows --encode--> staging --move--> arena
    restore     arena --move--> staging --decode--> rows

Encoding and decoding run on the caller's stream and moves on a stream of their own, so the link works on one half of
the staging while the GPU works on the other. A restore takes the layers in groups, the first ones first, because
SGLang computes a layer as soon as its rows are in place.
"""

from collections.abc import Sequence
from itertools import zip_longest

import torch
from attrs import field, frozen

from hiqcache.arena import HostArena
from hiqcache.exponents import KeyExponents
from hiqcache.representation import HostRepresentation
from hiqcache.transfer import copy_engine
from hiqcache.transfer.base import DeviceRows, Transfer
from hiqcache.transfer.chunks import even_spans, growing_spans, layer_groups
from hiqcache.transfer.codec import BlockCodec
from hiqcache.transfer.kernels import LINE_BYTES
from hiqcache.transfer.movers import CopyEngineMover, KernelMover, Mover

BACKUP_STAGING, RESTORE_STAGING = 32 << 20, 96 << 20
"""Bytes of staging for each direction, where the caller brings none. More of it means fewer chunks and so less of the
host's time, for which the request behind a restore waits and the one behind a backup does not."""


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

    Long `page_first` pages whose slots are on the CPU go through the copy engine, in runs of its `WANTED_RUN` and more;
    everything else through a kernel that reads and writes pinned memory.

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
        self._cell_bytes = arena.shape.cell_bytes
        self._codec = BlockCodec(representation, arena.shape, rows)
        self._own_bytes = 0
        wanted = (BACKUP_STAGING, RESTORE_STAGING)
        self._backup_lane, self._restore_lane = (
            _Lane(arena, self._page_size, self._staging(given, bytes_), to_host)
            for given, bytes_, to_host in zip_longest(staging, wanted, (True, False))
        )
        if self._cell_bytes > (allowed := min(self._backup_lane.capacity, self._restore_lane.capacity)):
            raise ValueError(
                f"one layer of one page has {self._cell_bytes} encoded bytes; allowed: {allowed}, which a smaller "
                "--page-size gives"
            )
        self._no_slots = torch.empty(0, self._page_size, dtype=torch.int64, device=self._device)
        self._restoring = _Restore(self._no_slots, {})
        self._next_layer = 0
        self._warm_up()

    def scale_keys(self, exponents: KeyExponents) -> None:
        if exponents.any:
            self._codec.scale_keys(exponents)
            self._warm_up()

    @property
    def host_indices_device(self) -> torch.device:
        return torch.device("cpu")  # where page numbers are worked out; these alone are uploaded, if anything is

    @property
    def staging_bytes(self) -> int:
        return self._own_bytes

    def _staging(self, given: torch.Tensor | None, wanted: int) -> torch.Tensor:
        if given is not None and given.nbytes >= wanted:
            return given.view(torch.uint8).view(-1)
        self._own_bytes += wanted
        return torch.empty(wanted, dtype=torch.uint8, device=self._device)

    def _backup(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        lane, current = self._backup_lane, torch.cuda.current_stream(self._device)
        slots = device_indices.reshape(-1, self._page_size)
        pages = len(slots)
        mover = lane.mover_of(host_indices)
        mover.locate(host_indices)
        step = min(self._layers, lane.capacity // self._cell_bytes)
        for first in range(0, self._layers, step):
            layers = range(first, min(first + step, self._layers))
            for span in growing_spans(pages, len(layers) * self._cell_bytes, lane.capacity):
                half = lane.take(current)
                self.encode_clock.start()
                self._codec.encode(slots[span], layers, half, current)
                self.encode_clock.stop(self._tokens(span, layers))
                lane.pass_on(current, lane.stream)
                mover.move(span, layers, half, lane.stream)
                lane.give_back(lane.stream)
        lane.join(current)

    def _restore(self, layer: int, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        lane = self._restore_lane
        if layer == 0:
            self._restoring = self._begin_restore(host_indices, device_indices)
            self._next_layer = 0
            lane.fork(torch.cuda.current_stream(self._device))
        if layer != self._next_layer:
            raise ValueError(f"restore of layer {layer}; allowed: {self._next_layer}, or 0 to begin another")
        self._next_layer += 1
        group = self._restoring.groups.get(layer)
        if group is None:
            return  # enqueued with the first layer of its group
        mover, layers = group
        slots, current = self._restoring.slots, torch.cuda.current_stream(self._device)
        for span in even_spans(len(slots), len(layers) * self._cell_bytes, lane.capacity):
            half = lane.take(lane.stream)
            mover.move(span, layers, half, lane.stream)
            lane.pass_on(lane.stream, current)
            self.decode_clock.start()
            self._codec.decode(slots[span], layers, half, current)
            self.decode_clock.stop(self._tokens(span, layers))
            lane.give_back(current)

    def _tokens(self, span: slice, layers: range) -> float:
        """What a chunk covers of its tokens, as a clock counts them."""
        return (span.stop - span.start) * self._page_size * len(layers) / self._layers

    def _begin_restore(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> "_Restore":
        """Cut a restore into groups of layers, and find the mover of each: the kernel where runs are too short."""
        lane, slots = self._restore_lane, device_indices.reshape(-1, self._page_size)
        layer_bytes = len(slots) * self._cell_bytes
        if not layer_bytes:
            return _Restore(slots, {})
        usual, most = lane.mover_of(host_indices), lane.capacity // self._cell_bytes
        groups: dict[int, tuple[Mover, range]] = {}
        for layers in layer_groups(self._layers, layer_bytes, lane.kernel.run_layers, most):
            groups[layers.start] = usual if len(layers) >= usual.run_layers else lane.kernel, layers
        for mover in {mover for mover, _ in groups.values()}:
            mover.locate(host_indices)
        return _Restore(slots, groups)

    def _warm_up(self) -> None:
        """Compile and load every kernel, with nothing to do: their variants do not depend on a transfer's size."""
        slots, layers = self._no_slots, range(1)
        with torch.cuda.device(self._device):
            for lane in (self._backup_lane, self._restore_lane):
                lane.kernel.move(slice(0, 0), layers, lane.halves[0], None)
            self._codec.encode(slots, layers, self._backup_lane.halves[0], None)
            self._codec.decode(slots, layers, self._restore_lane.halves[0], None)


@frozen
class _Restore:
    """The restore under way.

    Attributes:
        slots: `[pages, page_size]` int64 on the device.
        groups: the layers to restore at a time, by the first of them, and what moves them.
    """

    slots: torch.Tensor = field(repr=False)
    groups: dict[int, tuple[Mover, range]]


class _Lane:
    """One direction's staging, its halves used in turn; the stream that moves run on, and what moves."""

    def __init__(self, arena: HostArena, page_size: int, staging: torch.Tensor, to_host: bool):
        device = staging.device
        self.kernel = KernelMover(arena, page_size, device, to_host)
        self.copies: CopyEngineMover | None = None
        if copy_engine.available() and CopyEngineMover.pays(arena.shape):
            self.copies = CopyEngineMover(arena, page_size, device, to_host)
        self.capacity = staging.numel() // 2 // LINE_BYTES * LINE_BYTES
        self.halves = staging[: 2 * self.capacity].split(self.capacity)
        self.stream = torch.cuda.Stream(device)
        self._forked, self._joined = torch.cuda.Event(), torch.cuda.Event()
        self._filled = (torch.cuda.Event(), torch.cuda.Event())
        self._emptied = (torch.cuda.Event(), torch.cuda.Event())
        self._turn = 0

    def mover_of(self, host_indices: torch.Tensor) -> Mover:
        """What moves the pages of these slots, except in runs that are too short for it."""
        return self.kernel if self.copies is None or host_indices.is_cuda else self.copies

    def fork(self, current: torch.cuda.Stream) -> None:
        """What is enqueued on the lane's stream from now on waits for what `current` has."""
        self._forked.record(current)
        self.stream.wait_event(self._forked)

    def join(self, current: torch.cuda.Stream) -> None:
        """The reverse of `fork`."""
        self._joined.record(self.stream)
        current.wait_event(self._joined)

    def take(self, filler: torch.cuda.Stream) -> torch.Tensor:
        """The other half; what is enqueued on `filler` from now on finds it empty."""
        self._turn ^= 1
        filler.wait_event(self._emptied[self._turn])
        return self.halves[self._turn]

    def pass_on(self, filler: torch.cuda.Stream, emptier: torch.cuda.Stream) -> None:
        """What is enqueued on `emptier` from now on finds the half filled by what `filler` has."""
        self._filled[self._turn].record(filler)
        emptier.wait_event(self._filled[self._turn])

    def give_back(self, emptier: torch.cuda.Stream) -> None:
        """The half is empty once what `emptier` has is done."""
        self._emptied[self._turn].record(emptier)
