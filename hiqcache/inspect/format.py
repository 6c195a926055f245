"""What a dump file says: names of its tensors, and the metadata that makes sense of them.

A dump is one safetensors file for each rank. Its tensors are the sections of the blocks, `k.payload`, `v.scales` and
so on, with axes `[layer, page, *section.shape]`; `padding` sections, which say nothing, are left out. The metadata is
text, as safetensors has it; `hiqcache.geometry` is JSON, `hiqcache.page_ids` is ranges. Where K's channels were divided
by powers of two before they were encoded, `key_exponents` `[layer, head, head_dim]` says by which.
"""

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence

import torch
from attrs import asdict, field, frozen

from hiqcache.geometry import HiqcacheError, KVGeometry, Part
from hiqcache.representation import BlockLayout

VERSION = "1"
"""Of this format; changes whenever a reader of the old one would go wrong."""
PADDING = "padding"
EXPONENTS = "key_exponents"
OCCUPIED, ALL = "occupied", "all"
"""Selections of pages that are no ranges."""

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}
"""safetensors' names of element types."""

LARGEST_HEADER = 100_000_000
"""Bytes of a header that safetensors opens."""
PAGE_IDS = "hiqcache.page_ids"
_PREFIX = "hiqcache."
_LONGEST_ENTRY = 1000
"""Characters of every other entry of the metadata."""
_LARGEST_NUMBER = 2**63 - 1
"""In a geometry; Python does not print products of numbers that are much longer."""
_WINDOW = 1 << 16
"""Page ids that become text at a time."""


class DumpError(HiqcacheError):
    """A dump cannot be written, or a file cannot be used as one; one sentence says why."""


def _int64(ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(ids, dtype=torch.int64)


@frozen(kw_only=True, eq=False)
class Metadata:
    """Everything about a dump that its tensors do not say.

    Attributes:
        representation: registered name of what encoded the blocks.
        format_tag: its byte format.
        geometry: the rank's geometry.
        page_ids: host page of each entry of the tensors' page axis, ascending, `[pages]` int64; a sequence of numbers
            becomes one.
        pool_pages: pages of the pool that they come from.
        tp_rank: rank that wrote the file.
        hiqcache_version: version of hiqcache that wrote it.
        sglang_version: version of SGLang that served, or None outside SGLang.
    """

    representation: str
    format_tag: str
    geometry: KVGeometry
    page_ids: torch.Tensor = field(converter=_int64, repr=False)
    pool_pages: int
    tp_rank: int
    hiqcache_version: str
    sglang_version: str | None = None

    def to_text(self) -> dict[str, str]:
        """As it stands in the file."""
        return self.without_page_ids() | {PAGE_IDS: page_ranges(self.page_ids)}

    def without_page_ids(self) -> dict[str, str]:
        """`to_text` but for the page ids, which can be tens of megabytes; `ranges_in_pieces` has those."""
        geometry = asdict(self.geometry) | {"dtype": str(self.geometry.dtype).removeprefix("torch.")}
        fields = {
            "dump": VERSION,
            "representation": self.representation,
            "format_tag": self.format_tag,
            "geometry": json.dumps(geometry),
            "pool_pages": str(self.pool_pages),
            "tp_rank": str(self.tp_rank),
            "version": self.hiqcache_version,
        }
        text = {_PREFIX + name: value for name, value in fields.items()}
        return text | ({"sglang.version": self.sglang_version} if self.sglang_version else {})

    @classmethod
    def from_text(cls, text: Mapping[str, str], most_pages: int) -> "Metadata":
        """Read `to_text` back.

        Args:
            text: a file's metadata.
            most_pages: length of the longest page axis in the file.

        Raises:
            DumpError: it is not a dump's, of another version, or a field is missing or makes no sense.
        """
        version = text.get(_PREFIX + "dump")
        if version is None:
            raise DumpError("it is a safetensors file, but no dump of hiqcache: its metadata has no 'hiqcache.dump'")
        if version != VERSION:
            raise DumpError(f"it is a dump of version {version[:20]!r}; this hiqcache reads version {VERSION!r}")

        def entry(name: str) -> str:
            if (value := text.get(_PREFIX + name)) is None:
                raise DumpError(f"its metadata has no '{_PREFIX}{name}'")
            return value if _PREFIX + name == PAGE_IDS else _plain(_PREFIX + name, value)

        def whole(name: str) -> int:
            value = entry(name)
            if not _is_whole(value):
                raise DumpError(
                    f"its metadata has {_PREFIX}{name} = {value!r}; allowed: a whole number of up to 18 digits"
                )
            return int(value)

        pool_pages = whole("pool_pages")
        try:
            page_ids = parse_ranges(entry("page_ids"), pool_pages, most_pages)
        except DumpError as error:
            raise DumpError(f"its metadata's page ids make no sense: {error}") from error
        return cls(
            representation=entry("representation"),
            format_tag=entry("format_tag"),
            geometry=_geometry(entry("geometry")),
            page_ids=page_ids,
            pool_pages=pool_pages,
            tp_rank=whole("tp_rank"),
            hiqcache_version=entry("version"),
            sglang_version=_plain("sglang.version", text["sglang.version"]) if "sglang.version" in text else None,
        )


def _plain(name: str, value: str) -> str:
    """A value that can be printed as it is."""
    if len(value) > _LONGEST_ENTRY or not value.isprintable():
        raise DumpError(
            f"its metadata has {name} = {value[:80]!r}..., {len(value):,} characters; allowed: up to "
            f"{_LONGEST_ENTRY:,}, all of them printable"
        )
    return value


def _geometry(text: str) -> KVGeometry:
    try:
        fields = json.loads(text)
        dtype = getattr(torch, fields.pop("dtype"))
        geometry = KVGeometry(**fields, dtype=dtype)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        why = error.args[0]  # attrs' type errors have more, about itself
        raise DumpError(f"its metadata's geometry makes no sense: {text[:300]!r} ({str(why)[:300]})") from error
    if max(fields.values()) > _LARGEST_NUMBER:
        raise DumpError(
            f"its metadata's geometry makes no sense: {text[:300]!r} has a number beyond {_LARGEST_NUMBER:,}"
        )
    return geometry


def page_ranges(ids: Sequence[int] | torch.Tensor) -> str:
    """Ascending page ids as text: `0-41,57`."""
    return b"".join(ranges_in_pieces(_int64(ids))).decode()


def ranges_in_pieces(ids: torch.Tensor) -> Iterator[bytes]:
    """The text of `page_ranges` in pieces of about a megabyte, made by tensor operations, which do not hold the GIL.

    Args:
        ids: ascending, `[pages]` int64, at least one.
    """
    powers = 10 ** torch.arange(len(str(int(ids[-1]))) - 1, -1, -1)
    for begin in range(0, len(ids), _WINDOW):
        end = min(begin + _WINDOW, len(ids))
        window, more = ids[begin:end], end < len(ids)
        # Of each range only the two ends are written: `FIRST-` and `LAST,`, or both in one, `ONLY,`.
        opens, closes = (torch.ones(len(window), dtype=torch.bool) for _ in range(2))
        torch.ne(window[1:], window[:-1] + 1, out=opens[1:])
        closes[:-1] = opens[1:]
        if begin:
            opens[0] = window[0] != ids[begin - 1] + 1
        if more:
            closes[-1] = ids[end] != window[-1] + 1
        written = opens | closes
        numbers = window[written][:, None]
        characters = torch.empty(len(numbers), len(powers) + 1, dtype=torch.uint8)
        characters[:, :-1] = numbers // powers % 10 + ord("0")
        characters[:, -1] = torch.where(closes[written], ord(","), ord("-"))
        kept = torch.ones_like(characters, dtype=torch.bool)
        kept[:, :-2] = numbers >= powers[:-1]  # no leading zeros
        text = characters[kept]
        yield (text if more else text[:-1]).numpy().tobytes()


def each_range(text: str, pool_pages: int) -> Iterator[tuple[int, int]]:
    """The ranges that `0-41,57` names, as first and last page, ascending.

    Args:
        text: the ranges.
        pool_pages: pages that there are, numbered from 0.

    Raises:
        DumpError: it is anything else, the ids do not ascend, or there are no such pages.
    """
    begin, previous = 0, -1
    while begin <= len(text):
        end = text.find(",", begin)
        end = len(text) if end < 0 else end
        piece = text[begin:end]
        ends = (piece,) if _is_whole(piece) else piece.split("-", 2)
        if len(ends) > 2 or not all(map(_is_whole, ends)):
            raise DumpError(
                f"{piece[:80]!r} is no page and no range of pages; allowed: N, or FIRST-LAST, joined by commas"
            )
        first, last = int(ends[0]), int(ends[-1])
        if first > last or first <= previous:
            raise DumpError(f"pages {piece!r} do not ascend")
        if last >= pool_pages:
            raise DumpError(f"there is no page {last}; the pool's are 0 to {pool_pages - 1}")
        yield first, last
        begin, previous = end + 1, last


def parse_ranges(text: str, pool_pages: int, most: int | None = None) -> torch.Tensor:
    """The page ids that `0-41,57` names, `[pages]` int64.

    Args:
        text: the ranges.
        pool_pages: pages that there are, numbered from 0.
        most: ids that there may be; None leaves it at `pool_pages`.

    Raises:
        DumpError: as `each_range`, or there are more than `most`.
    """
    ends = array("q")
    for piece in each_range(text, pool_pages):
        ends.extend(piece)
    first, last = torch.frombuffer(ends, dtype=torch.int64).view(-1, 2).unbind(1)
    begins = torch.cat([first.new_zeros(1), (last - first + 1).cumsum(0)])
    # Counted before they are listed: a wrong number must not become a list of its length.
    count = int(begins[-1])
    if most is not None and count > most:
        raise DumpError(f"there are {count:,} of them, and {most:,} pages in the file")
    # Steps from one id to the next, and their sums: 1 within a range.
    ids = torch.ones(count, dtype=torch.int64)
    ids[begins[:-1]] = torch.cat([first[:1], first[1:] - last[:-1]])
    return ids.cumsum_(0)


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19


def tensor_name(part: Part, section: str) -> str:
    """`k.payload`."""
    return f"{part.value}.{section}"


def dumped_sections(layout: BlockLayout) -> list[str]:
    """Names of the sections that a dump keeps.

    Raises:
        DumpError: safetensors has no name for a section's element type.
    """
    for section in layout.sections:
        if section.name != PADDING and section.dtype not in DTYPES.values():
            raise DumpError(
                f"section {section.name!r} has element type {section.dtype}; safetensors has {', '.join(DTYPES)}"
            )
    return [section.name for section in layout.sections if section.name != PADDING]
