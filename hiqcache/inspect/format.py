"""What a dump file says: names of its tensors, and the metadata that makes sense of them.

A dump is one safetensors file for each rank. Its tensors are the sections of the blocks, `k.payload`, `v.scales` and
so on, with axes `[layer, page, *section.shape]`; `padding` sections, which say nothing, are left out. The metadata is
text, as safetensors has it; `hiqcache.geometry` is JSON, `hiqcache.page_ids` is ranges.
"""

import json
from collections.abc import Mapping, Sequence

import torch
from attrs import asdict, frozen

from hiqcache.geometry import HiqcacheError, KVGeometry, Part
from hiqcache.representation import BlockLayout

VERSION = "1"
"""Of this format; changes whenever a reader of the old one would go wrong."""
PADDING = "padding"
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

_PREFIX = "hiqcache."


class DumpError(HiqcacheError):
    """A dump cannot be written, or a file cannot be used as one; one sentence says why."""


@frozen(kw_only=True)
class Metadata:
    """Everything about a dump that its tensors do not say.

    Attributes:
        representation: registered name of what encoded the blocks.
        format_tag: its byte format.
        geometry: the rank's geometry.
        page_ids: host page of each entry of the tensors' page axis, ascending.
        pool_pages: pages of the pool that they come from.
        tp_rank: rank that wrote the file.
        hiqcache_version: version of hiqcache that wrote it.
        sglang_version: version of SGLang that served, or None outside SGLang.
    """

    representation: str
    format_tag: str
    geometry: KVGeometry
    page_ids: tuple[int, ...]
    pool_pages: int
    tp_rank: int
    hiqcache_version: str
    sglang_version: str | None = None

    def to_text(self) -> dict[str, str]:
        """As it stands in the file."""
        geometry = asdict(self.geometry) | {"dtype": str(self.geometry.dtype).removeprefix("torch.")}
        fields = {
            "dump": VERSION,
            "representation": self.representation,
            "format_tag": self.format_tag,
            "geometry": json.dumps(geometry),
            "page_ids": page_ranges(self.page_ids),
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
            raise DumpError(f"it is a dump of version {version!r}; this hiqcache reads version {VERSION!r}")

        def entry(name: str) -> str:
            if (value := text.get(_PREFIX + name)) is None:
                raise DumpError(f"its metadata has no '{_PREFIX}{name}'")
            return value

        def whole(name: str) -> int:
            value = entry(name)
            if not _is_whole(value):
                raise DumpError(f"its metadata has {_PREFIX}{name} = {value!r}; allowed: a whole number")
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
            sglang_version=text.get("sglang.version"),
        )


def _geometry(text: str) -> KVGeometry:
    try:
        fields = json.loads(text)
        dtype = getattr(torch, fields.pop("dtype"))
        return KVGeometry(**fields, dtype=dtype)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        why = error.args[0]  # attrs' type errors have more, about itself
        raise DumpError(f"its metadata's geometry makes no sense: {text[:300]!r} ({why})") from error


def page_ranges(ids: Sequence[int]) -> str:
    """Ascending page ids as text: `0-41,57`."""
    ranges: list[list[int]] = []
    for page in ids:
        if ranges and page == ranges[-1][1] + 1:
            ranges[-1][1] = page
        else:
            ranges.append([page, page])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def parse_ranges(text: str, pool_pages: int, most: int | None = None) -> tuple[int, ...]:
    """The page ids that `0-41,57` names.

    Args:
        text: the ranges.
        pool_pages: pages that there are, numbered from 0.
        most: ids that there may be; None leaves it at `pool_pages`.

    Raises:
        DumpError: it is anything else, the ids do not ascend, or there are no such pages.
    """
    ranges: list[tuple[int, int]] = []
    for piece in text.split(","):
        ends = piece.split("-")
        if len(ends) > 2 or not all(map(_is_whole, ends)):
            raise DumpError(f"{piece!r} is no page and no range of pages; allowed: N, or FIRST-LAST, joined by commas")
        first, last = int(ends[0]), int(ends[-1])
        if first > last or (ranges and first <= ranges[-1][1]):
            raise DumpError(f"pages {piece!r} do not ascend")
        ranges.append((first, last))
    if ranges[-1][1] >= pool_pages:
        raise DumpError(f"there is no page {ranges[-1][1]}; the pool's are 0 to {pool_pages - 1}")
    # Counted before they are listed: a wrong number must not become a list of its length.
    count = sum(last - first + 1 for first, last in ranges)
    if most is not None and count > most:
        raise DumpError(f"there are {count:,} of them, and {most:,} pages in the file")
    return tuple(page for first, last in ranges for page in range(first, last + 1))


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
