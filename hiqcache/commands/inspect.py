"""`hiqcache inspect`: what is in a dump."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hiqcache.commands._picture import picture, spare

if TYPE_CHECKING:
    import torch

    from hiqcache.inspect.compare import Differences
    from hiqcache.inspect.reader import Dump
    from hiqcache.inspect.statistics import SectionStatistics

_FILE = click.Path(dir_okay=False, path_type=Path)
WORST = 8
"""Heads that are named."""
_JSON_PIECES = 10_000
"""Of a JSON document that are printed together; as a whole it can be larger than the file."""
UNRELATED = 1.0
"""A relative error beyond which two dumps do not hold the same KV; that of unrelated values is 1.4."""


@click.command
@click.argument("file", type=_FILE)
@click.option(
    "--compare", "other", type=_FILE, metavar="OTHER", help="Show how far FILE's values are from OTHER's instead."
)
@click.option("--decode", "decoded", type=_FILE, metavar="OUT", help="Write the BF16 values to a safetensors file.")
@click.option("--plot", type=_FILE, callback=picture, metavar="OUT", help="Draw heat maps; OUT ends in .png or .svg.")
@click.option("--json", "as_json", is_flag=True, help="Print every figure as JSON instead of tables.")
def command(file: Path, other: Path | None, decoded: Path | None, plot: Path | None, as_json: bool) -> None:
    """Show what is in FILE, a dump that `hiqcache dump` or `hiqcache.sglang.dump.dump` wrote.

    For each layer: the range of the scales, the share of zero and of saturated payload, its effective bits (entropy),
    and which heads are worst. With --compare, the error of FILE's values against OTHER's, a dump of the same pages,
    best of a bf16 server. docs/dump-and-inspect.md explains the figures and the file.

    The exit status is 1 for a file that is damaged or no dump, with what is wrong with it.
    """
    from hiqcache.inspect.decode import write_decoded
    from hiqcache.inspect.reader import Dump

    spare(plot, file, other, decoded)
    with Dump(file) as dump:
        if decoded:
            with _progress("decoding", 2 * dump.geometry.layers) as advance:
                write_decoded(dump, decoded, advance)
        if other:
            with Dump(other) as reference:
                _compare(dump, reference, plot, as_json)
        else:
            _describe(dump, plot, as_json)


@contextmanager
def _progress(what: str, steps: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = TextColumn(what), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=steps)
        yield lambda done: progress.advance(task, done)


# -- one dump ----------------------------------------------------------------------------------------------------------


def _describe(dump: "Dump", plot: Path | None, as_json: bool) -> None:
    from hiqcache.inspect.plot import draw, maps_of_statistics
    from hiqcache.inspect.statistics import measure, steps

    with _progress("reading", steps(dump)) as advance:
        statistics = measure(dump, advance)
    worst, findings, unknown = _worst_bits(statistics), _findings(statistics), _unknown(dump, statistics)
    if as_json:
        figures = {each.name: _figures(each) for each in statistics}
        document = {**_header(dump), "sections": figures, "worst_heads": worst, "findings": findings}
        _print_json(document | {"unknown": unknown})
    else:
        _print_header(dump)
        _print_statistics(statistics)
        if worst:
            click.echo("\nfewest effective bits: " + ", ".join(f"{name} {bits:.2f}" for name, bits in worst.items()))
        for line in findings:
            click.echo(f"finding: {line}")
        for line in unknown:
            click.echo(f"unknown: {line}")
    if plot:
        draw(maps_of_statistics(statistics), _title(dump), plot)


def _print_json(document: dict) -> None:
    """Print a document whose tables may be tensors."""
    pieces = json.JSONEncoder(indent=2, default=_plain).iterencode(document)
    while batch := "".join(islice(pieces, _JSON_PIECES)):
        click.echo(batch, nl=False)
    click.echo()


def _header(dump: "Dump") -> dict:
    from attrs import asdict

    from hiqcache.inspect.format import page_ranges

    metadata = dump.metadata
    fields = asdict(metadata, recurse=False) | {"page_ids": page_ranges(metadata.page_ids), "pages": dump.pages}
    fields["geometry"] = asdict(metadata.geometry) | {"dtype": _dtype(metadata.geometry.dtype)}
    fields["key_exponents"] = dump.key_exponents.digest if dump.key_exponents.any else None
    return {"file": str(dump.file), "bytes": dump.file.stat().st_size, **fields}


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _title(dump: "Dump") -> str:
    return f"{dump.file.name}: {dump.metadata.representation}, {dump.pages * dump.geometry.page_size:,} tokens"


def _print_header(dump: "Dump") -> None:
    metadata, geometry = dump.metadata, dump.geometry
    server = f" in SGLang {metadata.sglang_version}" if metadata.sglang_version else ""
    click.echo(
        f"{dump.file}: {metadata.representation} ({metadata.format_tag}), {dump.file.stat().st_size:,} bytes, "
        f"written by hiqcache {metadata.hiqcache_version}{server}"
    )
    click.echo(
        f"TP rank {metadata.tp_rank} of {geometry.tp_size}: {geometry.layers} layers, {geometry.heads} local KV heads "
        f"x {geometry.head_dim}; {dump.pages:,} of {metadata.pool_pages:,} pages of {geometry.page_size}, "
        f"{dump.pages * geometry.page_size:,} tokens"
    )
    if (exponents := dump.key_exponents).any:
        divided, largest = int(exponents.values.count_nonzero()), 2 ** int(exponents.values.max())
        click.echo(
            f"{divided:,} of {exponents.values.numel():,} channels of K were divided by powers of two before they were "
            f"encoded, by up to {largest:,}"
        )
    click.echo()


def _print_statistics(statistics: "Sequence[SectionStatistics]") -> None:
    """One row for each part and layer; figures of the payload are over all heads, `worst` is one head's."""
    from rich.table import Column

    from hiqcache.commands._table import print_table
    from hiqcache.geometry import Part

    others = list(dict.fromkeys(each.section for each in statistics if not each.payload))
    titles = [*others, "payload", "zero", "saturated", "bits", "of", "worst", "head", "not finite"]
    columns = ["part", Column("layer", justify="right"), *(Column(title, justify="right") for title in titles)]
    rows = []
    for part in Part:
        mine = {each.section: each for each in statistics if each.part is part}
        (payload,) = (each for each in mine.values() if each.payload)
        for layer in range(len(payload.smallest)):
            ranges = [_range(mine[name], layer) if name in mine and not mine[name].payload else "-" for name in others]
            head, bits, worst = "-", "-", "-"
            if payload.bits is not None:
                bits, worst = f"{payload.bits[layer].mean():.2f}", f"{payload.bits[layer].min():.2f}"
                head = str(int(payload.bits[layer].argmin())) if payload.per_head else "-"
            shares = [_share(payload.zero, layer), _share(payload.saturated, layer)]
            bad = sum(int(each.not_finite[layer].sum()) for each in mine.values())
            cells = [*ranges, _range(payload, layer), *shares, bits, str(payload.code_bits), worst, head, f"{bad:,}"]
            rows.append([part.name, str(layer), *cells])
    print_table(columns, rows)


def _range(each: "SectionStatistics", layer: int) -> str:
    smallest, largest = each.smallest[layer], each.largest[layer]
    if not bool((smallest <= largest).any()):
        return "none finite"
    return f"{float(smallest.nan_to_num(math.inf).min()):.3g}..{float(largest.nan_to_num(-math.inf).max()):.3g}"


def _share(values: "torch.Tensor | None", layer: int) -> str:
    return "-" if values is None else f"{float(values[layer].mean()):.2%}"


def _worst_bits(statistics: "Sequence[SectionStatistics]") -> dict[str, float]:
    """The heads with the fewest effective bits: `K layer 3 head 1` -> bits."""
    return _extreme({each.part.name: each.bits for each in statistics if each.payload and each.per_head}, largest=False)


def _extreme(values: "dict[str, torch.Tensor | None]", largest: bool) -> dict[str, float]:
    found = []
    for name, tensor in values.items():
        if tensor is None:
            continue
        for place in tensor.flatten().sort(descending=largest, stable=True).indices[:WORST].tolist():
            layer, head = divmod(place, tensor.shape[1])
            found.append((float(tensor[layer, head]), f"{name} layer {layer} head {head}"))
    return {name: value for value, name in sorted(found, reverse=largest)[:WORST]}


def _findings(statistics: "Sequence[SectionStatistics]") -> list[str]:
    """What an operator should know of."""
    lines = []
    for each in statistics:
        layers = each.not_finite.sum(1)
        if bad := int(layers.sum()):
            where = ", ".join(str(layer) for layer in layers.nonzero()[:, 0].tolist())
            lines.append(
                f"{each.name} has {bad:,} elements that are NaN or infinite (layers {where}): the KV on the device was"
            )
        if each.payload and each.zero is not None:
            zero = (each.zero == 1).nonzero()
            for layer, head in zero[:WORST].tolist():
                lines.append(f"{each.name}: layer {layer}, head {head} is zero throughout")
            if len(zero) > WORST:
                lines.append(f"{each.name}: {len(zero) - WORST:,} more heads are zero throughout")
    return lines


def _unknown(dump: "Dump", statistics: "Sequence[SectionStatistics]") -> list[str]:
    from hiqcache.geometry import HiqcacheError

    lines = []
    for each in statistics:
        if each.payload and each.zero is None:
            lines.append(
                f"{each.name} has {_dtype(each.dtype)} elements, which may be several codes each: zero and saturated "
                "shares cannot be told, and bits are of whole elements"
            )
        if each.payload and each.bits is None:
            lines.append(f"{each.name} has {each.code_bits}-bit elements: too wide to count, so no effective bits")
        if not each.per_head:
            lines.append(f"{each.name} has no axis of heads: its figures are of all heads together")
    try:
        dump.representation()
    except HiqcacheError as error:
        lines.append(f"values: {' '.join(str(error).split())}")
    return lines


def _figures(each: "SectionStatistics") -> dict:
    return {
        "dtype": _dtype(each.dtype),
        "payload": each.payload,
        "per_head": each.per_head,
        "elements": each.count,
        "smallest": each.smallest,
        "largest": each.largest,
        "zero": each.zero,
        "saturated": each.saturated,
        "bits": each.bits,
        "not_finite": each.not_finite,
    }


def _plain(values: "torch.Tensor") -> list:
    return _without_nan(values.tolist())


def _without_nan(values: list) -> list:
    return [_without_nan(each) if isinstance(each, list) else _finite(each) for each in values]


def _finite(value: float) -> float | None:
    """JSON knows no NaN and no infinity."""
    return value if math.isfinite(value) else None


# -- two dumps ---------------------------------------------------------------------------------------------------------


def _compare(dump: "Dump", reference: "Dump", plot: Path | None, as_json: bool) -> None:
    from hiqcache.inspect.compare import compare, shared_pages
    from hiqcache.inspect.plot import draw, maps_of_differences

    pages = len(shared_pages(dump, reference)[0])
    with _progress("comparing", 2 * dump.geometry.layers) as advance:
        differences = compare(dump, reference, advance)
    worst = _extreme({each.part.name: each.relative_error for each in differences}, largest=True)
    findings = _findings_of_differences(differences)
    if as_json:
        document = {
            "file": _header(dump),
            "reference": _header(reference),
            "pages": pages,
            **{each.part.value: _figures_of_differences(each) for each in differences},
            "worst_heads": {name: _finite(value) for name, value in worst.items()},
            "findings": findings,
        }
        _print_json(document)
    else:
        _print_header(dump)
        _print_header(reference)
        click.echo(f"{pages:,} pages in both; errors are of the first against the second")
        _print_differences(differences)
        click.echo("\nlargest relative error: " + ", ".join(f"{name} {value:.3%}" for name, value in worst.items()))
        for line in findings:
            click.echo(f"finding: {line}")
    if plot:
        draw(maps_of_differences(differences), f"{_title(dump)}, against {reference.file.name}", plot)


def _overall(each: "Differences") -> float:
    error, size = (float(values.square().mean().sqrt()) for values in (each.error, each.size))
    return _ratio(error, size)


def _ratio(error: float, size: float) -> float:
    return 0.0 if not error else error / size if size else math.inf


def _print_differences(differences: "Sequence[Differences]") -> None:
    from rich.table import Column

    from hiqcache.commands._table import print_table

    titles = ["RMS value", "RMS error", "relative", "worst", "head", "bits", "fewest", "channel"]
    titles += ["largest error", "beyond bound", "not finite"]
    columns = ["part", Column("layer", justify="right"), *(Column(title, justify="right") for title in titles)]
    rows = []
    for each in differences:
        for layer, relative in enumerate(each.relative_error):
            size, error = (float(values[layer].square().mean().sqrt()) for values in (each.size, each.error))
            bits = each.channel_bits[layer]
            head, channel = divmod(int(bits.nan_to_num(-math.inf, math.inf).argmin()), bits.shape[1])
            rows.append(
                [
                    each.part.name,
                    str(layer),
                    f"{size:.4g}",
                    f"{error:.4g}",
                    f"{_ratio(error, size):.3%}",
                    f"{float(relative.max()):.3%}",
                    str(int(relative.argmax())),
                    _bits(bits.nanmedian()),
                    _bits(bits[head, channel]),
                    f"{head}:{channel}",
                    f"{float(each.largest_error[layer].max()):.4g}",
                    "-" if each.beyond_bound is None else f"{int(each.beyond_bound[layer].sum()):,}",
                    f"{int(each.not_finite[layer].sum()):,}",
                ]
            )
    print_table(columns, rows)
    click.echo("\nrelative RMS error: " + ", ".join(f"{each.part.name} {_overall(each):.3%}" for each in differences))


def _bits(value: "torch.Tensor") -> str:
    return "none" if value.isnan() else "all" if value.isinf() else f"{float(value):.2f}"


def _findings_of_differences(differences: "Sequence[Differences]") -> list[str]:
    lines = []
    for each in differences:
        if _overall(each) > UNRELATED:
            lines.append(f"{each.part.name} differs by more than its own size: the two do not hold the same KV")
        if each.beyond_bound is not None and (beyond := int(each.beyond_bound.sum())):
            lines.append(
                f"{each.part.name}: {beyond:,} values are further off than the codec can be: the KV was not the same"
            )
        if bad := int(each.not_finite.sum()):
            lines.append(f"{each.part.name}: {bad:,} values are NaN or infinite in one of the two alone")
    return lines


def _figures_of_differences(each: "Differences") -> dict:
    return {
        "values": each.count,
        "relative_rms_error": _finite(_overall(each)),
        "rms_error": each.error,
        "rms_value": each.size,
        "relative_error": each.relative_error,
        "largest_error": each.largest_error,
        "not_finite": each.not_finite,
        "beyond_bound": each.beyond_bound,
        "channel_bits": each.channel_bits,
    }
