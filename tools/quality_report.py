"""What the answers of tools/quality.py come to: figures with intervals, Markdown tables, a plot."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen
from quality_texts import Prompt

from hiqcache.plotting import save

SMALLEST = 2.0**-24
"""The rest bucket is never taken for less likely: what float32 log-probabilities leave of it below is rounding."""
RESAMPLES = 4000
YARDSTICK = "fp8"


@frozen
class Bar:
    """What is demanded of a representation's answers, on SmolLM2-135M.

    Attributes:
        perplexity: how far from exact KV's it may be, interval included, as a share of it.
        other, kl: the mean KL is at most so much of that of another arm.
        whole_interval: the upper end of the interval is, too.
    """

    perplexity: float
    other: str
    kl: float
    whole_interval: bool = False


BARS = {
    "int8": Bar(0.002, YARDSTICK, 0.5),
    "k6v4": Bar(0.004, YARDSTICK, 1.0, whole_interval=True),
    "int4": Bar(0.012, "nvfp4", 0.45),
}


@frozen(kw_only=True, eq=False)
class Score:
    """Log-probabilities at the positions of one continuation.

    Attributes:
        true: `[positions]`, of the text's own next token.
        ids: `[positions, top]`, the most likely tokens.
        logprobs: `[positions, top]`, theirs.
    """

    true: np.ndarray
    ids: np.ndarray
    logprobs: np.ndarray


@frozen(kw_only=True)
class Greedy:
    """A greedy answer; `ended`: by the model's end of text, which is the last token then."""

    tokens: tuple[int, ...]
    ended: bool


@frozen(kw_only=True, eq=False)
class Arm:
    """One way to hold the KV of the prefixes, and what the model answered.

    Attributes:
        name: in results.
        against: the arm that it is compared with; None for those that only serve as such.
        scores, greedy: by prompt; greedy answers were not asked of every arm.
        encoded_per_restored: tokens that L2 encoded for each token restored, where encoding again is the point.
    """

    name: str
    against: str | None = None
    scores: Sequence[Score]
    greedy: Sequence[Greedy] | None = None
    encoded_per_restored: float | None = None


def divergence(exact: Score, other: Score) -> np.ndarray:
    """KL(exact || other) at each position, in nats.

    Over the tokens that both name among their most likely ones; all others are one bucket. As for any such grouping,
    it is at most the divergence over the whole vocabulary.
    """
    found = np.empty(len(exact.true))
    for position in range(len(found)):
        _, mine, theirs = np.intersect1d(exact.ids[position], other.ids[position], return_indices=True)
        p, q = exact.logprobs[position][mine], other.logprobs[position][theirs]
        rest_p, rest_q = (max(SMALLEST, 1 - np.exp(logprobs).sum()) for logprobs in (p, q))
        found[position] = (np.exp(p) * (p - q)).sum() + rest_p * np.log(rest_p / rest_q)
    return found


def agreeing(exact: Greedy, other: Greedy) -> int:
    """Tokens before the first difference; after it the two continue different texts."""
    same = [a == b for a, b in zip(exact.tokens, other.tokens, strict=False)]
    return same.index(False) if False in same else len(same)


def compared(exact: Arm, other: Arm) -> list[dict[str, Any]]:
    """Figures for each prompt."""
    found = []
    for number, (before, after) in enumerate(zip(exact.scores, other.scores, strict=True)):
        change = after.true - before.true
        entry = {
            "kl": float(divergence(before, after).mean()),
            "logprob_change": float(change.mean()),
            "logprob_change_abs": float(np.abs(change).mean()),
            "logprob_change_p99": float(np.quantile(np.abs(change), 0.99)),
            "nll": float(-after.true.mean()),
            "same_top": float((before.ids[:, 0] == after.ids[:, 0]).mean()),
        }
        if exact.greedy and other.greedy:
            a, b = exact.greedy[number], other.greedy[number]
            entry |= {
                "first_token": a.tokens[:1] == b.tokens[:1],
                "whole_sequence": a == b,
                "agreeing_tokens": agreeing(a, b),
                "generated_tokens": len(a.tokens),
                "ended": b.ended,
            }
        found.append(entry)
    return found


# Figures over prompts. ----------------------------------------------------------------------------------------------


def estimate(of: Callable[[np.ndarray], np.ndarray], prompts: Sequence[int]) -> list[float]:
    """A figure with its 95% bootstrap interval over prompts: `[value, low, high]`.

    Args:
        of: takes prompt numbers `[..., n]` and returns the figure of each such choice, `[...]`.
        prompts: numbers of the prompts that count.
    """
    numbers = np.asarray(prompts)
    chosen = numbers[np.random.default_rng(0).integers(0, len(numbers), (RESAMPLES, len(numbers)))]
    return [float(of(numbers)), *(float(edge) for edge in np.quantile(of(chosen), (0.025, 0.975)))]


def column(entries: list[dict[str, Any]], name: str) -> np.ndarray:
    return np.array([float(entry[name]) for entry in entries])


def summary(entries: list[dict[str, Any]], prompts: Sequence[int]) -> dict[str, list[float]]:
    """Means over prompts, all continuations being of one length; perplexity as a ratio to that of the exact arm."""
    means = ["kl", "logprob_change_abs", "same_top"]
    if "first_token" in entries[0]:
        means += ["first_token", "whole_sequence"]
    found = {}
    for name in means:
        values = column(entries, name)
        found[name] = estimate(lambda chosen, values=values: values[chosen].mean(-1), prompts)
    change, nll = column(entries, "logprob_change"), column(entries, "nll")
    found["perplexity"] = estimate(lambda chosen: np.exp(nll[chosen].mean(-1)), prompts)
    found["perplexity_ratio"] = estimate(lambda chosen: np.exp(-change[chosen].mean(-1)), prompts)
    if "agreeing_tokens" in entries[0]:
        same, generated = column(entries, "agreeing_tokens"), column(entries, "generated_tokens")
        found["agreeing_share"] = estimate(lambda chosen: same[chosen].sum(-1) / generated[chosen].sum(-1), prompts)
    return found


def groups(prompts: Sequence[Prompt]) -> Iterator[tuple[str, dict[str, list[int]]]]:
    """What prompts are told apart by, and the numbers of the prompts of each value."""
    for name, of in (("prefix_tokens", lambda prompt: str(prompt.prefix_tokens)), ("kind", lambda prompt: prompt.kind)):
        found: dict[str, list[int]] = {}
        for number, prompt in enumerate(prompts):
            found.setdefault(of(prompt), []).append(number)
        yield name, found


def summarise(prompts: Sequence[Prompt], arms: dict[str, Arm], unavailable: dict[str, str]) -> dict[str, Any]:
    """The part of a result that comes from the answers."""
    everything = range(len(prompts))
    found: dict[str, Any] = {}
    for arm in arms.values():
        if arm.against is None:
            continue
        entries = compared(arms[arm.against], arm)
        entry: dict[str, Any] = {"against": arm.against, "all": summary(entries, everything)}
        if arm.encoded_per_restored is not None:
            entry["encoded_per_restored"] = arm.encoded_per_restored
        for name, values in groups(prompts):
            entry[f"by_{name}"] = {value: summary(entries, numbers) for value, numbers in values.items()}
        found[arm.name] = {**entry, "prompts": entries}
    references = [arm for arm in arms.values() if arm.against is None]
    spread = [
        float(np.abs(mine.true - first.true).max())
        for arm in references[1:]
        for mine, first in zip(arm.scores, references[0].scores, strict=True)
    ]
    return {
        "arms": found,
        "unavailable": unavailable,
        "exact": {
            "perplexity": float(np.exp(-np.mean([score.true.mean() for score in references[0].scores]))),
            "largest_difference_between_servers": max(spread, default=0.0),
        },
        "bars": bars(found, everything),
    }


def bars(arms: dict[str, Any], prompts: Sequence[int]) -> dict[str, Any]:
    """What is demanded of each representation: figure, interval, limit, and whether it holds (None: not measured)."""
    found: dict[str, Any] = {}
    for name, bar in BARS.items():
        if name not in arms:
            continue
        ratio = arms[name]["all"]["perplexity_ratio"]
        found[f"{name}: perplexity"] = {
            "what": f"{name}'s perplexity over exact KV's, with its interval, within the limit of 1",
            "figure": ratio,
            "limit": bar.perplexity,
            "holds": max(abs(edge - 1) for edge in ratio) <= bar.perplexity,
        }
        figure = None
        if bar.other in arms:
            mine, theirs = (column(arms[each]["prompts"], "kl") for each in (name, bar.other))
            figure = estimate(lambda chosen, a=mine, b=theirs: a[chosen].mean(-1) / b[chosen].mean(-1), prompts)
        found[f"{name}: kl_over_{bar.other}"] = {
            "what": f"{name}'s mean KL over that of {bar.other}{', with its interval' * bar.whole_interval}, "
            "at most the limit",
            "figure": figure,
            "limit": bar.kl,
            "holds": None if figure is None else figure[2 if bar.whole_interval else 0] <= bar.kl,
        }
    return found


# What people read. --------------------------------------------------------------------------------------------------


def kl(figure: list[float]) -> str:
    """In units of 1e-4 nats."""
    return "{:.2f} ({:.2f} to {:.2f})".format(*(1e4 * edge for edge in figure))


def mean(figure: list[float]) -> str:
    return "{:.4f} ({:.4f} to {:.4f})".format(*figure)


def percent(figure: list[float]) -> str:
    return "{:.1%} ({:.1%} to {:.1%})".format(*figure)


def change(ratio: list[float]) -> str:
    return "{:+.3%} ({:+.3%} to {:+.3%})".format(*(edge - 1 for edge in ratio))


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *rows))


def markdown(result: dict[str, Any]) -> str:
    """Every table of a result."""
    arms, settings = result["arms"], result["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    head = (
        f"{result['model']['name']}, {len(result['prompts'])} prompts, {settings['scored_tokens']} scored tokens each"
    )
    answers = ("kl", kl), ("logprob_change_abs", mean), ("same_top", percent), ("perplexity_ratio", change)
    greedy = ("first_token", "whole_sequence", "agreeing_share")
    parts = [
        f"{head}; arithmetic: {settings['arithmetic']}; {result['hardware']}; {versions}.",
        table(
            [
                "KV of the prefix",
                "against",
                "mean KL, 1e-4 nats",
                "mean change of log p",
                "same likeliest token",
                "change of perplexity",
            ],
            [[name, arm["against"], *(form(arm["all"][of]) for of, form in answers)] for name, arm in arms.items()],
        ),
    ]
    generated = {name: arm["all"] for name, arm in arms.items() if greedy[0] in arm["all"]}
    if generated:
        titles = ["KV of the prefix", "first token", "whole answer", "tokens before the first difference"]
        rows = [[name, *(percent(figures[of]) for of in greedy)] for name, figures in generated.items()]
        parts.append(table(titles, rows))
    for group, title in (("by_prefix_tokens", "prefix tokens"), ("by_kind", "kind")):
        values = list(next(iter(arms.values()))[group])
        for figure, form in (("kl", kl), ("perplexity_ratio", change)):
            rows = [[name, *(form(arm[group][value][figure]) for value in values)] for name, arm in arms.items()]
            heading = "mean KL, 1e-4 nats," if figure == "kl" else "change of perplexity"
            parts.append(table([f"{heading} by {title}", *values], rows))
    parts += [f"{name}: not measured, {reason}" for name, reason in result["unavailable"].items()]
    for bar in result["bars"].values():
        verdict = {True: "holds", False: "does not hold", None: "not measured"}[bar["holds"]]
        figure = "" if bar["figure"] is None else ": {:.5f} ({:.5f} to {:.5f})".format(*bar["figure"])
        parts.append(f"{bar['what']} ({bar['limit']:g}){figure}: {verdict}")
    return "\n\n".join(parts)


def plot(result: dict[str, Any], path: Path) -> None:
    """KL by length of the prefix, perplexity, and agreement of greedy answers if there are any, side by side."""
    import matplotlib.pyplot as plt

    arms = {name: arm for name, arm in result["arms"].items() if arm["all"]["kl"][0] > 0}  # no zero on a log axis
    greedy = {name: arm["all"] for name, arm in result["arms"].items() if "first_token" in arm["all"]}
    panels = 3 if greedy else 2
    figure, (left, middle, *rest) = plt.subplots(1, panels, figsize=(13 * panels / 3, 3.8), layout="constrained")
    for index, (name, arm) in enumerate(arms.items()):
        lengths = [int(length) for length in arm["by_prefix_tokens"]]
        values, low, high = np.array([each["kl"] for each in arm["by_prefix_tokens"].values()]).T
        shifted = np.array(lengths) * (1 + 0.015 * (index - len(arms) / 2))
        left.errorbar(shifted, values, np.stack([values - low, high - values]), marker="o", capsize=3, label=name)
    left.set(yscale="log", xlabel="tokens of the prefix", ylabel="mean KL from exact KV, nats")
    if arms:
        left.legend()
    ratios = np.array([[100 * (edge - 1) for edge in arm["all"]["perplexity_ratio"]] for arm in arms.values()])
    ratios = ratios.reshape(-1, 3)  # also where nothing differs from exact KV
    middle.errorbar(
        range(len(arms)), ratios[:, 0], np.abs(ratios[:, 1:].T - ratios[:, 0]), marker="o", capsize=4, linestyle="none"
    )
    middle.axhline(0, color="grey", linewidth=0.8)
    middle.set_xticks(range(len(arms)), list(arms))
    middle.set(ylabel="change of perplexity, %")
    for right in rest:
        for shift, figure_name, label in (
            (-0.2, "first_token", "first token"),
            (0.2, "whole_sequence", "whole answer"),
        ):
            values, low, high = 100 * np.array([each[figure_name] for each in greedy.values()]).T
            spread = np.stack([values - low, high - values])
            right.bar(np.arange(len(greedy)) + shift, values, 0.38, yerr=spread, capsize=3, label=label)
        right.set_xticks(range(len(greedy)), list(greedy))
        right.set(ylabel="greedy answers as with exact KV, %")
        right.set(ylim=(0, 118))
        right.legend(loc="upper center", ncols=2)
    save(figure, path)
