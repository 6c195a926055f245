"""The results of `tools/experiment.py` as text, as Markdown tables and as plots; nothing here measures."""

import pathlib
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from hiqcache.plotting import save

Run = dict[str, Any]

COLUMNS: tuple[tuple[str, Callable[[Run], float], str], ...] = (
    ("hit rate", lambda run: hit_rate(run), ".1%"),
    ("tokens from L1", lambda run: run["from_l1_tokens"], ",.0f"),
    ("tokens from L2", lambda run: run["from_l2_tokens"], ",.0f"),
    ("L2 tokens in use", lambda run: run["l2_used_tokens"], ",.0f"),
    ("tokens backed up", lambda run: run["backup_tokens"], ",.0f"),
    ("tokens restored", lambda run: run["restore_tokens"], ",.0f"),
    ("backed up, GB", lambda run: run["backup_bytes"] / 1e9, ".3g"),
    ("restored, GB", lambda run: run["restore_bytes"] / 1e9, ".3g"),
    ("TTFT mean, ms", lambda run: run["ttft_ms"]["mean"], ".0f"),
    ("TTFT p99, ms", lambda run: run["ttft_ms"]["p99"], ".0f"),
    ("TPOT, ms", lambda run: run["tpot_ms"], ".1f"),
    ("output tokens/s", lambda run: run["output_tokens_per_s"], ",.0f"),
)
"""Title, value of a run, and how it is written."""
PLOTTED = ("hit rate", "TTFT mean, ms", "output tokens/s")
SWEPT = ("hit rate", "TTFT mean, ms")


def hit_rate(run: Run) -> float:
    """Part of the prompt tokens that came from L1 or L2."""
    return (run["from_l1_tokens"] + run["from_l2_tokens"]) / run["prompt_tokens"]


def reusable(run: Run) -> int:
    """Tokens of the reusable working set."""
    return run["workload"]["groups"] * run["workload"]["prefix"]


def line(run: Run) -> str:
    """A run in one line, for a log."""
    values = ", ".join(f"{title} {value(run):{form}}" for title, value, form in COLUMNS)
    return f"{run['experiment']} {reusable(run):,} repeat {run['repeat']} {run['configuration']}: {values}"


def compared(data: dict[str, Any]) -> dict[int, dict[str, list[Run]]]:
    """Working set -> configuration -> its runs, of the repeats that every configuration finished.

    A configuration whose server broke is left out.
    """
    found: dict[tuple[int, int], list[Run]] = defaultdict(list)
    for run in data["runs"]:
        found[reusable(run), run["repeat"]].append(run)
    sets: dict[int, dict[str, list[Run]]] = {}
    names = [name for name in data["servers"] if name not in data["broken"]]
    for (size, _), runs in sorted(found.items()):
        if {run["configuration"] for run in runs} >= set(names):
            each = sets.setdefault(size, {name: [] for name in names})
            for run in runs:
                if run["configuration"] in each:
                    each[run["configuration"]].append(run)
    return sets


def spread(runs: Sequence[Run], value: Callable[[Run], float], form: str) -> str:
    """Median and range."""
    values = [value(run) for run in runs]
    low, middle, high = (f"{number:{form}}" for number in (min(values), statistics.median(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def markdown(data: dict[str, Any]) -> str:
    """What a result file says, as Markdown."""
    sets = compared(data)
    if not sets:
        return f"{data['experiment']}: no repeat was finished for every configuration; nothing to compare."
    (any_set, *_) = sets.values()
    repeats = len(next(iter(any_set.values())))
    text = [
        f"{data['hardware']}; {data['model']}; page size {data['page_size']}; medians of {repeats}, ranges in "
        f"parentheses; {', '.join(f'{name} {version}' for name, version in data['versions'].items())}.",
        *(f"Not SGLang's own there: {part}." for part in data["replaced"]),
        *(f"Left out: {name}, which broke." for name in data["broken"]),
        capacity_table(data),
    ]
    if len(sets) == 1:
        ((size, runs),) = sets.items()
        workload = next(iter(runs.values()))[0]["workload"]
        text.append(
            f"{workload['groups']} groups x {workload['prompts_per_group']} prompts, prefixes of "
            f"{workload['prefix']:,} tokens ({size:,} reusable), questions of {workload['question']}, answers of "
            f"{workload['output']}, {workload['concurrency']} at a time."
        )
        titles = ["", *runs]
        rows = [[title, *(spread(each, value, form) for each in runs.values())] for title, value, form in COLUMNS]
        text.append(table(titles, rows))
    else:
        columns = [column for column in COLUMNS if column[0] in SWEPT]
        titles = ["reusable tokens", *(f"{title}, {name}" for title, *_ in columns for name in any_set)]
        rows = [
            [f"{size:,}", *(spread(runs[name], value, form) for _, value, form in columns for name in runs)]
            for size, runs in sets.items()
        ]
        text.append(table(titles, rows))
    return "\n\n".join(text)


def capacity_table(data: dict[str, Any]) -> str:
    """What each server holds; bytes per token are measured, bytes of L2 are their product with its tokens."""
    rows = []
    for name, server in data["servers"].items():
        host_bytes = server["l2_tokens"] * server["bytes_per_token"]
        cells = [server["l1_tokens"], server["l2_tokens"], server["bytes_per_token"], host_bytes]
        rows.append([name, *(f"{cell:,.0f}" if cell else "-" for cell in cells)])
    return table(["", "L1 tokens", "L2 tokens", "B/token backed up", "L2 bytes"], rows)


def plot(data: dict[str, Any], path: pathlib.Path) -> None:
    """Bars with ranges for each configuration or, where the working set was varied, lines over it."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    sets = compared(data)
    names = list(next(iter(sets.values())))
    shown = [column for column in COLUMNS if column[0] in (PLOTTED if len(sets) == 1 else SWEPT)]
    figure, every = plt.subplots(1, len(shown), figsize=(4.2 * len(shown), 3.6), layout="constrained", squeeze=False)
    for axes, (title, value, _) in zip(every[0], shown, strict=True):
        for index, name in enumerate(names):
            points = [[value(run) for run in runs[name]] for runs in sets.values()]
            middle = [statistics.median(values) for values in points]
            errors = [
                [mid - min(values) for mid, values in zip(middle, points, strict=True)],
                [max(values) - mid for mid, values in zip(middle, points, strict=True)],
            ]
            if len(sets) == 1:
                axes.bar(index, middle, yerr=errors, capsize=3)
            else:
                axes.errorbar(list(sets), middle, yerr=errors, capsize=3, marker="o", label=name)
                axes.axvline(data["servers"][name]["l2_tokens"], color=f"C{index}", linestyle=":")
        axes.set(title=title)
        axes.set_ylim(bottom=0)
        if len(sets) == 1:
            axes.set_xticks(range(len(names)), names, rotation=30)
        else:
            axes.set(xlabel="reusable tokens; dotted: each L2")
            axes.xaxis.set_major_locator(MaxNLocator(5))
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
            axes.legend()
    save(figure, path)
