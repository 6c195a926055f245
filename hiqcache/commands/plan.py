"""`hiqcache plan`: what a smaller representation would gain on a trace of requests."""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from hiqcache.commands._geometry import geometry_of
from hiqcache.commands._picture import picture, spare

if TYPE_CHECKING:
    from hiqcache.geometry import KVGeometry
    from hiqcache.plan.cache import Limits
    from hiqcache.plan.replay import Plan, Totals

_COUNT = click.IntRange(1, 65_536)
_POLICIES = ("write_through", "write_through_selective", "write_back")
"""Values of `WritePolicy`, whose module imports torch: seconds that --help need not wait."""
_BUDGETS = (16, 32, 64, 128, 256, 512, 1024)
_EVICTION = "lru"
"""The only `--radix-eviction-policy` that is modelled."""
_STDIN = Path("-")


@click.command
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path))
@click.option("--config", metavar="PATH", help="The model's Hugging Face config.json, or the folder that holds it.")
@click.option("--layers", type=_COUNT, help="Layers with KV; instead of --config.")
@click.option("--heads", type=_COUNT, help="KV heads of the whole model; instead of --config.")
@click.option("--head-dim", type=_COUNT, help="Values of a head for one token; instead of --config.")
@click.option("--tp-size", type=_COUNT, default=1, show_default=True, help="Ranks that the heads are divided among.")
@click.option("--page-size", type=_COUNT, default=1, show_default=True, help="Tokens in a page.")
@click.option(
    "--device-tokens",
    type=click.IntRange(1, 10**12),
    required=True,
    help="L1 tokens: max_total_num_tokens in the server's log.",
)
@click.option(
    "--hicache-size",
    "budgets",
    type=_COUNT,
    multiple=True,
    metavar="GB",
    default=_BUDGETS,
    show_default=True,
    help="Host budget of each rank, in whole GB of 10**9 bytes; may be repeated.",
)
@click.option("--hicache-write-policy", "policy", type=click.Choice(_POLICIES), default=_POLICIES[0], show_default=True)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=picture,
    metavar="FILE",
    help="Draw hit rate against GB; FILE ends in .png or .svg.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.pass_context
def command(
    ctx: click.Context,
    trace: Path,
    config: str | None,
    layers: int | None,
    heads: int | None,
    head_dim: int | None,
    tp_size: int,
    page_size: int,
    device_tokens: int,
    budgets: tuple[int, ...],
    policy: str,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Replay TRACE for every representation at the same host budgets.

    TRACE is a Mooncake trace, or JSON Lines of token ids or prefix hashes, gzip or not; - is standard input.
    docs/planning.md describes both, and which of SGLang's rules are followed. The model is given by --config, or by
    --layers, --heads and --head-dim.

    Both tiers evict as --radix-eviction-policy lru does, SGLang's default; lfu, slru, tlru and priority are not
    modelled.

    The exit status is 1 if no representation can hold the model.
    """
    from hiqcache.geometry import HiqcacheError
    from hiqcache.plan.cache import Limits, WritePolicy
    from hiqcache.plan.plot import draw

    if trace != _STDIN and not trace.is_file():  # a pipe can be read once
        raise click.BadParameter(f"{str(trace)!r} is not a regular file. It is read for every budget: give it as -.")
    spare(plot, trace)
    geometry = geometry_of(config, layers, heads, head_dim, None, tp_size, page_size)
    limits = Limits(l1_tokens=device_tokens, l2_tokens=0, page_size=page_size, policy=WritePolicy(policy))
    bytes_per_token, refused = _representations(geometry)
    name = "standard input" if trace == _STDIN else trace.name
    with _readable(trace) as file:
        plan = _replay(file, limits, bytes_per_token, sorted(set(budgets)))
        if not plan.without_l2.requests:
            raise HiqcacheError(f"L1 of {device_tokens:,} tokens is too small for every request of {name}")
        if as_json:
            document = _document(file, name, geometry, limits, bytes_per_token, refused, plan)
            click.echo(json.dumps(document, indent=2))
        else:
            _print(plan, refused)
    if plot:
        draw(plan, f"{name}, L1 of {device_tokens:,} tokens", plot)
    if not bytes_per_token:
        ctx.exit(1)


@contextmanager
def _readable(trace: Path) -> Iterator[Path]:
    """The trace as a file that can be read many times: itself, or a temporary copy of standard input."""
    if trace != _STDIN:
        yield trace
        return
    with tempfile.NamedTemporaryFile(prefix="hiqcache-trace-") as copy:
        shutil.copyfileobj(sys.stdin.buffer, copy)
        copy.flush()
        yield Path(copy.name)


def _representations(geometry: "KVGeometry") -> tuple[dict[str, int], dict[str, str]]:
    """Host bytes per token of the representations that can hold `geometry`, and what is wrong with the others."""
    from hiqcache import registry

    bytes_per_token, refused = {}, {}
    for name in registry.names():
        try:
            bytes_per_token[name] = registry.get(name)(geometry).bytes_per_token()
        except Exception as error:  # a third party's class may raise anything
            refused[name] = " ".join(str(error).split())
    return bytes_per_token, refused


def _replay(trace: Path, limits: "Limits", bytes_per_token: Mapping[str, int], budgets: list[int]) -> "Plan":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    from hiqcache.plan.replay import make_plan
    from hiqcache.plan.trace import Request, lines_of, read_trace

    def requests(progress: Progress, task: TaskID) -> Iterator[Request]:
        def lines(file: BinaryIO) -> Iterator[bytes]:
            before = 0
            for line in lines_of(file):
                yield line
                progress.advance(task, file.tell() - before)  # bytes of the file, compressed or not
                before = file.tell()

        with trace.open("rb") as file:
            yield from read_trace(lines(file), limits.page_size)

    console = Console(stderr=True)
    columns = TextColumn("replaying"), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        replays = 1 + len(budgets) * len(bytes_per_token)
        task = progress.add_task("", total=replays * trace.stat().st_size)
        return make_plan(lambda: requests(progress, task), limits, bytes_per_token, budgets)


def _print(plan: "Plan", refused: Mapping[str, str]) -> None:
    from rich.table import Column

    from hiqcache.commands._table import print_table

    alone = plan.without_l2
    click.echo(f"{alone.requests:,} requests, {alone.prompt_tokens:,} prompt tokens; both tiers evict by {_EVICTION}")
    if alone.refused:
        click.echo(f"{alone.refused:,} more do not fit in L1 and are left out")

    def figures(totals: "Totals") -> list[str]:
        return [f"{totals.hit_rate:.1%}", f"{totals.l2_tokens:,}", f"{totals.saved_tokens:,}"]

    rows = [["-", "no L2", "-", *figures(alone)]]
    rows += [
        [f"{estimate.gigabytes:,}", name, f"{estimate.pool_tokens:,}", *figures(estimate.totals)]
        for same_budget in zip(*plan.estimates.values(), strict=True)
        for name, estimate in zip(plan.estimates, same_budget, strict=True)
    ]
    names = ("GB", "representation", "L2 tokens", "hit rate", "served from L2", "prefill saved")
    columns = [Column(name, justify="left" if name == "representation" else "right") for name in names]
    print_table(columns, rows)
    for name, why in refused.items():
        click.echo(f"{name} is left out: {why}")


def _document(
    trace: Path,
    name: str,
    geometry: "KVGeometry",
    limits: "Limits",
    bytes_per_token: Mapping[str, int],
    refused: Mapping[str, str],
    plan: "Plan",
) -> dict:
    import hashlib
    import platform
    import shlex

    from attrs import asdict

    from hiqcache import __version__
    from hiqcache.plan.cache import RULES

    def figures(totals: "Totals") -> dict:
        return {**asdict(totals), "saved_tokens": totals.saved_tokens, "hit_rate": totals.hit_rate}

    with trace.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "command": shlex.join(["hiqcache", *sys.argv[1:]]),
        "hiqcache": __version__,
        "python": platform.python_version(),
        "rules": RULES,
        "trace": {"name": name, "sha256": digest},
        "geometry": {**asdict(geometry), "dtype": str(geometry.dtype).removeprefix("torch.")},
        "l1_tokens": limits.l1_tokens,
        "chunk_tokens": limits.chunk_tokens,
        "write_policy": limits.policy.value,
        "eviction_policy": _EVICTION,
        "without_l2": figures(plan.without_l2),
        "representations": {
            name: {
                "bytes_per_token": bytes_per_token[name],
                "budgets": [
                    {"gigabytes": each.gigabytes, "pool_tokens": each.pool_tokens, **figures(each.totals)}
                    for each in estimates
                ],
            }
            for name, estimates in plan.estimates.items()
        }
        | {name: {"refused": why} for name, why in refused.items()},
    }
