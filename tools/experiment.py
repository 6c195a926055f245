"""What a smaller L2 representation is worth: SGLang's own benchmark against servers that differ in their L2 alone.

\b
    python tools/experiment.py run equal-budget crossover --out docs/results
    python tools/experiment.py run equal-capacity --out docs/results
    python tools/experiment.py run equal-budget --small --out /tmp/small         # on a CPU, some minutes
    python tools/experiment.py report docs/results/experiment-equal-budget.json  # tables in Markdown, and the plot

One SGLang server for each configuration, all side by side on one GPU with L1 pinned, are driven one at a time by
`sglang.bench_serving` with its workload generated-shared-prefix, in turns whose order is rotated from repeat to repeat.
Each server is warmed first, and its cache is flushed before each run. Hits are SGLang's report for each request; what
moved between L1 and L2 is read from `/metrics` before and after each run.

A comparison is refused, with exit status 1, if the workload cannot tell the configurations apart, if no KV came back
from L2, or if a server is not of the size that it was asked for.
"""

import contextlib
import json
import multiprocessing
import os
import pathlib
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click
import experiment_report
import numpy as np
import requests
import torch
from attrs import asdict, define, evolve, field, frozen
from counters import (
    BACKUP_BYTES,
    BACKUP_TOKENS,
    L2_TOKENS,
    L2_USED_TOKENS,
    RESTORE_BYTES,
    RESTORE_TOKENS,
    metric,
)
from results import Commands, command_line, read_result, without_folders
from servers import QWEN3_8B, end_servers_on_sigterm, launch, provenance, write_model
from serving import HttpServer, environment, free_port, http

from hiqcache import registry, sample_model
from hiqcache.commands._picture import picture
from hiqcache.model_config import geometry_from_config

PAGE_SIZE = 1
"""Of experiments that do not say otherwise."""
MEMORY = 0.9
SERVER = ("--enable-metrics", "--skip-server-warmup", "--sleep-on-idle", "--cuda-graph-max-bs-decode", "16")
HICACHE = ("--enable-hierarchical-cache", "--hicache-write-policy", "write_back")
REPRESENTATION = "--hicache-representation"
COUNTERS = {
    "backup_tokens": BACKUP_TOKENS,
    "backup_bytes": BACKUP_BYTES,
    "restore_tokens": RESTORE_TOKENS,
    "restore_bytes": RESTORE_BYTES,
}
"""Field of a run -> SGLang's counter."""
SETTLING_SECONDS = 0.5
"""After a run, until the last transfers are counted."""


class Refused(click.ClickException):
    """There is nothing to compare; the text says why."""


class Broken(Exception):
    """A server did not answer as it should; the others may be compared without it."""


@frozen
class Configuration:
    """A server to compare.

    Attributes:
        name: what it is called in results.
        l1_tokens: tokens in L1.
        arguments: its arguments, beside the model and L1.
    """

    name: str
    l1_tokens: int
    arguments: tuple[str, ...] = ()

    @property
    def has_l2(self) -> bool:
        return "--enable-hierarchical-cache" in self.arguments

    @property
    def uses_hiqcache(self) -> bool:
        return REPRESENTATION in self.arguments


@frozen
class Workload:
    """Requests of generated-shared-prefix: groups of prompts with a common prefix, all in random order.

    Lengths are in tokens. Prompts are random token ids, so lengths are exact.
    """

    groups: int
    prompts_per_group: int
    prefix: int
    question: int
    output: int
    concurrency: int

    @property
    def requests(self) -> int:
        return self.groups * self.prompts_per_group

    @property
    def reusable_tokens(self) -> int:
        """The reusable working set: all prefixes."""
        return self.groups * self.prefix

    @property
    def context(self) -> int:
        """`--context-length` that leaves room."""
        return 2 * (self.prefix + self.question + self.output)

    def options(self, seed: int) -> list[str]:
        """As bench_serving takes it."""
        lengths = {"system-prompt-len": self.prefix, "question-len": self.question, "output-len": self.output}
        sizes = {"num-groups": self.groups, "prompts-per-group": self.prompts_per_group, **lengths}
        words = ["--dataset-name", "generated-shared-prefix", "--tokenize-prompt"]
        words += [word for name, value in sizes.items() for word in (f"--gsp-{name}", str(value))]
        return [*words, "--max-concurrency", str(self.concurrency), "--seed", str(seed)]


@frozen
class Experiment:
    """Configurations and what is asked of them.

    Attributes:
        name: on the command line and in the result's file name.
        configurations: the servers.
        workload: the requests; where `points` says so, with another number of groups.
        equal: what the L2s have in common, "bytes" or "tokens".
        points: sizes of the reusable working set, from half the smallest L2 to twice the largest; 0 for the
            workload's own alone.
        page_size: tokens in a page.
    """

    name: str
    configurations: tuple[Configuration, ...]
    workload: Workload
    equal: str
    points: int = 0
    page_size: int = PAGE_SIZE


@define
class Server:
    """A running server.

    Attributes:
        configuration: what it is.
        http: to drive it.
        command: that started it.
        l1_tokens: tokens in L1, by its own account.
        report: what hiqcache says of its L2; None without hiqcache.
        l2_tokens: tokens in L2, by SGLang's gauge; 0 without L2. Known once it was warmed.
        bytes_per_token: host bytes of a token, from what it backed up while it was warmed; 0 without L2.
    """

    configuration: Configuration
    http: HttpServer
    command: list[str]
    l1_tokens: int
    report: dict[str, Any] | None
    l2_tokens: int = field(default=0)
    bytes_per_token: float = field(default=0.0)

    @property
    def name(self) -> str:
        return self.configuration.name


# -- what is compared ------------------------------------------------------------------------------------------------


def full_size() -> dict[str, Experiment]:
    """The experiments on a GPU, in Qwen3-8B's shape."""
    l1 = 16_384
    workload = Workload(groups=32, prompts_per_group=4, prefix=2048, question=128, output=32, concurrency=8)
    sweep = evolve(workload, prompts_per_group=3, output=16)
    budget = (*HICACHE, "--hicache-size", "8")
    capacity = (*HICACHE, "--hicache-ratio", "3.3114")  # 54,253 tokens and one page: what 8 GB hold in BF16
    fp8 = ("--kv-cache-dtype", "fp8_e4m3")
    stock, int8 = Configuration("stock", l1, budget), Configuration("int8", l1, (*budget, REPRESENTATION, "int8"))
    found = (
        Experiment(
            "equal-capacity",
            tuple(Configuration(name, l1, (*capacity, REPRESENTATION, name)) for name in ("bf16", "int8")),
            workload,
            equal="tokens",
        ),
        Experiment(
            "equal-budget",
            (
                Configuration("no-l2", l1),
                stock,
                Configuration("bf16", l1, (*budget, REPRESENTATION, "bf16")),
                int8,
                Configuration("fp8-kv", l1, (*budget, *fp8)),
                Configuration("fp8-kv-l1x2", 2 * l1, (*budget, *fp8)),  # L1 of the others' bytes
            ),
            workload,
            equal="bytes",
        ),
        Experiment("crossover", (stock, int8), sweep, equal="bytes", points=7),
        Experiment(
            "formats",
            (
                stock,
                *(Configuration(name, l1, (*budget, REPRESENTATION, name)) for name in ("int8", "k6v4", "int4")),
                Configuration("fp8-kv", l1, (*budget, *fp8)),
            ),
            evolve(workload, groups=64, prompts_per_group=3),  # prefixes that fit into the L2 of k6v4, not of int8
            equal="bytes",
            page_size=64,
        ),
    )
    return {experiment.name: experiment for experiment in found}


def small_size(model: pathlib.Path) -> dict[str, Experiment]:
    """The experiments on a CPU. SGLang's own HiCache pins memory and needs a GPU; `bf16` takes its place."""
    l1 = 256
    workload = Workload(groups=9, prompts_per_group=3, prefix=80, question=8, output=4, concurrency=2)
    geometry = geometry_from_config(model / "config.json", tp_size=1, page_size=PAGE_SIZE)
    size = {name: registry.get(name)(geometry).bytes_per_token() for name in ("bf16", "int8")}

    def configuration(name: str, ratio: float) -> Configuration:
        return Configuration(name, l1, (*HICACHE, "--hicache-ratio", f"{ratio:.4f}", REPRESENTATION, name))

    budget = tuple(configuration(name, 1.5 * size["bf16"] / size[name]) for name in size)
    found = (
        Experiment("equal-capacity", tuple(configuration(name, 1.5) for name in size), workload, equal="tokens"),
        Experiment("equal-budget", (Configuration("no-l2", l1), *budget), workload, equal="bytes"),
        Experiment("crossover", budget, workload, equal="bytes", points=4),
    )
    return {experiment.name: experiment for experiment in found}


def points(experiment: Experiment, servers: Sequence[Server]) -> list[Workload]:
    """The workloads of an experiment, by rising working set."""
    if not experiment.points:
        return [experiment.workload]
    sizes = [server.l2_tokens for server in servers if server.l2_tokens]
    prefix = experiment.workload.prefix
    groups = np.geomspace(min(sizes) / 2 / prefix, 2 * max(sizes) / prefix, experiment.points)
    return [evolve(experiment.workload, groups=number) for number in sorted({max(1, round(g)) for g in groups})]


# -- refusing --------------------------------------------------------------------------------------------------------


def check_servers(experiment: Experiment, servers: Sequence[Server]) -> None:
    """
    Raises:
        Refused: these servers cannot be compared, or the workload cannot tell them apart.
    """
    with_l2 = [server for server in servers if server.configuration.has_l2]
    if len(with_l2) < 2:
        raise Refused(f"{experiment.name}: {len(with_l2)} server(s) with an L2; comparing takes two")
    for server in servers:
        if server.l1_tokens != server.configuration.l1_tokens:
            raise Refused(
                f"{experiment.name}: {server.name} has an L1 of {server.l1_tokens:,} tokens, "
                f"{server.configuration.l1_tokens:,} were asked for: is the GPU too full for it?"
            )
    sizes = {server.name: server.l2_tokens for server in with_l2}
    shown = ", ".join(f"{name} {tokens:,}" for name, tokens in sizes.items())
    if experiment.equal == "tokens" and len(set(sizes.values())) > 1:
        raise Refused(f"{experiment.name}: L2s of equal tokens are to be compared, these hold {shown}")
    host_bytes = [server.l2_tokens * server.bytes_per_token for server in with_l2]
    if experiment.equal == "bytes" and max(host_bytes) > 1.01 * min(host_bytes):
        each = ", ".join(f"{server.name} {size:,.0f}" for server, size in zip(with_l2, host_bytes, strict=True))
        raise Refused(f"{experiment.name}: L2s of equal bytes are to be compared, these take {each}")
    if experiment.points:
        return  # what fits and what does not is the question
    reusable = experiment.workload.reusable_tokens
    if reusable <= max(server.l1_tokens for server in servers):
        raise Refused(
            f"{experiment.name}: the reusable working set of {reusable:,} tokens fits into L1, so no L2 matters; "
            "it needs more groups or longer prefixes"
        )
    if experiment.equal == "bytes" and reusable <= min(sizes.values()):
        raise Refused(
            f"{experiment.name}: the reusable working set of {reusable:,} tokens fits into every L2 ({shown}), so they "
            "cannot differ; it needs more groups or longer prefixes"
        )


def check_run(run: dict[str, Any], server: Server, workload: Workload) -> None:
    """
    Raises:
        Refused: the run says nothing about L2.
    """
    where = f"{run['experiment']}: {server.name}, repeat {run['repeat']}"
    # A working set that L1 holds, as a crossover may begin with, moves nothing.
    if server.configuration.has_l2 and workload.reusable_tokens > server.l1_tokens and not run["restore_tokens"]:
        raise Refused(f"{where}: nothing was restored from L2, so there is nothing to compare")
    if server.report is None:
        return
    for direction in ("backup", "restore"):
        tokens, moved = run[f"{direction}_tokens"], run[f"{direction}_bytes"]
        if moved != tokens * server.report["bytes_per_token"]:
            raise Refused(
                f"{where}: {direction} of {tokens:,} tokens moved {moved:,} bytes, "
                f"but a token has {server.report['bytes_per_token']:,}"
            )


# -- driving ---------------------------------------------------------------------------------------------------------


class Clock:
    """Time since the tool started, and how much of its limit is left."""

    def __init__(self, limit: float):
        self._start, self._limit = time.monotonic(), limit

    def left(self) -> float:
        return self._start + self._limit - time.monotonic()

    def say(self, text: str) -> None:
        click.echo(f"[{time.monotonic() - self._start:4.0f} s] {text}")


@contextlib.contextmanager
def serve(
    configurations: Sequence[Configuration],
    page_size: int,
    model: pathlib.Path,
    scratch: pathlib.Path,
    arguments: Sequence[str],
) -> Iterator[tuple[list[Server], dict[str, str]]]:
    """Servers of all configurations, started at once, with these arguments more; and why others did not, by name."""

    def start(index: int, configuration: Configuration) -> Server | str:
        port = free_port()
        command = launch(
            model,
            port,
            l1_tokens=configuration.l1_tokens,
            page_size=page_size,
            memory=MEMORY,
            arguments=[*SERVER, *arguments, *configuration.arguments],
        )
        variables = environment() | ({} if configuration.uses_hiqcache else {"SGLANG_PLUGINS": "none"})
        log = scratch / f"{index}-{configuration.name}.log"
        try:
            server = stack.enter_context(http(command, log, port, variables))
        except AssertionError as error:
            return str(error)
        info = server.info()
        (report,) = info.get("hiqcache", [None])
        return Server(configuration, server, command, info["max_total_num_tokens"], report)

    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(len(configurations)) as pool:
            starting = pool.map(start, range(len(configurations)), configurations)
            import sglang.benchmark.serving  # noqa: F401  (seconds, spent while the servers start; runs fork from here)

            started = dict(zip(configurations, starting, strict=True))
        servers = [server for server in started.values() if isinstance(server, Server)]
        failed = {entry.name: reason for entry, reason in started.items() if isinstance(reason, str)}
        try:
            yield servers, failed
        finally:
            for server in servers:  # all at once; leaving the stack waits for each
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(server.http.process_group, 15)


def bench_serving(options: Sequence[str], scratch: pathlib.Path, seconds: float) -> dict[str, Any]:
    """Run `python -m sglang.bench_serving` with these options, and return its result.

    It runs in a fork of this process, which has imported it: that takes SGLang half a minute on a slow machine.

    Raises:
        TimeoutError: it was not done in time.
        Broken: it failed; the text is the end of what it printed.
    """
    result, log = scratch / "result.jsonl", scratch / "bench.log"
    result.unlink(missing_ok=True)
    process = multiprocessing.get_context("fork").Process(
        target=_bench_serving, args=([*options, "--output-file", str(result)], log)
    )
    process.start()
    process.join(max(seconds, 0))
    if process.is_alive():
        process.kill()
        process.join()
        raise TimeoutError
    if process.exitcode or not result.exists():
        raise Broken(f"bench_serving ended with status {process.exitcode}: {log.read_text()[-2000:]}")
    return json.loads(result.read_text())


def _bench_serving(options: list[str], log: pathlib.Path) -> None:
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    # It keeps prompts in the home directory under a name that leaves out which tokenizer they are for.
    os.environ["HOME"] = str(log.parent)
    from sglang.benchmark.serving import cli_main

    sys.argv = ["bench_serving", *options]
    cli_main()


def counters(server: Server) -> dict[str, float]:
    """What SGLang has counted so far, and the tokens in L2."""
    page = requests.get(f"{server.http.url}/metrics", timeout=30).text
    names = COUNTERS | {"l2_tokens": L2_TOKENS, "l2_used_tokens": L2_USED_TOKENS}
    return {field: metric(page, name) for field, name in names.items()}


def measure(server: Server, workload: Workload, seed: int, scratch: pathlib.Path, seconds: float) -> dict[str, Any]:
    """One run on an empty cache.

    Raises:
        TimeoutError: it was not done in time.
        Broken: requests were not answered.
    """
    options = ["--backend", "sglang", "--base-url", server.http.url, *workload.options(seed), "--cache-report"]
    options += ["--warmup-requests", "0", "--disable-tqdm", "--output-details"]
    try:
        server.http.flush()
        before = counters(server)
        bench = bench_serving(options, scratch, seconds)
        time.sleep(SETTLING_SECONDS)
        after = counters(server)
    except requests.RequestException as error:
        raise Broken(str(error)) from error
    if bench["completed"] != workload.requests:
        (error, *_) = filter(None, bench["errors"])
        raise Broken(f"{bench['completed']} of {workload.requests} requests were answered; {error}")
    hits = bench["cache_report"]
    # An answer without text has no first token for the benchmark; with a real tokenizer's half characters that happens.
    first = [1e3 * value for value in bench["ttfts"] if value]
    return {
        **{field: int(after[field] - before[field]) for field in COUNTERS},
        "l2_used_tokens": int(after["l2_used_tokens"]),
        "seconds": bench["duration"],
        "prompt_tokens": hits["total_prompt_tokens"],
        "from_l1_tokens": hits["device_cached_tokens"] or 0,
        "from_l2_tokens": hits["host_cached_tokens"] or 0,
        "ttft_ms": {"mean": np.mean(first), "p99": np.percentile(first, 99), "answers": len(first)},
        "tpot_ms": bench["mean_tpot_ms"],
        "output_tokens_per_s": bench["output_throughput"],
        "options": shlex.join(options),
        "bench": bench,
    }


def warm(server: Server, workload: Workload, scratch: pathlib.Path, clock: Clock) -> None:
    """Compile what a run needs: prefixes of twice L1, each asked for twice; and learn the size of L2.

    Raises:
        Refused: time is up before anything was measured.
        Broken: requests were not answered.
    """
    less = evolve(workload, groups=2 * server.l1_tokens // workload.prefix + 1, prompts_per_group=2)
    try:
        run = measure(server, less, 0, scratch, clock.left())
    except TimeoutError as error:
        raise Refused(f"{server.name}: --limit passed before anything was measured") from error
    server.l2_tokens = int(counters(server)["l2_tokens"])
    server.bytes_per_token = run["backup_bytes"] / run["backup_tokens"] if run["backup_tokens"] else 0.0
    clock.say(f"{server.name} is warm: L1 {server.l1_tokens:,}, L2 {server.l2_tokens:,} tokens")


# -- the whole -------------------------------------------------------------------------------------------------------


@define
class Result:
    """An experiment's result file; written again after each run, so that nothing is lost with the next."""

    path: pathlib.Path
    data: dict[str, Any]

    def add(self, run: dict[str, Any]) -> None:
        self.data["runs"].append(run)
        self.write()

    def write(self) -> None:
        self.path.write_text(json.dumps(self.data, indent=1) + "\n")


def describe(server: Server) -> dict[str, Any]:
    """A server, as result files have it: its command without this machine's folders."""
    return {
        "command": without_folders(server.command),
        "l1_tokens": server.l1_tokens,
        "l2_tokens": server.l2_tokens,
        "bytes_per_token": server.bytes_per_token,
        "hiqcache": server.report,
    }


def conduct(
    experiment: Experiment,
    servers: Sequence[Server],
    result: Result,
    repeats: int,
    scratch: pathlib.Path,
    clock: Clock,
    runs_dir: pathlib.Path | None = None,
) -> None:
    """All runs of an experiment, in turns, as far as time allows; on without a server that breaks.

    Raises:
        Refused: there is nothing to compare; the result says so too.
    """
    try:
        check_servers(experiment, servers)
        workloads, order = points(experiment, servers), list(servers)
        for repeat in range(1, repeats + 1):
            for workload in workloads:
                for server in list(order):
                    run = {
                        "experiment": experiment.name,
                        "configuration": server.name,
                        "repeat": repeat,
                        "workload": asdict(workload),
                    }
                    try:
                        run |= measure(server, workload, repeat, scratch, clock.left())
                    except Broken as error:
                        clock.say(f"{experiment.name}: on without {server.name}: {error}")
                        result.data["broken"][server.name] = str(error)
                        order.remove(server)
                        check_servers(experiment, order)
                        continue
                    bench = run.pop("bench")
                    result.add(run)
                    if runs_dir:
                        number = len(result.data["runs"])
                        (runs_dir / f"{experiment.name}-{number:03}-{server.name}.json").write_text(json.dumps(bench))
                    clock.say(experiment_report.line(run))
                    check_run(run, server, workload)
            order.append(order.pop(0))
        result.data["finished"] = True
    except Refused as error:
        result.data["refused"] = error.message
        raise
    except TimeoutError:
        clock.say(f"{experiment.name}: stopped by --limit after {len(result.data['runs'])} runs")
    finally:
        result.write()


@click.group(cls=Commands, help=__doc__)
def main() -> None:
    pass


@main.command()
@click.argument(
    "names", nargs=-1, required=True, type=click.Choice(["equal-capacity", "equal-budget", "crossover", "formats"])
)
@click.option(
    "--out",
    required=True,
    type=click.Path(file_okay=False, path_type=pathlib.Path),
    help="Folder for experiment-NAME.json.",
)
@click.option("--repeats", default=4, show_default=True, type=click.IntRange(1), help="Runs of each configuration.")
@click.option("--limit", default=3600.0, show_default=True, help="Seconds after which nothing more is measured.")
@click.option("--only", multiple=True, metavar="CONFIGURATION", help="Leave out the others; repeat it for each.")
@click.option("--small", is_flag=True, help="A size for CPUs, with SmolLM2-135M.")
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=pathlib.Path),
    help="Folder of a model and its tokenizer, instead of random weights in Qwen3-8B's shape, or of SmolLM2-135M.",
)
@click.option(
    "--runs-dir",
    type=click.Path(file_okay=False, path_type=pathlib.Path),
    help="Folder for what bench_serving itself says of each run.",
)
def run(
    names: tuple[str, ...],
    out: pathlib.Path,
    repeats: int,
    limit: float,
    only: tuple[str, ...],
    small: bool,
    model: pathlib.Path | None,
    runs_dir: pathlib.Path | None,
) -> None:
    """Run experiments one after the other on the same servers."""
    clock = Clock(limit)
    if not small and not torch.cuda.is_available():
        raise click.ClickException("no NVIDIA GPU here; allowed: --small, which runs on a CPU")
    end_servers_on_sigterm()
    with tempfile.TemporaryDirectory() as directory:
        scratch = pathlib.Path(directory)
        weights: tuple[str, ...] = ()
        if model is None and small:
            model = sample_model.fetch()
        elif model is None:
            model, weights = write_model(scratch / "model", QWEN3_8B), ("--load-format", "dummy")
        known = small_size(model) if small else full_size()
        if missing := [name for name in names if name not in known]:
            raise click.BadParameter(
                f"{', '.join(missing)} with --small; allowed: {', '.join(known)}", param_hint="NAMES"
            )
        experiments = keep([known[name] for name in names], only)
        if len({experiment.page_size for experiment in experiments}) > 1:
            raise click.BadParameter(
                f"{', '.join(names)} have different page sizes; run one at a time", param_hint="NAMES"
            )
        for folder in filter(None, (out, runs_dir)):
            folder.mkdir(parents=True, exist_ok=True)

        configurations = list(dict.fromkeys(c for experiment in experiments for c in experiment.configurations))
        clock.say(f"starting {len(configurations)} servers: {', '.join(c.name for c in configurations)}")
        context = ("--context-length", str(experiments[0].workload.context))
        with serve(configurations, experiments[0].page_size, model, scratch, (*weights, *context)) as (servers, failed):
            for name, reason in failed.items():
                clock.say(f"{name} did not start: {reason}")
            for server in list(servers):
                try:
                    warm(server, experiments[0].workload, scratch, clock)
                except Broken as error:
                    clock.say(f"{server.name}: {error}")
                    failed[server.name] = str(error)
                    servers.remove(server)
            problems = [f"{name} could not be measured" for name in failed]
            for experiment in experiments:
                part = [server for server in servers if server.configuration in experiment.configurations]
                data = {
                    "experiment": experiment.name,
                    **provenance(command_line()),
                    "model": "Qwen3-8B's shape, random weights" if weights else model.name,
                    "page_size": experiment.page_size,
                    "servers": {server.name: describe(server) for server in part},
                    "finished": False,
                    "refused": None,
                    "broken": {},
                    "runs": [],
                }
                result = Result(out / f"experiment-{experiment.name}{'-small' if small else ''}.json", data)
                try:
                    conduct(experiment, part, result, repeats, scratch, clock, runs_dir)
                    problems += [f"{experiment.name}: {name} broke" for name in data["broken"]]
                    click.echo(experiment_report.markdown(data))
                except Refused as error:
                    problems.append(error.message)
    if problems:
        raise Refused("\n".join(problems))


def keep(experiments: Sequence[Experiment], only: Sequence[str]) -> list[Experiment]:
    """The experiments with these configurations alone; with all of them if none is named.

    Raises:
        click.BadParameter: no experiment has a configuration of that name.
    """
    names = sorted({configuration.name for experiment in experiments for configuration in experiment.configurations})
    if unknown := sorted(set(only) - set(names)):
        raise click.BadParameter(f"saw {', '.join(unknown)}; allowed: {', '.join(names)}", param_hint="--only")
    kept = only or names
    return [
        evolve(experiment, configurations=tuple(c for c in experiment.configurations if c.name in kept))
        for experiment in experiments
    ]


@main.command()
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=pathlib.Path))
@click.option("--plot", type=click.Path(path_type=pathlib.Path), callback=picture, help="SVG or PNG file to write.")
def report(path: pathlib.Path, plot: pathlib.Path | None) -> None:
    """Print a result file's tables in Markdown; exit status 1 if it was refused."""
    data = read_result(path, "experiment", "hardware", "servers", "broken", "runs", "refused")
    if data["refused"]:
        raise Refused(data["refused"])
    click.echo(experiment_report.markdown(data))
    if plot:
        experiment_report.plot(data, plot)


if __name__ == "__main__":
    main()
