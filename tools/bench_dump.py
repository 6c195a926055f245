"""How long a dump keeps a scheduler's thread from serving, for a pool of millions of pages, without a server.

    python tools/bench_dump.py --out docs/results/dump-freeze.json

A host pool as SGLang builds it, of one layer, one head and a page size of 1, is dumped by the schedulers' side of
`hiqcache dump`. This process's main thread plays the scheduler: each thing that it does for a dump, or with the pool
meanwhile, is timed. Between them it has heartbeats: it sleeps for a millisecond, computes a little and looks at the
clock. What a heartbeat takes beyond that, the writer's thread has taken through the GIL, or others with the CPU.

`alone` are SGLang's own operations on a pool that nobody dumps, and heartbeats of the machine. Every number has the
longest of each run: a machine with other work on it makes some runs longer and none shorter.
"""

import gc
import json
import os
import platform
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import click
import torch
from attrs import field, frozen
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


@frozen
class Scenario:
    """A pool and a dump of it.

    Attributes:
        every: of the pool's pages, every how many-th is occupied.
        pages: what is asked for; HALF stands for half the pool's pages.
        flush: whether meanwhile all of them are freed in one call and in random order, allocated and flushed.
    """

    every: int
    pages: str
    flush: bool = False

    @property
    def name(self) -> str:
        occupied = "every page" if self.every == 1 else f"one page in {self.every}"
        return f"{occupied} occupied, {self.pages} dumped" + ", freed meanwhile" * self.flush


SCENARIOS = (
    Scenario(1, "occupied"),
    Scenario(2, "occupied"),
    Scenario(2, "occupied", flush=True),
    Scenario(2, "all", flush=True),
    Scenario(2, "0-HALF"),
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
            dump.handle(mock.Mock(), self, DumperControlReqInput(method=method, body=body))


@frozen
class Times:
    """Milliseconds of each occurrence of each step in one run, by the clock and by the main thread's CPU."""

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


def heartbeat(times: Times) -> None:
    """A millisecond of rest and a moment of work."""
    before, cpu_time = time.perf_counter(), time.thread_time()
    time.sleep(HEARTBEAT_SECONDS)
    torch.ones(16).sum()  # PyTorch gives the GIL back, and wants it again
    late = time.perf_counter() - before - HEARTBEAT_SECONDS
    times.add("heartbeat", max(0.0, late), time.thread_time() - cpu_time)


def resident_mib() -> float:
    """Memory of this process that is no file's."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


def run(scheduler: Scheduler, scenario: Scenario) -> tuple[Times, dict[str, float]]:
    """One dump from first to last; what it took in time, and otherwise."""
    times = Times()
    host, shuffle = scheduler.pool, torch.Generator().manual_seed(0)
    host.clear()
    slots = host.alloc(host.available_size())
    assert slots is not None
    host.free(slots[slots % scenario.every > 0])
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
        heartbeat(times)
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
    memory = {"before_mib": before, "peak_mib": peak, "after_mib": after}
    rounded = {name: round(value, 1) for name, value in ({"seconds": seconds} | memory).items()}
    return times, rounded | {"bytes": written}


def alone(scheduler: Scheduler) -> Times:
    """The same operations of the pool with no dump, and heartbeats of the machine."""
    times, host = Times(), scheduler.pool
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
        heartbeat(times)
    return times


def summary(runs: Sequence[Times]) -> dict[str, dict[str, Any]]:
    """Of each step: how often a run has it, and the longest of each run, by the clock and by the CPU."""
    return {
        step: {
            "times": [len(times.wall[step]) for times in runs],
            "longest_ms": [round(max(times.wall[step]), 2) for times in runs],
            "longest_cpu_ms": [round(max(times.cpu[step]), 2) for times in runs],
        }
        for step in runs[0].wall
    }


@click.command
@click.option("--pages", default=6_000_000, show_default=True, help="Of the pool; page size 1.")
@click.option("--repeats", default=5, show_default=True, help="Dumps of each scenario.")
@click.option("--folder", type=click.Path(file_okay=False, exists=True, path_type=Path), help="For the dumps.")
@click.option("--out", type=click.Path(path_type=Path), callback=writable, metavar="FILE", help="Write JSON there too.")
def main(pages: int, repeats: int, folder: Path | None, out: Path | None) -> None:
    """Dump a pool of so many pages in several states, and print the longest times of each step."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        scheduler = Scheduler(pages, Path(scratch))
        steps = {"alone": summary([alone(scheduler) for _ in range(repeats)])}
        dumps = {}
        for scenario in SCENARIOS:
            runs = [run(scheduler, scenario) for _ in range(repeats)]
            steps[scenario.name] = summary([times for times, _ in runs])
            dumps[scenario.name] = [more for _, more in runs]
    result = {
        "command": command_line(),
        "pages": pages,
        "representation": REPRESENTATION,
        "geometry": {"layers": 1, "heads": 1, "head_dim": HEAD_DIM, "page_size": 1},
        "machine": {"cpus": os.cpu_count(), "load": round(os.getloadavg()[0], 1)},
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("torch", "sglang")},
        "steps": steps,
        "dumps": dumps,
    }
    table = Table("scenario", "step", "of a quiet run, ms", "of any run, ms", "CPU of any, ms")
    for name, found in steps.items():
        for step, each in found.items():
            numbers = min(each["longest_ms"]), max(each["longest_ms"]), max(each["longest_cpu_ms"])
            table.add_row(name, step, *(f"{number:.1f}" for number in numbers))
            name = ""
        table.add_section()
    Console(width=140).print(table)
    if out:
        out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
