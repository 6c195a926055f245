"""How long a dump keeps a scheduler's thread from serving, for a pool of millions of pages, without a server.

    python tools/bench_dump.py --out docs/results/dump-freeze.json

A host pool as SGLang builds it, of one layer, one head and a page size of 1, is dumped by the schedulers' side of
`hiqcache dump`; this process's main thread plays the scheduler. Each thing that a scheduler does for a dump, or with
the pool meanwhile, is timed. Between them the main thread sleeps for a millisecond, computes a little and looks at the
clock: what passes beyond that, the writer's thread has taken from it, through the GIL or with the CPU. The same without
a dump says how much of it is the machine. `alone` are SGLang's own operations on a pool that nobody dumps.
"""

import gc
import json
import os
import platform
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import click
import torch
from attrs import asdict, field, frozen
from results import command_line, writable
from rich.console import Console
from rich.table import Table

from hiqcache import registry
from hiqcache.sglang import cpu

if not torch.cuda.is_available():
    cpu.prepare()

from sglang.srt.managers.io_struct import DumperControlReqInput
from sglang.srt.mem_cache.device_pool_info import MHABufferInfo
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from hiqcache.sglang import dump, pool
from hiqcache.sglang.choice import Choice

REPRESENTATION = "bf16"
HEAD_DIM = 64
HEARTBEAT_SECONDS = 0.001
IDLE_SECONDS = 3
SHARES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "every page": lambda slots: slots[:0],
    "every second page": lambda slots: slots[1::2],
}
"""How a pool is filled: the slots that are free again of a pool that was full."""


@frozen
class Scenario:
    """A pool and a dump of it.

    Attributes:
        occupied: one of SHARES.
        pages: what is asked for; HALF stands for the first half of the pool.
        flush: whether everything is freed meanwhile, in one call and in random order, allocated again and flushed.
    """

    occupied: str
    pages: str
    flush: bool = False

    @property
    def name(self) -> str:
        return f"{self.occupied} occupied, {self.pages} dumped" + ", freed meanwhile" * self.flush


SCENARIOS = (
    Scenario("every page", "occupied"),
    Scenario("every second page", "occupied"),
    Scenario("every second page", "occupied", flush=True),
    Scenario("every second page", "all", flush=True),
    Scenario("every second page", "0-HALF"),
)


class Scheduler:
    """What the dump of a running server needs of a scheduler, around a pool of noise."""

    def __init__(self, pages: int, folder: Path):
        device = MHATokenToKVPool(64, 1, torch.bfloat16, 1, HEAD_DIM, 1, "cpu", False)
        info = device.get_device_pool_infos()[0].buffer_info
        assert isinstance(info, MHABufferInfo)
        parallel = SimpleNamespace(attn_tp_size=1, tp_rank=0, tp_size=1, nnodes=1)
        with mock.patch.object(pool, "get_parallel", return_value=parallel):
            self.pool = pool.RepresentationHostPool(
                info, 2.0, 0, 1, "page_first",
                representation=registry.get(REPRESENTATION), device_capacity_tokens=64, start_layer=0, end_layer=0,
                host_token_capacity=pages,
            )  # fmt: skip
        self.pool.arena.buffer.random_()
        self.server_args = SimpleNamespace()
        self.server_args._hiqcache_choice = Choice(REPRESENTATION, "this tool", command_line=True, dump_dir=str(folder))
        engine = SimpleNamespace(device_to_host_stream=torch.cpu.Stream())
        controller = SimpleNamespace(l2_transfer_engine=engine)
        self.tree_cache = SimpleNamespace(flush_pending_backups=lambda: None, cache_controller=controller)
        self.ipc_channels = SimpleNamespace(send_to_tokenizer=SimpleNamespace(send_output=self._answer))
        self._parallel = parallel

    def _answer(self, answer: Any, request: object) -> None:
        if not answer.success:
            raise click.ClickException(answer.error)
        (self.status,) = answer.response

    def ask(self, method: str, **body: str) -> None:
        with (
            mock.patch.object(dump, "get_parallel", return_value=self._parallel),
            mock.patch.object(dump.proof, "pool_in_force", return_value=self.pool),
        ):
            dump.handle(dump.handle, self, DumperControlReqInput(method=method, body=body))


@frozen
class Times:
    """Milliseconds of each occurrence of each step, by the clock and by the main thread's CPU."""

    wall: dict[str, list[float]] = field(factory=lambda: defaultdict(list))
    cpu: dict[str, list[float]] = field(factory=lambda: defaultdict(list))

    @contextmanager
    def of(self, step: str) -> Iterator[None]:
        wall, cpu_time = time.perf_counter(), time.thread_time()
        yield
        self.add(step, time.perf_counter() - wall, time.thread_time() - cpu_time)

    def add(self, step: str, wall: float, cpu_time: float) -> None:
        self.wall[step].append(1e3 * wall)
        self.cpu[step].append(1e3 * cpu_time)


@contextmanager
def heartbeat(times: Times, step: str) -> Iterator[None]:
    """A millisecond of rest, and a step of a scheduler, which is what runs inside."""
    before, cpu_time = time.perf_counter(), time.thread_time()
    time.sleep(HEARTBEAT_SECONDS)
    torch.ones(16).sum()  # PyTorch gives the GIL back, and wants it again
    yield
    times.add(step, max(0.0, time.perf_counter() - before - HEARTBEAT_SECONDS), time.thread_time() - cpu_time)


def resident_mib() -> float:
    """Memory of this process that is no file's."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


def run(scheduler: Scheduler, scenario: Scenario, folder: Path, times: Times) -> dict[str, float]:
    """One dump from first to last; what it took beside time."""
    host, shuffle = scheduler.pool, torch.Generator().manual_seed(0)
    host.clear()
    slots = host.alloc(host.available_size())
    assert slots is not None
    host.free(SHARES[scenario.occupied](slots))
    used = host.slot_used.nonzero()[:, 0]
    used = used[torch.randperm(len(used), generator=shuffle)]
    del slots
    gc.collect()
    before = peak = resident_mib()
    begun = time.perf_counter()
    with times.of("start"):
        scheduler.ask(dump.START, name="bench", pages=scenario.pages.replace("HALF", str(host.size // 2)))
    with times.of("status"):
        scheduler.ask(dump.STATUS)
    with times.of("free of 4,096 slots"):
        host.free(used[:4096])
    if scenario.flush:
        with times.of("free of all other slots"):
            host.free(used[4096:])
        with times.of("allocation of all that is free"):
            host.alloc(host.available_size())
        with times.of("flush"):
            host.clear()
    while scheduler.status["state"] == "writing":
        assert host.dump is not None
        holding = host.holding
        with heartbeat(times, "heartbeat"):
            pass
        with times.of("advance"):
            host.dump.advance()
        if holding and not host.holding:
            times.wall["release"].append(times.wall["advance"].pop())
            times.cpu["release"].append(times.cpu["advance"].pop())
        with times.of("status"):
            scheduler.ask(dump.STATUS)
        peak = max(peak, resident_mib())
    if scheduler.status["state"] != "done":
        raise click.ClickException(scheduler.status["error"])
    seconds = time.perf_counter() - begun
    with times.of("first allocation afterwards"):
        host.alloc(min(4096, host.available_size()))
    gc.collect()
    after = resident_mib()
    (file,) = scheduler.status["files"]
    written = os.stat(file).st_size
    os.unlink(file)
    return {"seconds": seconds, "bytes": written, "before_mib": before, "peak_mib": peak, "after_mib": after}


def alone(scheduler: Scheduler, times: Times) -> None:
    """The same operations of the pool with no dump, and heartbeats of the machine."""
    host = scheduler.pool
    with times.of("flush"):
        host.clear()
    with times.of("allocation of all that is free"):
        slots = host.alloc(host.available_size())
    assert slots is not None
    shuffled = slots[torch.randperm(len(slots))]
    with times.of("free of 4,096 slots"):
        host.free(shuffled[:4096])
    with times.of("free of all other slots"):
        host.free(shuffled[4096:])
    end = time.perf_counter() + IDLE_SECONDS
    while time.perf_counter() < end:
        with heartbeat(times, "heartbeat"):
            pass


def summary(times: Times) -> dict[str, dict[str, float]]:
    return {
        step: {
            "count": len(wall),
            "longest_ms": round(max(wall), 3),
            "median_ms": round(sorted(wall)[len(wall) // 2], 3),
            "longest_cpu_ms": round(max(times.cpu[step]), 3),
        }
        for step, wall in times.wall.items()
    }


@click.command
@click.option("--pages", default=6_000_000, show_default=True, help="Of the pool; page size 1.")
@click.option("--repeats", default=3, show_default=True, help="Dumps of each scenario.")
@click.option("--folder", type=click.Path(file_okay=False, exists=True, path_type=Path), help="For the dumps.")
@click.option("--out", type=click.Path(path_type=Path), callback=writable, metavar="FILE", help="Write JSON there too.")
def main(pages: int, repeats: int, folder: Path | None, out: Path | None) -> None:
    """Dump a pool of so many pages in several states, and say how long the scheduler's thread was held."""
    random.seed(0)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        scheduler = Scheduler(pages, Path(scratch))
        idle = Times()
        for _ in range(repeats):
            alone(scheduler, idle)
        for scenario in SCENARIOS:
            times = Times()
            dumps = [run(scheduler, scenario, Path(scratch), times) for _ in range(repeats)]
            found[scenario.name] = {"steps": summary(times), "dumps": dumps, **asdict(scenario)}
    result = {
        "command": command_line(),
        "pages": pages,
        "representation": REPRESENTATION,
        "geometry": {"layers": 1, "heads": 1, "head_dim": HEAD_DIM, "page_size": 1},
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("torch", "sglang")},
        "alone": summary(idle),
        "scenarios": found,
    }
    table = Table("scenario", "step", "times", "longest ms", "median ms", "of it CPU")
    for name, steps in {"alone": summary(idle), **{name: each["steps"] for name, each in found.items()}}.items():
        for step, each in steps.items():
            numbers = (each["longest_ms"], each["median_ms"], each["longest_cpu_ms"])
            table.add_row(name, step, str(each["count"]), *(f"{number:.1f}" for number in numbers))
            name = ""
        table.add_section()
    Console(width=140).print(table)
    if out:
        out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
