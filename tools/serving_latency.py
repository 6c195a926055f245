"""What an encoded L2 does to a served request: time to first token after a restore, and to requests beside it.

\b
    python tools/serving_latency.py --out docs/results/serving-latency.json --plot docs/results/serving-latency.svg
    python tools/serving_latency.py --attention-backend flashinfer --prompt 4096 --prompt 12288 --prompt 32768 \\
        --server int8 --server k6v4 --server int4 --out docs/results/serving-latency-flashinfer.json

SGLang servers share one GPU and are driven one at a time, in turn: SGLang's own BF16 HiCache without the plugin
(`stock`), and one for each representation asked for. Random weights in Qwen3-8B's shape, page size 64, `page_first`,
write-through. Each sleeps when idle and has processor cores of its own, so that none slows another's launches. Which
cores matters by milliseconds, so they go round: with as many repeats as servers, or twice as many, each server has had
each set of cores equally often.

\b
* Time to first token: prompts of each length, more of them than L1 holds, asked for in turn, so that each comes back
  from L2 (the answer says so, or the sample is refused) but for its last tokens, which are computed. Every
  server gets a prompt before any gets the next, and ratios compare answers to the same prompt. Then each is asked for
  the same prompt again, now in L1: what that takes, no restore can save. What the first answer took beyond the second
  is what the restore cost that server.
* Another hiqcache beside this one, to compare two versions in one run: `pip install --target FOLDER` it without its
  dependencies, and say `--beside NAME=FOLDER`. Its server is asked for int8.
* Inter-token latency: a batch of decoding requests, while prompts of 4k tokens arrive at a fixed rate whatever the
  server does (open loop): each restores its prefix from L2, computes a new question and is backed up.
"""

import asyncio
import contextlib
import gzip
import json
import os
import pathlib
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import click
import numpy as np
from attrs import define, frozen
from results import command_line, writable
from rich.console import Console
from rich.table import Table
from servers import QWEN3_8B, end_servers_on_sigterm, launch, provenance, write_model
from serving import environment, free_port, http, sampling

from hiqcache import registry
from hiqcache.plotting import save

PAGE_SIZE = 64
L1_TOKENS = 49152
SERVERS = ("stock", "bf16", "int8")
"""By default. "stock" is SGLang's own HiCache without the plugin; any other name is a representation."""
PREFILL_GRAPHS = (64, 128, 256)
"""New tokens for which CUDA graphs of prefills are captured, as SGLang does by default for many more sizes: without
them the host's launches, some 40 ms of them, would hide any restore."""
PROMPTS = (1024, 4096, 12288)
"""Tokens of the prompts, by default."""
ARRIVAL_TOKENS = 4096
"""Of the prefixes that are restored beside the decoding batch, and of the prompt that is profiled."""
L2_GIGABYTES = 20
START_SECONDS = 560
"""FlashInfer compiles for minutes where it has not run before."""
MEASUREMENTS = ("ttft", "inter-token", "profile")
DECODING, DECODE_TOKENS = 16, 1600
RATE, SECONDS = 6.0, 8.0
"""Arrivals per second during the inter-token measurement, and its length."""


@define
class Server:
    """A running server and what was measured on it.

    Attributes:
        url: where it listens.
        process_group: its processes.
        memory: bytes of GPU memory taken while it started.
        firsts: tokens of a prompt -> its answers, each prompt restored from L2.
        without: the same, each prompt still in L1.
        gaps: seconds between tokens of the decoding batch, one list for each repeat.
        profile: what the GPU did for one prompt of 4,096 tokens restored from L2.
    """

    url: str
    process_group: int
    memory: int | None
    firsts: dict[int, list["First"]]
    without: dict[int, list["First"]]
    gaps: list[list[float]]
    profile: dict[str, Any] | None = None


@frozen
class First:
    """A request's first token.

    Attributes:
        seconds: since it was asked for.
        queued: seconds of it before SGLang put the request into a batch.
        prefill: seconds of it in which that batch ran.
        from_host: tokens restored from L2.
        from_device: tokens found in L1.
    """

    seconds: float
    queued: float
    prefill: float
    from_host: int
    from_device: int


def cycle(tokens: int) -> int:
    """Prompts of `tokens` to ask for in turn, more than L1 holds."""
    held = L1_TOKENS // tokens
    return held + max(2, held // 4)


def prompt(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 150000) for _ in range(tokens)]


async def ask(session: aiohttp.ClientSession, url: str, tokens: list[int]) -> First:
    """Ask for one token."""
    start = time.perf_counter()
    async with session.post(f"{url}/generate", json={"input_ids": tokens, "sampling_params": sampling(1)}) as answer:
        meta = (await answer.json())["meta_info"]
    seconds, details = time.perf_counter() - start, meta.get("cached_tokens_details") or {"host": 0, "device": 0}
    prefill = meta["prefill_finished_time"] - meta["forward_entry_time"]
    return First(seconds, meta["queue_time"], prefill, details["host"], details["device"])


async def decode(session: aiohttp.ClientSession, url: str, tokens: list[int], gaps: list[float]) -> None:
    """Stream an answer, noting the time between its tokens."""
    body = {"input_ids": tokens, "sampling_params": sampling(DECODE_TOKENS), "stream": True}
    last = None
    async with session.post(f"{url}/generate", json=body) as answer:
        async for line in answer.content:
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                if last is not None:
                    gaps.append(now - last)
                last = now


async def measure_ttft(servers: list[Server], tokens: int, keep: bool) -> None:
    """One cycle over the prompts of a length."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(300)) as session:
        for number in range(cycle(tokens)):
            turn = number % len(servers)
            for server in (*servers[turn:], *servers[:turn]):
                first = await ask(session, server.url, prompt(number + tokens, tokens))
                if keep:
                    again = await ask(session, server.url, prompt(number + tokens, tokens))
                    if min(first.from_host, again.from_device) < tokens - 2 * PAGE_SIZE:
                        raise click.ClickException(
                            f"{tokens} tokens: {first.from_host} came from L2 at first and {again.from_device} from L1 "
                            "then; nothing measured"
                        )
                    server.firsts[tokens].append(first)
                    server.without[tokens].append(again)


async def measure_gaps(server: Server, round_: int) -> None:
    """A decoding batch under open-loop arrivals; the gaps between its tokens while they arrive."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(300)) as session:
        gaps: list[float] = []
        running = [
            asyncio.create_task(decode(session, server.url, prompt(10**6 + 100 * round_ + i, 64), gaps))
            for i in range(DECODING)
        ]
        await asyncio.sleep(2)
        gaps.clear()
        arrivals, start = [], time.perf_counter()
        for number in range(int(RATE * SECONDS)):
            await asyncio.sleep(max(0.0, start + number / RATE - time.perf_counter()))
            question = prompt(10**7 + 1000 * round_ + number, 128)
            prefix = prompt(ARRIVAL_TOKENS + number % cycle(ARRIVAL_TOKENS), ARRIVAL_TOKENS)
            arrivals.append(asyncio.create_task(ask(session, server.url, [*prefix, *question])))
        found = await asyncio.gather(*arrivals)
        server.gaps.append(list(gaps))
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        # An arrival whose prefix L2 has lost is computed anew, and its prefill would be what is measured.
        if min(first.from_host + first.from_device for first in found) < ARRIVAL_TOKENS:
            raise click.ClickException(
                f"arrivals found no prefix of {ARRIVAL_TOKENS} tokens: {found}; nothing measured"
            )
        if statistics.median(first.from_host for first in found) < ARRIVAL_TOKENS / 2:
            raise click.ClickException(f"arrivals were not restored from L2: {found}; nothing measured")
    await asyncio.sleep(1)


async def measure_profile(server: Server, folder: pathlib.Path) -> None:
    """SGLang's own profiler over one restored prompt."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(300)) as session:
        body = {"output_dir": str(folder), "activities": ["GPU"]}
        async with session.post(f"{server.url}/start_profile", json=body) as answer:
            answer.raise_for_status()
        first = await ask(session, server.url, prompt(ARRIVAL_TOKENS, ARRIVAL_TOKENS))
        async with session.post(f"{server.url}/stop_profile") as answer:
            answer.raise_for_status()
    [trace] = folder.glob("*.trace.json.gz")
    server.profile = {"from_host": first.from_host, **gpu_work(json.loads(gzip.decompress(trace.read_bytes())))}


def gpu_work(trace: dict[str, Any]) -> dict[str, Any]:
    """Of a PyTorch trace: milliseconds from the GPU's first work to its last, in which a kernel ran, and by name."""
    events = [e for e in trace["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy")]
    start, end = min(e["ts"] for e in events), max(e["ts"] + e["dur"] for e in events)
    busy, until = 0.0, start
    for event in sorted((e for e in events if e["cat"] == "kernel"), key=lambda e: e["ts"]):
        busy += max(0.0, event["ts"] + event["dur"] - max(until, event["ts"]))
        until = max(until, event["ts"] + event["dur"])
    names: dict[str, list[float]] = {}
    for event in events:
        names.setdefault(event["name"][:80], []).append(event["dur"] / 1e3)
    largest = sorted(names.items(), key=lambda item: -sum(item[1]))[:16]
    return {
        "span_ms": (end - start) / 1e3,
        "kernels_ms": busy / 1e3,
        "largest": [{"name": name, "calls": len(each), "ms": sum(each)} for name, each in largest],
    }


def start(
    name: str, attention: str, prompts: tuple[int, ...], model: pathlib.Path, scratch: pathlib.Path,
    stack: contextlib.ExitStack, beside: Mapping[str, pathlib.Path],
) -> Server:  # fmt: skip
    """A server of one configuration, up."""
    port = free_port()
    context = max(16384, *(tokens + 1024 for tokens in prompts))
    words = ["--skip-tokenizer-init", "--load-format", "dummy", "--context-length", str(context), "--enable-metrics"]
    words += [
        "--cuda-graph-max-bs-decode",
        "32",
        "--sleep-on-idle",
        "--enable-hierarchical-cache",
        "--hicache-size",
        str(L2_GIGABYTES),
    ]
    words += [] if name == "stock" else ["--hicache-representation", "int8" if name in beside else name]
    command = launch(
        model,
        port,
        l1_tokens=L1_TOKENS,
        page_size=PAGE_SIZE,
        memory=0.8,
        prefill_graphs=PREFILL_GRAPHS,
        attention=attention,
        arguments=words,
    )
    variables = environment() | ({"SGLANG_PLUGINS": "none"} if name == "stock" else {})
    if name in beside:
        variables["PYTHONPATH"] = f"{beside[name]}:{variables.get('PYTHONPATH', '')}".rstrip(":")
    server = stack.enter_context(http(command, scratch / f"{name}.log", port, variables, START_SECONDS))
    firsts, without = ({tokens: [] for tokens in prompts} for _ in range(2))
    return Server(server.url, server.process_group, gpu_memory(server.process_group), firsts, without, [])


def core_sets(cores: Sequence[int], servers: int, round_: int) -> list[list[int]]:
    """The cores of each server in a round: neighbours, which may be halves of one core, and other ones each round."""
    share = len(cores) // servers
    if not share:
        return [list(cores)] * servers
    parts = [list(cores[share * i : share * (i + 1)]) for i in range(servers)]
    return [parts[(i + round_) % servers] for i in range(servers)]


def pin(process_group: int, cores: Sequence[int]) -> None:
    """Let every thread of a group of processes run on some cores only."""
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if os.getpgid(int(process.name)) == process_group:
                for thread in (process / "task").iterdir():
                    os.sched_setaffinity(int(thread.name), cores)


def gpu_memory(process_group: int) -> int | None:
    """Bytes of GPU memory that the processes of a group hold, as the driver counts them; None if it does not say."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    try:
        rows = [(int(pid), int(mebibytes)) for pid, mebibytes in (line.split(",") for line in lines)]
        return sum(mebibytes << 20 for pid, mebibytes in rows if os.getpgid(pid) == process_group) or None
    except (ValueError, ProcessLookupError):
        return None


def interval(values: list[float], of: Any) -> list[float]:
    """95% bootstrap interval of a statistic of `values`."""
    rng = np.random.default_rng(0)
    data = np.asarray(values)
    estimates = [of(rng.choice(data, len(data))) for _ in range(500)]
    return [float(edge) for edge in np.percentile(estimates, [2.5, 97.5])]


def summary(server: Server, stock: Server) -> dict[str, Any]:
    """Medians and intervals in milliseconds; ratios to `stock`, of the same prompts and repeats."""
    out: dict[str, Any] = {"gpu_bytes": server.memory, "ttft_ms": {}, "inter_token_ms": {}, "profile": server.profile}
    for tokens, firsts in server.firsts.items():
        ms = [1e3 * first.seconds for first in firsts]
        if not firsts:
            continue
        ratios = [mine.seconds / its.seconds for mine, its in zip(firsts, stock.firsts[tokens], strict=True)]
        restoring = [
            1e3 * (first.seconds - again.seconds) for first, again in zip(firsts, server.without[tokens], strict=True)
        ]
        out["ttft_ms"][str(tokens)] = {
            "median": statistics.median(ms),
            "interval": interval(ms, np.median),
            "queued": statistics.median(1e3 * first.queued for first in firsts),
            "prefill": statistics.median(1e3 * first.prefill for first in firsts),
            "from_l1": statistics.median(1e3 * again.seconds for again in server.without[tokens]),
            "over_l1": statistics.median(restoring),
            "over_l1_interval": interval(restoring, np.median),
            "ratio": statistics.median(ratios),
            "ratio_interval": interval(ratios, np.median),
            "samples": len(ms),
        }
    for percentile in (50, 99) if server.gaps else ():
        each, its = ([1e3 * float(np.percentile(gaps, percentile)) for gaps in of.gaps] for of in (server, stock))
        ratios = [mine / other for mine, other in zip(each, its, strict=True)]
        out["inter_token_ms"][f"p{percentile}"] = {
            "median": statistics.median(each),
            "repeats": each,
            "ratio": statistics.median(ratios),
            "ratio_range": [min(ratios), max(ratios)],
        }
    return out


def plot(result: dict[str, Any], path: pathlib.Path) -> None:
    """Time to first token by prompt length, and inter-token percentiles, side by side, as far as they were measured."""
    import matplotlib.pyplot as plt

    servers = result["servers"]
    panels = [measured for measured in ("ttft_ms", "inter_token_ms") if servers["stock"][measured]]
    figure, axes = plt.subplots(
        1, max(1, len(panels)), figsize=(5 * max(1, len(panels)), 3.6), squeeze=False, layout="constrained"
    )
    width = 0.8 / len(servers)
    for panel, axis in zip(panels, axes[0], strict=False):
        titles = list(servers["stock"][panel])
        for index, (name, data) in enumerate(servers.items()):
            found = [data[panel][title] for title in titles]
            places = np.arange(len(titles)) + width * (index - (len(servers) - 1) / 2)
            spread = None
            if panel == "inter_token_ms":
                spread = [np.ptp(each["repeats"]) / 2 for each in found]
            axis.bar(places, [each["median"] for each in found], 0.9 * width, yerr=spread, capsize=3, label=name)
            if panel == "ttft_ms":
                hits, half = [each["from_l1"] for each in found], 0.45 * width
                label = None if index else "from L1"
                axis.hlines(hits, places - half, places + half, colors="black", label=label)
        if panel == "ttft_ms":
            axis.set_xticks(range(len(titles)), [f"{int(tokens):,}" for tokens in titles])
            axis.set(xlabel="prompt tokens, restored from L2", ylabel="time to first token, ms")
        else:
            axis.set_xticks(range(len(titles)), titles)
            axis.set(ylabel="inter-token latency, ms", title=f"{DECODING} decoding, {RATE:g} restores/s")
        axis.legend()
    save(figure, path)


def known() -> list[str]:
    """What `--server` takes."""
    return ["stock", *registry.names()]


def other_versions(_: click.Context, __: click.Parameter, texts: tuple[str, ...]) -> dict[str, pathlib.Path]:
    """Read each `NAME=FOLDER`.

    Raises:
        click.BadParameter: it is anything else, the name is taken, or nobody installed hiqcache there.
    """
    folders: dict[str, pathlib.Path] = {}
    for text in texts:
        name, folder = text.split("=", 1) if "=" in text else ("", "")
        path = pathlib.Path(folder).resolve()
        if not name or name in known() or name in folders:
            raise click.BadParameter(f"{text!r}; allowed: NAME=FOLDER, each name once and none of {known()}")
        if not any(path.glob("hiqcache-*.dist-info")):
            raise click.BadParameter(f"{text!r}: {path} has no installed hiqcache (pip install --target {path} ...)")
        folders[name] = path
    return folders


@click.command(help=__doc__)
@click.option("--out", required=True, type=click.Path(path_type=pathlib.Path), callback=writable, help="JSON to write.")
@click.option(
    "--plot", "picture", type=click.Path(path_type=pathlib.Path), callback=writable, help="SVG or PNG to write."
)
@click.option("--repeats", default=3, show_default=True, help="Rounds of every measurement.")
@click.option("--attention-backend", type=click.Choice(("triton", "flashinfer")), default="triton", show_default=True)
@click.option(
    "--prompt", "prompts", type=int, multiple=True, default=PROMPTS, show_default=True, help="Tokens of a prompt."
)
@click.option(
    "--server",
    "names",
    type=click.Choice(known()),
    multiple=True,
    default=SERVERS,
    show_default=True,
    callback=lambda _, __, names: ["stock", *(name for name in names if name != "stock")],
    help="Beside stock.",
)
@click.option(
    "--beside", multiple=True, callback=other_versions, metavar="NAME=FOLDER", help="Another hiqcache, installed there."
)
@click.option("--measure", type=click.Choice(MEASUREMENTS), multiple=True, default=MEASUREMENTS, show_default=True)
def main(
    out: pathlib.Path, picture: pathlib.Path | None, repeats: int, attention_backend: str, prompts: tuple[int, ...],
    names: list[str], beside: dict[str, pathlib.Path], measure: tuple[str, ...],
) -> None:  # fmt: skip
    end_servers_on_sigterm()
    began = time.monotonic()

    def progress(text: str) -> None:
        click.echo(f"{time.monotonic() - began:5.0f} s  {text}", err=True)

    settings = {
        "attention_backend": attention_backend,
        "page_size": PAGE_SIZE,
        "l1_tokens": L1_TOKENS,
        "l2_gigabytes": L2_GIGABYTES,
        "decoding": DECODING,
        "arrivals_per_s": RATE,
        "prefill_graphs": PREFILL_GRAPHS,
        "seconds": SECONDS,
        "repeats": repeats,
    }
    names = [*names, *beside]
    with contextlib.ExitStack() as stack:
        scratch = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = write_model(scratch / "model", QWEN3_8B)
        progress("starting servers, 90 s, and minutes more where kernels have to be compiled")
        with ThreadPoolExecutor() as pool:
            started = pool.map(
                lambda name: start(name, attention_backend, prompts, model, scratch, stack, beside), names
            )
            servers = dict(zip(names, started, strict=True))
        cores, order = sorted(os.sched_getaffinity(0)), list(servers.values())
        for round_ in range(repeats + 1):
            for server, part in zip(servers.values(), core_sets(cores, len(servers), round_), strict=True):
                pin(server.process_group, part)
            for tokens in prompts if "ttft" in measure else ():
                progress(
                    f"round {round_} of {repeats}{'' if round_ else ', to warm up'}: time to first of {tokens} tokens"
                )
                asyncio.run(measure_ttft(order, tokens, keep=False))
                asyncio.run(measure_ttft(order, tokens, keep=round_ > 0))
            if "inter-token" in measure:
                progress(f"round {round_} of {repeats}: inter-token latency")
                asyncio.run(measure_ttft(order, ARRIVAL_TOKENS, keep=False))  # the arrivals' prefixes into every L2
                for server in order:
                    asyncio.run(measure_gaps(server, round_))
                    if round_ == 0:
                        server.gaps.clear()
            order.append(order.pop(0))
            if round_ > 0:
                settings["rounds_done"] = round_
                write(report(servers, settings), out, picture)
        if "profile" in measure:
            progress("profiles")
            asyncio.run(measure_ttft(order, ARRIVAL_TOKENS, keep=False))
            for name, server in servers.items():
                asyncio.run(measure_profile(server, scratch / f"profile-{name}"))
            write(report(servers, settings), out, picture)
    show(report(servers, settings))


def report(servers: dict[str, Server], settings: dict[str, Any]) -> dict[str, Any]:
    """What goes to the file."""
    return {
        "what": "time to first token after a restore from L2, and inter-token latency beside restores",
        **provenance(command_line()),
        "settings": settings,
        "servers": {name: summary(server, servers["stock"]) for name, server in servers.items()},
    }


def write(result: dict[str, Any], out: pathlib.Path, picture: pathlib.Path | None) -> None:
    """The file and the plot, after every round: whoever runs out of time keeps what was measured."""
    out.write_text(json.dumps(result, indent=1) + "\n")
    if picture:
        plot(result, picture)


def show(result: dict[str, Any]) -> None:
    """A table, beside stock."""
    servers = result["servers"].values()
    table = Table("", *result["servers"])
    for tokens in result["servers"]["stock"]["ttft_ms"]:
        cells = [data["ttft_ms"][tokens] for data in servers]
        table.add_row(f"TTFT {tokens}", *(f"{cell['median']:.1f} ms ({cell['ratio']:.2f}x)" for cell in cells))
        table.add_row("  from L1", *(f"{cell['from_l1']:.1f} ms (then +{cell['over_l1']:.1f})" for cell in cells))
    for p in result["servers"]["stock"]["inter_token_ms"]:
        cells = [data["inter_token_ms"][p] for data in servers]
        table.add_row(f"inter-token {p}", *(f"{cell['median']:.2f} ms ({cell['ratio']:.2f}x)" for cell in cells))
    memory = [data["gpu_bytes"] for data in servers]
    table.add_row("GPU memory", *("unknown" if taken is None else f"{taken / 1e9:.2f} GB" for taken in memory))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
