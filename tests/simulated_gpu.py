"""The CUDA transfer under stress without a GPU: its kernels in Triton's interpreter, on streams that are simulated.

A script: TRITON_INTERPRET=1 must be set before the import. What is enqueued on a simulated stream runs when somebody
waits for it, in an order drawn at random from all those that events allow. So a wait that is missing shows, and no
timing hides it: the script plants faults of this kind, one at a time, and expects wrong values from each.
"""

import ctypes
import os
import random
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest.mock import patch

import stress_transfer
import torch
from stream_faults import FAULTS, plant
from stress_transfer import Device, Scale, Setting, Stress, Tally
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterOptions

from hiqcache.arena import ArenaShape
from hiqcache.registry import get
from hiqcache.transfer import chunks, copy_engine, cuda, movers
from hiqcache.transfer.cuda import CudaTransfer
from hiqcache.transfer.launch import Launcher
from hiqcache.transfer.movers import KernelMover

LAYERS = 3
LOCATE = KernelMover.locate
SETTINGS = (
    Setting(2, "page_first", "int8", 3, 64, LAYERS, "own"),
    Setting(1, "layer_first", "bf16", 3, 64, LAYERS, "own"),
    Setting(1, "page_first", "bf16", 3, 64, LAYERS, "own"),
)


class Mark:
    """A place in a stream's work, and whether the stream has passed it."""

    passed = False


class Event:
    """A CUDA event."""

    mark: Mark | None = None
    """Where it was recorded last."""

    def record(self, stream: "Stream") -> None:
        self.mark = Mark()
        stream.enqueue(setattr, self.mark, "passed", True)

    def synchronize(self) -> None:
        while self.mark and not self.mark.passed:
            gpu.step()


class UnrecordedEvent(Event):
    def record(self, stream: "Stream") -> None:
        pass


class Stream:
    """A CUDA stream: its work in order, and places of other streams' that it waits for."""

    def __init__(self, device: torch.device | None = None):
        self.work: deque[Callable[[], object] | Mark] = deque()
        gpu.streams.append(self)

    def enqueue(self, work: Callable[..., object], *arguments: object) -> None:
        self.work.append(partial(work, *arguments))

    def wait_event(self, event: Event) -> None:
        if event.mark:
            self.work.append(event.mark)

    @property
    def ready(self) -> bool:
        while self.work and isinstance(mark := self.work[0], Mark) and mark.passed:
            self.work.popleft()
        return bool(self.work) and not isinstance(self.work[0], Mark)


class SimulatedGpu(Device):
    """Runs the work of all streams, one of them as far as it goes, then another: a favourite, changed at random."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.start(0)

    def start(self, seed: int) -> None:
        self.streams: list[Stream] = []
        self._dice, self._favourites = random.Random(seed), {}
        self.current_stream: Stream | None = None

    def step(self) -> None:
        """Do one piece of work."""
        ready = [stream for stream in self.streams if stream.ready]
        assert ready, "every stream waits for another"
        if self._dice.random() < 0.05:
            self._favourites.clear()
        stream = max(ready, key=lambda stream: self._favourites.setdefault(stream, self._dice.random()))
        work = stream.work.popleft()
        assert not isinstance(work, Mark)
        work()

    def stream(self) -> Stream:
        return Stream()

    def event(self, stream: Stream) -> Event:
        event = Event()
        event.record(stream)
        return event

    @contextmanager
    def current(self, stream: Stream) -> Iterator[None]:
        before, self.current_stream = self.current_stream, stream
        yield
        self.current_stream = before

    def enqueue(self, stream: Stream, work: Callable[..., None], *arguments: object) -> None:
        stream.enqueue(work, *arguments)

    def synchronize(self) -> None:
        while any(stream.ready for stream in self.streams):
            self.step()
        assert not any(stream.work for stream in self.streams), "every stream waits for another"


gpu = SimulatedGpu()


def launch(launcher: Launcher, grid: tuple[int, int, int], stream: Stream | None, *arguments: object) -> None:
    """Instead of `Launcher.__call__`."""
    run = partial(launcher._kernel[grid], *arguments, **launcher._options)
    if stream is None:
        run()
    else:
        stream.enqueue(run)


def locate(mover: KernelMover, host_indices: torch.Tensor) -> None:
    """Instead of `KernelMover.locate`, which works on the current stream."""
    assert gpu.current_stream
    gpu.current_stream.enqueue(LOCATE, mover, host_indices)


def copy_batch(copies: object, stream: Stream, attributes: object) -> None:
    """Instead of the driver's."""
    for to, source, size in copies.T.tolist():  # type: ignore[attr-defined]
        stream.enqueue(ctypes.memmove, to, source, size)


def stressed(setting: Setting, rounds: int, fault: str = "") -> Tally:
    """Some rounds, or as many as it takes to find a fault that is planted."""
    gpu.start(seed=0)
    cell_bytes = ArenaShape.of(get(setting.representation)(setting.geometry), 1, setting.layout).cell_bytes
    scale = Scale(transfer_bytes=10 * LAYERS * cell_bytes, bank_tokens=16, layers=LAYERS)
    with (
        # Transfers of some pages meet all that is made for large ones: several chunks, both movers in one restore (the
        # kernel for its first layer), and copies on two streams.
        patch.object(cuda, "BACKUP_STAGING", 12 * cell_bytes),
        patch.object(cuda, "RESTORE_STAGING", 10 * cell_bytes),
        patch.object(chunks, "FIRST_GROUP", cell_bytes),
        patch.object(chunks, "FIRST_CHUNK", cell_bytes),
        patch.object(movers.CopyEngineMover, "WANTED_RUN", 2 * cell_bytes),
        patch.object(KernelMover, "WANTED_RUN", cell_bytes),
        patch.object(KernelMover, "locate", locate),
        patch.object(movers, "PROGRAMS", 1),
        patch.object(copy_engine, "MANY", 2),
        patch.object(copy_engine, "available", lambda: True),
        patch.object(copy_engine, "_copy_batch", copy_batch),
        patch.object(Launcher, "__call__", launch),
        patch.multiple(
            torch.cuda,
            Stream=Stream,
            Event=Event,
            device=nullcontext,
            current_device=lambda: 0,
            current_stream=lambda device: gpu.current_stream,
        ),
        patch.object(stress_transfer, "make_transfer", CudaTransfer),
        # Nothing overflows that matters, and looking for it takes half of the time.
        patch.object(interpreter.interpreter_builder, "options", InterpreterOptions(sanitize_overflow=False)),
    ):
        one = Stress(setting, gpu, scale, seed=0)
        if fault:
            plant(fault, one._transfer, UnrecordedEvent)
        for _ in range(rounds):
            one.round()
            if fault and one.tally.rounds % 2 == 0:
                one.audit()
                if one.tally.wrong:
                    break
        one.audit()
    return one.tally


def main() -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    warnings.filterwarnings("ignore", "(overflow|invalid value) encountered")  # of heads that are not finite
    if sys.argv[1:] == ["faults"]:
        for fault in FAULTS:
            tally = stressed(SETTINGS[-1], rounds=20, fault=fault)
            print(f"{fault}: {tally}", flush=True)
            assert tally.wrong, f"not found: {fault}"
        print(f"{len(FAULTS)} faults found")
    else:
        for setting in SETTINGS:
            tally = stressed(setting, rounds=6)
            print(f"{setting}: {tally}", flush=True)
            assert not tally.wrong
            assert tally.pages_restored
        print("nothing wrong")


if __name__ == "__main__":
    main()
