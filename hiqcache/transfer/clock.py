"""How long encoding and decoding take, measured while they run and without making anything wait for the answer."""

import abc
from time import perf_counter

import torch

SAMPLE_EVERY = 7
"""Runs of which a GPU's clock measures one; odd, so that it meets K and V, and a transfer's chunks, in turn."""


class Clock(abc.ABC):
    """Measures runs of one operation.

    `start` and `stop` go around what enqueues a run, on its stream. They allocate nothing and wait for nothing.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0.0

    @abc.abstractmethod
    def start(self) -> None:
        """A run begins."""

    @abc.abstractmethod
    def stop(self, tokens: float) -> None:
        """The run ends that `start` began.

        Args:
            tokens: what it covered; a run over some of the layers, or over K alone, covers that share of its tokens.
        """

    def take(self) -> tuple[float, float]:
        """Seconds and tokens of the measured runs that have ended since the last call; waits for none."""
        taken = self._seconds, self._tokens
        self._seconds = self._tokens = 0.0
        return taken


class WallClock(Clock):
    """Every run, by the wall clock: for a device whose work is done when the call returns."""

    def start(self) -> None:
        self._started = perf_counter()

    def stop(self, tokens: float) -> None:
        self._seconds += perf_counter() - self._started
        self._tokens += tokens


class EventClock(Clock):
    """One run in `SAMPLE_EVERY`, by two events on the current CUDA stream; none while they await `take`."""

    def __init__(self) -> None:
        super().__init__()
        self._begin, self._end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._runs = 0
        self._measuring = False
        self._awaited = 0.0
        """Tokens of the run that the events are around; 0 where they are free."""

    def start(self) -> None:
        self._runs += 1
        self._measuring = self._runs % SAMPLE_EVERY == 0 and not self._awaited
        if self._measuring:
            self._begin.record()

    def stop(self, tokens: float) -> None:
        if self._measuring:
            self._end.record()
            self._awaited = tokens

    def take(self) -> tuple[float, float]:
        if self._awaited and self._end.query():
            self._seconds = self._begin.elapsed_time(self._end) / 1e3
            self._tokens = self._awaited
            self._awaited = 0.0
        return super().take()


def make_clock(device: torch.device) -> Clock:
    """A clock for work on `device`."""
    return EventClock() if device.type == "cuda" else WallClock()
