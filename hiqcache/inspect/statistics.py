"""What a dump's bytes look like, by layer and head, without decoding them.

The largest section of a block is taken for its payload: the codes of the values. For the others (scales) the range is
what matters. What a section's declaration does not tell is left open: unsigned integers may be several packed codes, so
which of them are zero or saturated is unknown; a section with no axis of heads is looked at as a whole.
"""

import math
from collections.abc import Callable, Iterable

import numpy as np
import torch
from attrs import field, frozen

from hiqcache.geometry import Part
from hiqcache.inspect.format import tensor_name
from hiqcache.inspect.reader import Dump, StoredSection

WIDEST_CODE = 16
"""Bits of the widest element whose values are counted one by one."""


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
class _Layer:
    """One section in one layer: how many elements each head has, and figures `[heads]`."""

    count: int
    smallest: torch.Tensor
    largest: torch.Tensor
    zero: torch.Tensor
    saturated: torch.Tensor
    not_finite: torch.Tensor
    bits: torch.Tensor


def _measure_section(
    dump: Dump, part: Part, name: str, section: StoredSection, progress: Callable[[int], None]
) -> SectionStatistics:
    layers = []
    for layer in range(dump.geometry.layers):
        layers.append(_measure_layer(dump, part, name, section, layer))
        progress(1)
    count = layers[0].count
    smallest, largest, zero, saturated, not_finite, bits = (
        torch.stack([getattr(layer, figure) for layer in layers])
        for figure in ("smallest", "largest", "zero", "saturated", "not_finite", "bits")
    )
    codes_are_values = section.dtype.is_floating_point or section.dtype.is_signed
    return SectionStatistics(
        part=part,
        section=name,
        dtype=section.dtype,
        payload=name == payload_section(dump, part),
        per_head=section.per_head,
        count=count,
        smallest=smallest.masked_fill(smallest.isinf(), math.nan),
        largest=largest.masked_fill(largest.isinf(), math.nan),
        zero=zero.double() / count if codes_are_values else None,
        saturated=saturated.double() / count if codes_are_values else None,
        bits=bits if 8 * section.dtype.itemsize <= WIDEST_CODE else None,
        not_finite=not_finite,
    )


def _measure_layer(dump: Dump, part: Part, name: str, section: StoredSection, layer: int) -> _Layer:
    heads = dump.geometry.heads if section.per_head else 1
    pieces = (
        elements.movedim(2, 0).reshape(heads, -1) if section.per_head else elements.reshape(heads, -1)
        for elements in (dump.read(part, name, layer, pages) for pages in dump.chunks())
    )
    count_all = _by_code if 8 * section.dtype.itemsize <= WIDEST_CODE else _by_value
    return count_all(pieces, heads, section.dtype)


def _by_code(pieces: Iterable[torch.Tensor], heads: int, dtype: torch.dtype) -> _Layer:
    """Figures of narrow elements `[heads, n]`: count each code, and look at what codes there are."""
    code_type = np.dtype(f"u{dtype.itemsize}")
    codes = 1 << 8 * dtype.itemsize
    counts = np.zeros((heads, codes), dtype=np.int64)
    for elements in pieces:
        as_bytes = elements.contiguous().view(torch.uint8).numpy()
        for head, row in enumerate(as_bytes.view(code_type)):
            counts[head] += np.bincount(row, minlength=codes)
    histogram = torch.from_numpy(counts)
    values = _exact(torch.from_numpy(np.arange(codes).astype(code_type).view(np.uint8)).view(dtype))
    finite = values.isfinite()
    there = (histogram > 0) & finite
    count = int(histogram[0].sum())
    share = histogram.double() / count
    return _Layer(
        count=count,
        smallest=torch.where(there, values, math.inf).amin(1).double(),
        largest=torch.where(there, values, -math.inf).amax(1).double(),
        zero=histogram[:, values == 0].sum(1),
        saturated=histogram[:, finite & (values.abs() >= _most(dtype))].sum(1),
        not_finite=histogram[:, ~finite].sum(1),
        bits=-torch.special.xlogy(share, share).sum(1) / math.log(2) + 0.0,  # and not -0.0
    )


def _by_value(pieces: Iterable[torch.Tensor], heads: int, dtype: torch.dtype) -> _Layer:
    """Figures of elements `[heads, n]` of which there are too many different ones to count."""
    count = 0
    smallest = torch.full((heads,), math.inf, dtype=torch.float64)
    largest = -smallest
    zero, saturated, not_finite = (torch.zeros(heads, dtype=torch.int64) for _ in range(3))
    for elements in pieces:
        values = _exact(elements)
        finite = values.isfinite()
        count += values.shape[1]
        smallest = torch.minimum(smallest, torch.where(finite, values, math.inf).amin(1).double())
        largest = torch.maximum(largest, torch.where(finite, values, -math.inf).amax(1).double())
        zero += (values == 0).sum(1)
        saturated += (finite & (values.abs() >= _most(dtype))).sum(1)
        not_finite += (~finite).sum(1)
    return _Layer(
        count=count,
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
