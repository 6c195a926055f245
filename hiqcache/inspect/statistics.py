"""What a dump's bytes look like, by layer and head, without decoding them.

The largest section of a block is taken for its payload: the codes of the values. For the others (scales) the range is
what matters. What a section's declaration does not tell is left open: unsigned integers may be several packed codes, so
which of them are zero or saturated is unknown; a section with no axis of heads is looked at as a whole.
"""

import math
from collections.abc import Callable, Iterable

import attrs
import numpy as np
import torch
from attrs import field, frozen

from hiqcache.geometry import Part
from hiqcache.inspect import reader
from hiqcache.inspect.format import tensor_name
from hiqcache.inspect.reader import Dump, StoredSection, boxes

WIDEST_CODE = 16
"""Bits of the widest element whose values are counted one by one."""
COUNTERS = 1 << 20
"""Codes counted at a time, over heads: 8 MiB of counters."""


@frozen(kw_only=True, eq=False)
class SectionStatistics:
    """One section of one part; tensors are `[layers, heads]`, or `[layers, 1]` for a section with no axis of heads.

    Attributes:
        part: K or V.
        section: its name.
        dtype: its element type.
        payload: whether it is the part's largest section.
        per_head: whether the second axis is the heads.
        count: elements behind each entry.
        smallest, largest: range of the finite elements, float64; NaN where there are none.
        zero: share of zeros, or None where unknown.
        saturated: share of elements of the largest magnitude that the type has (for signed integers the symmetric
            range's, 127 of INT8), or None where unknown.
        bits: Shannon entropy of the elements, or None for elements wider than `WIDEST_CODE`.
        not_finite: NaN and infinite elements, int64.
    """

    part: Part
    section: str
    dtype: torch.dtype
    payload: bool
    per_head: bool
    count: int
    smallest: torch.Tensor = field(repr=False)
    largest: torch.Tensor = field(repr=False)
    zero: torch.Tensor | None = field(repr=False)
    saturated: torch.Tensor | None = field(repr=False)
    bits: torch.Tensor | None = field(repr=False)
    not_finite: torch.Tensor = field(repr=False)

    @property
    def name(self) -> str:
        """`k.payload`."""
        return tensor_name(self.part, self.section)

    @property
    def code_bits(self) -> int:
        """Bits of one element."""
        return 8 * self.dtype.itemsize


def payload_section(dump: Dump, part: Part) -> str:
    """The part's largest section."""
    sections = dump.sections[part]
    return max(sections, key=lambda name: math.prod(sections[name].shape) * sections[name].dtype.itemsize)


def measure(dump: Dump, progress: Callable[[int], None] = lambda steps: None) -> list[SectionStatistics]:
    """Statistics of every section, K's first.

    Args:
        dump: open.
        progress: told of each layer of each section that is done; there are `steps(dump)` of them.
    """
    return [
        _measure_section(dump, part, name, section, progress)
        for part in Part
        for name, section in dump.sections[part].items()
    ]


def steps(dump: Dump) -> int:
    """How many steps `measure` takes."""
    return dump.geometry.layers * sum(len(sections) for sections in dump.sections.values())


@frozen(eq=False)
class _Figures:
    """One section in one layer, of some heads, `[heads]`; or, stacked, in all layers."""

    smallest: torch.Tensor
    largest: torch.Tensor
    zero: torch.Tensor
    saturated: torch.Tensor
    not_finite: torch.Tensor
    bits: torch.Tensor

    @classmethod
    def joined(cls, join: Callable[[list[torch.Tensor]], torch.Tensor], those: Iterable["_Figures"]) -> "_Figures":
        columns = zip(*(attrs.astuple(each, recurse=False) for each in those), strict=True)
        return cls(*(join(list(column)) for column in columns))


_Pieces = Iterable[tuple[slice, torch.Tensor]]
"""All elements of some heads, bit by bit: which of the heads, and `[heads, n]`."""


def _measure_section(
    dump: Dump, part: Part, name: str, section: StoredSection, progress: Callable[[int], None]
) -> SectionStatistics:
    layers = []
    for layer in range(dump.geometry.layers):
        layers.append(_measure_layer(dump, part, name, section, layer))
        progress(1)
    count = _elements(dump, section)
    figures = _Figures.joined(torch.stack, layers)
    codes_are_values = section.dtype.is_floating_point or section.dtype.is_signed
    return SectionStatistics(
        part=part,
        section=name,
        dtype=section.dtype,
        payload=name == payload_section(dump, part),
        per_head=section.per_head,
        count=count,
        smallest=figures.smallest.masked_fill(figures.smallest.isinf(), math.nan),
        largest=figures.largest.masked_fill(figures.largest.isinf(), math.nan),
        zero=figures.zero.double() / count if codes_are_values else None,
        saturated=figures.saturated.double() / count if codes_are_values else None,
        bits=figures.bits if _countable(section) else None,
        not_finite=figures.not_finite,
    )


def _heads(dump: Dump, section: StoredSection) -> int:
    return dump.geometry.heads if section.per_head else 1


def _elements(dump: Dump, section: StoredSection) -> int:
    """Of one head in one layer."""
    return dump.pages * math.prod(section.shape) // _heads(dump, section)


def _countable(section: StoredSection) -> bool:
    return 8 * section.dtype.itemsize <= WIDEST_CODE


def _measure_layer(dump: Dump, part: Part, name: str, section: StoredSection, layer: int) -> _Figures:
    heads, count, codes = range(_heads(dump, section)), _elements(dump, section), 1 << 8 * section.dtype.itemsize
    figures, together = _by_value, len(heads)
    if _countable(section):
        figures, together = _by_code, max(1, COUNTERS // codes)
        if count <= min(codes // 8, reader.CHUNK_VALUES):  # nearly all counters would stay zero
            figures, together = _by_order, reader.CHUNK_VALUES // count
    groups = [heads[first : first + together] for first in range(0, len(heads), together)]
    return _Figures.joined(
        torch.cat,
        (figures(_pieces(dump, part, name, section, layer, group), len(group), section.dtype) for group in groups),
    )


def _pieces(dump: Dump, part: Part, name: str, section: StoredSection, layer: int, heads: range) -> _Pieces:
    axes = [dump.pages, *section.shape]
    if section.per_head:
        axes[2] = len(heads)
    for box in boxes(axes, reader.CHUNK_VALUES):
        here, cut = slice(0, 1), list(box)
        if section.per_head:
            here = box[2]
            cut[2] = slice(heads.start + here.start, heads.start + here.stop)
        elements = dump.read(part, name, layer, *cut)
        yield here, (elements.movedim(2, 0) if section.per_head else elements).reshape(here.stop - here.start, -1)


def _by_code(pieces: _Pieces, heads: int, dtype: torch.dtype) -> _Figures:
    """Figures of narrow elements: count each code of each head, and look at what codes there are."""
    codes, code_type = 1 << 8 * dtype.itemsize, np.dtype(f"u{dtype.itemsize}")
    counts = np.zeros((heads, codes), dtype=np.int64)
    for here, elements in pieces:
        as_bytes = elements.contiguous().view(torch.uint8).numpy()
        for head, row in enumerate(as_bytes.view(code_type), here.start):
            counts[head] += np.bincount(row, minlength=codes)
    histogram = torch.from_numpy(counts)
    values = _exact(torch.from_numpy(np.arange(codes).astype(code_type).view(np.uint8)).view(dtype))
    finite = values.isfinite()
    there = (histogram > 0) & finite
    share = histogram.double() / histogram.sum(1, keepdim=True)
    return _Figures(
        smallest=torch.where(there, values, math.inf).amin(1).double(),
        largest=torch.where(there, values, -math.inf).amax(1).double(),
        zero=histogram[:, values == 0].sum(1),
        saturated=histogram[:, finite & (values.abs() >= _most(dtype))].sum(1),
        not_finite=histogram[:, ~finite].sum(1),
        bits=-torch.special.xlogy(share, share).sum(1) / math.log(2) + 0.0,  # and not -0.0
    )


def _by_order(pieces: _Pieces, heads: int, dtype: torch.dtype) -> _Figures:
    """Figures of narrow elements that are few, all in one piece: sort them, and see how many are the same."""
    (piece,) = pieces
    codes = piece[1].contiguous().view(torch.uint8 if dtype.itemsize == 1 else torch.uint16).long().sort(1).values
    same = torch.searchsorted(codes, codes, right=True) - torch.searchsorted(codes, codes)
    bits = -(same.double() / codes.shape[1]).log2().mean(1) + 0.0
    return attrs.evolve(_by_value([piece], heads, dtype), bits=bits)


def _by_value(pieces: _Pieces, heads: int, dtype: torch.dtype) -> _Figures:
    """Figures of elements of which there are too many different ones to count."""
    smallest = torch.full((heads,), math.inf, dtype=torch.float64)
    largest = -smallest
    zero, saturated, not_finite = (torch.zeros(heads, dtype=torch.int64) for _ in range(3))
    for here, elements in pieces:
        values = _exact(elements)
        finite = values.isfinite()
        smallest[here] = torch.minimum(smallest[here], torch.where(finite, values, math.inf).amin(1).double())
        largest[here] = torch.maximum(largest[here], torch.where(finite, values, -math.inf).amax(1).double())
        zero[here] += (values == 0).sum(1)
        saturated[here] += (finite & (values.abs() >= _most(dtype))).sum(1)
        not_finite[here] += (~finite).sum(1)
    return _Figures(
        smallest=smallest,
        largest=largest,
        zero=zero,
        saturated=saturated,
        not_finite=not_finite,
        bits=torch.full((heads,), math.nan, dtype=torch.float64),
    )


def _exact(elements: torch.Tensor) -> torch.Tensor:
    """Elements as the smallest float type that holds them all; 64-bit integers are rounded."""
    narrow = elements.dtype.itemsize <= 2 or elements.dtype == torch.float32
    return elements.float() if narrow else elements.double()


def _most(dtype: torch.dtype) -> float:
    """The largest magnitude that both signs of a type have."""
    return 1 if dtype == torch.bool else (torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max
