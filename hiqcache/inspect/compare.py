"""How far two dumps of the same pages are apart: one of bf16 and one of int8 show the codec's error on real KV."""

from collections.abc import Callable, Iterator

import attrs
import torch
from attrs import field, frozen

from hiqcache.exponents import divide
from hiqcache.geometry import KVGeometry, Part
from hiqcache.inspect.format import DumpError
from hiqcache.inspect.reader import CHUNK_VALUES, Dump, boxes
from hiqcache.representation import HostRepresentation

LOSSLESS = "bf16-v1"
"""Format whose values are the device's own, so that the other's error bound can be checked against them."""


@frozen(kw_only=True, eq=False)
class Differences:
    """One part; tensors are `[layers, heads]`, or where said `[layers, heads, dim]`, over all pages of both dumps.

    Attributes:
        part: K or V.
        count: values behind each entry.
        error: root mean square of the differences of values that are finite in both, float64.
        size: root mean square of the reference's values among those, float64.
        largest_error: largest magnitude of a difference, float64.
        not_finite: values that are NaN or infinite in just one of the two, int64.
        beyond_bound: values further off than the representation's own error bound, int64; None where it states none
            or the reference is not exact.
        channel_bits: effective bits of each channel, `[layers, heads, dim]` float64: log2 of the standard deviation of
            its reference values over the root mean square of its error. Infinity where nothing differs, NaN for a
            channel that never changes and yet differs.
    """

    part: Part
    count: int
    error: torch.Tensor = field(repr=False)
    size: torch.Tensor = field(repr=False)
    largest_error: torch.Tensor = field(repr=False)
    not_finite: torch.Tensor = field(repr=False)
    beyond_bound: torch.Tensor | None = field(repr=False)
    channel_bits: torch.Tensor = field(repr=False)

    @property
    def relative_error(self) -> torch.Tensor:
        """`error / size`, `[layers, heads]`; 0 where nothing differs."""
        return torch.where(self.error == 0, 0.0, self.error / self.size)


def shared_pages(dump: Dump, reference: Dump) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions, on each dump's page axis, of the pages that both have.

    Raises:
        DumpError: the geometries or ranks differ, or no page is in both.
    """

    def of(geometry: KVGeometry) -> dict[str, object]:
        return attrs.asdict(geometry)

    ours, theirs = of(dump.geometry), of(reference.geometry)
    ours["TP rank"], theirs["TP rank"] = dump.metadata.tp_rank, reference.metadata.tp_rank
    if differ := [f"{name} {ours[name]} and {theirs[name]}" for name in ours if ours[name] != theirs[name]]:
        raise DumpError(f"{dump.file} and {reference.file} cannot be compared: {'; '.join(differ)}")
    first, second = dump.metadata.page_ids, reference.metadata.page_ids
    there = torch.searchsorted(second, first).clamp_(max=len(second) - 1)  # where it is, if it is in there
    here = (second[there] == first).nonzero()[:, 0]
    if not len(here):
        raise DumpError(f"{dump.file} and {reference.file} have no page in common")
    return here, there[here]


def compare(
    dump: Dump, reference: Dump, progress: Callable[[int], None] = lambda steps: None
) -> tuple[Differences, Differences]:
    """The differences in K and in V.

    Args:
        dump: the one whose error is asked for.
        reference: what it should be; best of bf16.
        progress: told of each layer of each part that is done, twice as many as there are layers.

    Raises:
        DumpError: as `shared_pages`, and as `Dump.representation` for both.
    """
    positions = shared_pages(dump, reference)
    representations = dump.representation(), reference.representation()
    both = [_compare_part(dump, reference, part, positions, representations, progress) for part in Part]
    return both[0], both[1]


def _compare_part(
    dump: Dump,
    reference: Dump,
    part: Part,
    positions: tuple[torch.Tensor, torch.Tensor],
    representations: tuple[HostRepresentation, HostRepresentation],
    progress: Callable[[int], None],
) -> Differences:
    layers, heads, dim = dump.geometry.layers, dump.geometry.heads, dump.geometry.dim(part)
    largest = torch.zeros(layers, heads, dtype=torch.float64)
    not_finite, beyond = (torch.zeros(layers, heads, dtype=torch.int64) for _ in range(2))
    squares, reference_squares, sums = (torch.zeros(layers, heads, dim, dtype=torch.float64) for _ in range(3))
    compared = torch.zeros(layers, heads, dim, dtype=torch.int64)
    bounded = reference.metadata.format_tag == LOSSLESS
    for layer in range(layers):
        for here, there in _pieces(*positions, span=next(dump.chunks()).stop):
            decoded = dump.decode(representations[0], part, layer, here)
            expected = reference.decode(representations[1], part, layer, there)
            for box in boxes(decoded.shape[:3], CHUNK_VALUES // decoded.shape[3]):
                values, exact, into = decoded[box], expected[box], (layer, box[2])
                finite = values.isfinite() & exact.isfinite()
                differences = torch.where(finite, values.double() - exact.double(), 0)
                kept = torch.where(finite, exact, 0)
                squares[into] += differences.square().sum((0, 1))
                reference_squares[into] += kept.double().square().sum((0, 1))
                sums[into] += kept.double().sum((0, 1))
                largest[into] = torch.maximum(largest[into], differences.abs().amax((0, 1, 3)))
                compared[into] += finite.sum((0, 1))
                not_finite[into] += _by_head(values.isfinite() != exact.isfinite())
                if bounded:
                    bound = _bound(dump, representations[0], part, into, kept, values)
                    bounded = bound is not None
                    if bound is not None:
                        beyond[into] += _by_head((differences.abs() > bound) & finite)
        progress(1)
    values_compared, channels_compared = compared.sum(-1).clamp(min=1), compared.clamp(min=1)
    variance = (reference_squares / channels_compared - (sums / channels_compared).square()).clamp(min=0)
    return Differences(
        part=part,
        count=len(positions[0]) * dump.geometry.page_size * dump.geometry.dim(part),
        error=(squares.sum(-1) / values_compared).sqrt(),
        size=(reference_squares.sum(-1) / values_compared).sqrt(),
        largest_error=largest,
        not_finite=not_finite,
        beyond_bound=beyond if bounded else None,
        channel_bits=_effective_bits(variance, squares / channels_compared),
    )


def _bound(
    dump: Dump, representation: HostRepresentation, part: Part, place: tuple[int, slice], exact: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor | None:  # fmt: skip
    """The representation's error bound of some heads of a layer; it speaks of K as it was encoded, divided."""
    if part is Part.V or not dump.key_exponents.any:
        return representation.error_bound(exact, values, part)
    factors = dump.key_exponents.factors(exact.device)[place]
    before, after = exact.clone(), values.clone()
    for each in (before, after):
        divide(each, factors)
    bound = representation.error_bound(before, after, part)
    return None if bound is None else bound * factors


def _effective_bits(variance: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    bits = (variance / error).log2() / 2
    return torch.where(error == 0, torch.inf, torch.where(variance == 0, torch.nan, bits))


def _pieces(here: torch.Tensor, there: torch.Tensor, span: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of ascending positions, cut so that neither side of a piece spreads over more than `span` pages."""
    first = 0
    while first < len(here):
        last = min(int(torch.searchsorted(each, each[first] + span)) for each in (here, there))
        yield here[first:last], there[first:last]
        first = last


def _by_head(values: torch.Tensor) -> torch.Tensor:
    """Sums over all but the heads of `[pages, page_size, heads, dim]`."""
    return values.sum((0, 1, 3))
