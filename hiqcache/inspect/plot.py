"""Heat maps over layers and heads, K beside V."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from attrs import frozen

from hiqcache.geometry import Part
from hiqcache.inspect.compare import Differences
from hiqcache.inspect.statistics import SectionStatistics
from hiqcache.plotting import require_plotting, save

WIDEST, TALLEST = 24.0, 60.0
"""Inches of a picture, whatever the numbers of heads, layers and maps: at 150 dots an inch some 130 MB in memory."""


@frozen(eq=False)
class HeatMap:
    """One quantity.

    Attributes:
        title: what it is, with its unit.
        values: `[layers, heads]` of each part that has it.
    """

    title: str
    values: Mapping[Part, torch.Tensor]


def maps_of_statistics(statistics: Sequence[SectionStatistics]) -> list[HeatMap]:
    """Bits, zeros and saturation of the payloads, and the largest element of every other section."""
    payloads = {each.part: each for each in statistics if each.payload}

    def known(title: str, values: Mapping[Part, torch.Tensor | None], factor: float = 1) -> list[HeatMap]:
        there = {part: value * factor for part, value in values.items() if value is not None}
        return [HeatMap(title, there)] if there else []

    maps = known("effective bits", {part: each.bits for part, each in payloads.items()})
    maps += known("zero (%)", {part: each.zero for part, each in payloads.items()}, 100)
    maps += known("saturated (%)", {part: each.saturated for part, each in payloads.items()}, 100)
    others = dict.fromkeys(each.section for each in statistics if not each.payload)
    for section in others:
        largest = {each.part: each.largest for each in statistics if each.section == section and not each.payload}
        maps.append(HeatMap(f"largest of {section}", largest))
    return maps


def maps_of_differences(differences: Sequence[Differences]) -> list[HeatMap]:
    """Relative and largest errors, and the bits that are left of the worst channel of each head."""
    return [
        HeatMap("RMS error / RMS value (%)", {each.part: 100 * each.relative_error for each in differences}),
        HeatMap("largest error", {each.part: each.largest_error for each in differences}),
        HeatMap("effective bits of the worst channel", {each.part: each.channel_bits.amin(-1) for each in differences}),
    ]


def draw(maps: Sequence[HeatMap], title: str, file: Path) -> None:
    """Draw the maps to `file`, whose name ends in one of `plotting.FORMATS`.

    Raises:
        CannotPlot: matplotlib is not installed, or the file cannot be written.
    """
    require_plotting()
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    layers, heads = next(iter(maps[0].values.values())).shape
    height = min(max(2.2, min(0.12 * layers + 1, 8)), TALLEST / len(maps))
    width = max(7.0, min(0.5 * heads + 4, WIDEST))
    figure = Figure(figsize=(width, height * len(maps) + 0.5), layout="constrained")
    figure.suptitle(title, parse_math=False)
    grid = figure.subplots(len(maps), len(Part), squeeze=False)
    for row, each in zip(grid, maps, strict=True):
        finite = torch.cat([values[values.isfinite()] for values in each.values.values()])
        low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
        for axes, part in zip(row, Part, strict=True):
            if part not in each.values:
                axes.set_axis_off()
                continue
            image = axes.imshow(each.values[part].numpy(), aspect="auto", vmin=low, vmax=high, interpolation="nearest")
            axes.set_title(f"{part.name}: {each.title}", parse_math=False)
            axes.set(xlabel="head", ylabel="layer")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
            figure.colorbar(image, ax=axes)
    save(figure, file)
