"""Opening a dump, finding out what is wrong with it, and reading it piece by piece.

A file may claim anything. What it claims is compared with the bytes that it has before any memory is taken for it, and
what nothing in the file pays for (figures, rows of tables) has a limit.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import safetensors
import torch
from attrs import frozen

from hiqcache import registry
from hiqcache.exponents import KeyExponents, multiply
from hiqcache.geometry import HiqcacheError, KVGeometry, Part
from hiqcache.inspect.format import (
    DTYPES,
    EXPONENTS,
    LARGEST_HEADER,
    DumpError,
    Metadata,
    dumped_sections,
    tensor_name,
)
from hiqcache.representation import HostRepresentation

CHUNK_VALUES = 4 << 20
"""Values of KV looked at together; what is in memory at once is some tens of bytes for each."""
MOST_LAYERS = 1 << 10
MOST_FIGURES = 1 << 20
"""Heads of a file, over all its layers and tensors; each becomes a few figures of its own."""
MOST_TENSORS = 32
MOST_AXES = 8
LONGEST_NAME = 100
"""Characters of a tensor's name."""
_MOST_STRINGS = 10_000
"""Quotation marks and backslashes in a header; a dump's has a few hundred."""
_LONGEST_REST = 1 << 18
"""Bytes of a header outside its strings: numbers, brackets and commas. A dump's has a few thousand."""
_INT64 = 2**63 - 1


@frozen
class StoredSection:
    """A section as the file has it.

    Attributes:
        dtype: element type.
        shape: axes in one block, the page's tokens first.
        per_head: whether the axis after the tokens is the heads.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    per_head: bool


class Dump:
    """An open dump. Close it, or use it as a context manager.

    Args:
        file: its path.

    Attributes:
        file: its path.
        metadata: what it says of itself.
        sections: the sections of each part, by name.
        key_exponents: by whose powers of two K's channels were divided before they were encoded.

    Raises:
        DumpError: it is damaged, or no dump; the text starts with the path and says what is wrong.
    """

    def __init__(self, file: Path):
        self.file = file
        try:
            header = _header(file)
            text = header.pop("__metadata__", {})
            tensors = {name: _entry(name, entry) for name, entry in header.items()}
            exponents = tensors.pop(EXPONENTS, None)
            # An axis may have any length where another is 0.
            paged = (shape for _, shape, _ in tensors.values() if len(shape) > 1 and 0 not in shape)
            self.metadata = Metadata.from_text(text, most_pages=max((shape[1] for shape in paged), default=0))
            self.sections = _sections(tensors, self.metadata)
            if exponents is not None:
                _require_exponents(exponents[:2], self.geometry)
            self._tensors = safetensors.safe_open(file, framework="pt")
            self._tensors.__enter__()
            self.key_exponents = self._key_exponents(exponents is not None)
        except DumpError as error:
            raise DumpError(f"{file}: {error}") from error
        except OSError as error:
            raise DumpError(f"{file}: {error.strerror or error}") from error
        except safetensors.SafetensorError as error:
            raise DumpError(f"{file}: safetensors cannot open it: {error}") from error

    def _key_exponents(self, stored: bool) -> KeyExponents:
        if not stored:
            return KeyExponents.none(self.geometry)
        try:
            return KeyExponents(self._tensors.get_tensor(EXPONENTS))
        except ValueError as error:
            raise DumpError(f"tensor {EXPONENTS!r}: {error}") from error

    @property
    def geometry(self) -> KVGeometry:
        return self.metadata.geometry

    @property
    def pages(self) -> int:
        """Entries of the page axis."""
        return len(self.metadata.page_ids)

    def __enter__(self) -> "Dump":
        return self

    def __exit__(self, *exception: object) -> None:
        self._tensors.__exit__(None, None, None)

    def chunks(self) -> Iterator[slice]:
        """The page axis, in pieces small enough to be looked at."""
        geometry = self.geometry
        page = geometry.page_size * geometry.heads * max(geometry.head_dim, geometry.v_head_dim)
        step = max(1, CHUNK_VALUES // page)
        for first in range(0, self.pages, step):
            yield slice(first, min(first + step, self.pages))

    def read(self, part: Part, section: str, layer: int, pages: slice | torch.Tensor, *within: slice) -> torch.Tensor:
        """Some pages of a section in one layer, `[pages, *section.shape]`.

        Args:
            part: K or V.
            section: its name.
            layer: of this rank's layers.
            pages: a slice of the page axis, or ascending positions on it.
            within: slices of the section's axes, with a slice of pages only.
        """
        tensor = self._tensors.get_slice(tensor_name(part, section))
        if isinstance(pages, slice):
            return tensor[(layer, pages, *within)]
        first = int(pages[0])
        return tensor[layer, first : int(pages[-1]) + 1][pages - first]

    def representation(self) -> HostRepresentation:
        """What encoded it, bound to its geometry, for decoding.

        Raises:
            DumpError: it is not installed, has another format tag now, refuses the geometry, or declares other sections
                than the file has.
        """
        metadata = self.metadata
        try:
            cls = registry.get(metadata.representation)
            if metadata.format_tag not in (readable := (cls.format_tag, *cls.older_tags)):
                raise DumpError(
                    f"it holds format {metadata.format_tag!r} of representation {metadata.representation!r}, and the "
                    f"installed one reads {', '.join(map(repr, readable))}"
                )
            representation = cls(metadata.geometry)
        except HiqcacheError as error:
            raise DumpError(f"{self.file}: {error}") from error
        for part, layout in representation.layouts.items():
            declared = {name: (layout[name].dtype, layout[name].shape) for name in dumped_sections(layout)}
            found = {name: (section.dtype, section.shape) for name, section in self.sections[part].items()}
            if declared != found:
                raise DumpError(
                    f"{self.file}: its {part.name} sections are {_described(found)}; format {metadata.format_tag!r} "
                    f"has {_described(declared)}"
                )
        return representation

    def decode(
        self, representation: HostRepresentation, part: Part, layer: int, pages: slice | torch.Tensor
    ) -> torch.Tensor:
        """Values of some pages, `[pages, page_size, heads, dim]` of the geometry's dtype.

        Args:
            representation: what `representation()` returned.
            part, layer, pages: as for `read`.
        """
        layout, geometry = representation.layouts[part], self.geometry
        stored = {name: self.read(part, name, layer, pages) for name in self.sections[part]}
        count = len(next(iter(stored.values())))
        blocks = torch.zeros(count, layout.block_bytes, dtype=torch.uint8)
        for name, values in stored.items():
            layout.view(blocks, name).copy_(values)
        out = torch.empty(count, geometry.page_size, geometry.heads, geometry.dim(part), dtype=geometry.dtype)
        representation.decode(blocks, part, out)
        if part is Part.K and self.key_exponents.any:
            multiply(out, self.key_exponents.factors(out.device)[layer])
        return out


def _described(sections: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> str:
    pieces = (f"{name} {str(dtype).removeprefix('torch.')} {list(shape)}" for name, (dtype, shape) in sections.items())
    return ", ".join(pieces) or "none"


def _header(file: Path) -> dict:
    """The JSON at the front of a safetensors file, once the file is as long as it says."""
    if file.exists() and not file.is_file():  # opening a pipe would wait for a writer
        raise DumpError("it is no regular file, and a dump is read here and there")
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        if size < 8:
            raise DumpError(f"it is no safetensors file: it has {size} bytes, and a header alone has more")
        length = int.from_bytes(opened.read(8), "little")
        if length > LARGEST_HEADER:
            raise DumpError("it is no safetensors file: its first 8 bytes are no length of a header")
        if length > size - 8:
            raise DumpError(f"it is truncated: its header has {length:,} bytes, the file {size:,}")
        raw = opened.read(length)
    _require_short(raw)
    try:
        header = json.loads(raw.decode(), object_pairs_hook=_table)  # of bytes it takes UTF-16 too
    except (ValueError, RecursionError) as error:
        if isinstance(error, DumpError):
            raise
        raise DumpError("it is no safetensors file: its header is not JSON") from error
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__", {}), dict):
        raise DumpError("it is no safetensors file: its header is not a table of tensors")
    if not all(isinstance(value, str) for value in header.get("__metadata__", {}).values()):
        raise DumpError("it is no safetensors file: its metadata is not all text")
    spans = [_entry(name, entry)[2] for name, entry in header.items() if name != "__metadata__"]
    needed = 8 + length + max((end for _, end in spans), default=0)
    if size < needed:
        raise DumpError(f"it is truncated: its tensors need {needed:,} bytes, the file has {size:,}")
    return header


def _require_short(raw: bytes) -> None:
    """Check that a header would become few Python objects: each can be ten times as large as its text."""
    if raw.count(b'"') <= _MOST_STRINGS and raw.count(b"\\") <= _MOST_STRINGS:
        strings_and_rest = raw.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        if sum(map(len, strings_and_rest[::2])) <= _LONGEST_REST:
            return
    raise DumpError(f"it is no dump of hiqcache: its header, of {len(raw):,} bytes, has far more in it than a dump's")


def _table(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object; of two entries of one name, safetensors might take the other."""
    table = dict(pairs)
    if len(table) < len(pairs):
        raise DumpError("it is no safetensors file: two entries of its header have the same name")
    return table


def _entry(name: str, entry: object) -> tuple[torch.dtype, tuple[int, ...], tuple[int, int]]:
    if len(name) > LONGEST_NAME or not name.isprintable():
        raise DumpError(
            f"tensor {name[:LONGEST_NAME]!r}... has a name of {len(name):,} characters; allowed: up to {LONGEST_NAME}, "
            "all of them printable"
        )
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if all(
            type(number) is int and 0 <= number <= _INT64 for number in (*shape, begin, end)
        ):
            if dtype not in DTYPES:
                raise DumpError(f"tensor {name!r} has element type {dtype[:80]!r}; known: {', '.join(DTYPES)}")
            if len(shape) > MOST_AXES:
                raise DumpError(f"tensor {name!r} has {len(shape):,} axes; allowed: up to {MOST_AXES}")
            needed = math.prod(shape) * DTYPES[dtype].itemsize
            if needed != end - begin:
                raise DumpError(
                    f"tensor {name!r} has {end - begin:,} bytes in the file; axes {shape} of {dtype} need {needed:,}"
                )
            return DTYPES[dtype], tuple(shape), (begin, end)
    raise DumpError(f"tensor {name!r} is not described as safetensors does: {str(entry)[:80]}")


def _require_exponents(found: tuple[torch.dtype, tuple[int, ...]], geometry: KVGeometry) -> None:
    wanted = torch.int8, (geometry.layers, geometry.heads, geometry.head_dim)
    if found != wanted:
        raise DumpError(f"tensor {EXPONENTS!r} is {found[0]} {list(found[1])}; the metadata's geometry has {wanted}")


def _sections(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...], tuple[int, int]]], metadata: Metadata
) -> dict[Part, dict[str, StoredSection]]:
    geometry, sections = metadata.geometry, {part: {} for part in Part}
    for name, (dtype, shape, _) in tensors.items():
        letter, dot, section = name.partition(".")
        if not dot or letter not in {part.value for part in Part}:
            raise DumpError(f"tensor {name!r} is none of a dump's, which are called k.SECTION and v.SECTION")
        expected = (geometry.layers, len(metadata.page_ids), geometry.page_size)
        if shape[:2] != expected[:2] or len(shape) < 2:
            raise DumpError(
                f"tensor {name!r} has axes {list(shape)}; the metadata names {expected[0]} layers and "
                f"{expected[1]} pages"
            )
        if 0 in shape:
            raise DumpError(f"tensor {name!r} has axes {list(shape)}, and so no elements")
        per_head = len(shape) > 3 and shape[2:4] == (geometry.page_size, geometry.heads)
        sections[Part(letter)][section] = StoredSection(dtype, shape[2:], per_head)
    for part, found in sections.items():
        if not found:
            raise DumpError(f"it has no tensor of {part.name}")
        stored = sum(math.prod(section.shape) * section.dtype.itemsize for section in found.values())
        values = geometry.page_size * geometry.heads * geometry.dim(part)
        if values > 8 * stored:  # memory is taken by the geometry, which must not be a wrong number
            raise DumpError(
                f"its metadata's geometry has {values:,} values of {part.name} in a block, which cannot be in the "
                f"{stored:,} bytes that a block has in the file"
            )
    for rule, seen, allowed in (
        ("tensors", len(tensors), MOST_TENSORS),
        ("layers", geometry.layers, MOST_LAYERS),
        ("heads over all layers and tensors", len(tensors) * geometry.layers * geometry.heads, MOST_FIGURES),
    ):
        if seen > allowed:
            raise DumpError(f"it has {seen:,} {rule}; allowed: up to {allowed:,}")
    return sections


def boxes(axes: Sequence[int], most: int) -> Iterator[tuple[slice, ...]]:
    """Slices of every axis that cut an array into pieces of at most `most` elements, in the order of memory."""
    if not axes:
        yield ()
        return
    inner = math.prod(axes[1:])
    step = max(1, most // inner)
    for first in range(0, axes[0], step):
        here = slice(first, min(first + step, axes[0]))
        for rest in boxes(axes[1:], most):
            yield (here, *rest)
