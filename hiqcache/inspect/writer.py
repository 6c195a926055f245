"""Writing safetensors in pieces: what is in memory at once does not grow with the file.

safetensors' own `save_file` wants whole tensors. Here the header is written first, and each piece goes to its place.
"""

import contextlib
import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from attrs import field, frozen, validators

from hiqcache.arena import ArenaShape, HostArena
from hiqcache.exponents import KeyExponents
from hiqcache.inspect.format import (
    DTYPES,
    EXPONENTS,
    LARGEST_HEADER,
    PAGE_IDS,
    DumpError,
    Metadata,
    dumped_sections,
    ranges_in_pieces,
    tensor_name,
)

CHUNK_BYTES = 32 << 20
"""Encoded bytes in flight at a time; memory beyond the arena is about twice this."""
_ALIGN = 8
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_FULL = (errno.ENOSPC, errno.EDQUOT)


@frozen
class TensorSpec:
    """A tensor of a file that is yet to be written.

    Attributes:
        name: its name in the file.
        dtype: one of `DTYPES`.
        shape: its axes.
    """

    name: str
    dtype: torch.dtype = field(validator=validators.in_(_NAMES))
    shape: tuple[int, ...] = field(converter=tuple)

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


class SafetensorsWriter:
    """A safetensors file that appears under its name once it is complete, and never in part.

    `begin` it, `write` every tensor, `finish` and `commit`. Used as a context manager: leaving it without `commit`
    removes what was written. The file can be read by its owner only, because KV gives prompts away.

    Args:
        file: the name it shall have; its folder exists.
        tensors: what it will hold, in this order.

    Attributes:
        file: the name.
        total_bytes: of the tensors, and after `begin` of the whole file.

    Raises:
        DumpError: the file exists, the folder cannot be written to, or it lacks room for the tensors.
    """

    def __init__(self, file: Path, tensors: Sequence[TensorSpec]):
        self.file = file
        self._committed = False
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._begins, begin = {}, 0
        for tensor in tensors:
            self._begins[tensor.name] = begin
            begin += tensor.nbytes
        self.total_bytes = begin
        self._refuse_existing()
        require_room(file.parent, self.total_bytes)
        self._partial = file.parent / f".{file.name}.{os.getpid()}.partial"
        with self._explained():
            self._descriptor: int | None = os.open(
                self._partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600
            )

    def begin(self, metadata: Mapping[str, str | Iterable[bytes]]) -> None:
        """Write the header; once, before anything else.

        Args:
            metadata: the file's `__metadata__`. A long value may come in pieces of ASCII that JSON need not escape, and
                is then never in memory as a whole.

        Raises:
            DumpError: the header would be larger than safetensors opens, or the disk is full, or fails.
        """
        length = 0
        for piece in self._header(metadata):
            if length + len(piece) > LARGEST_HEADER - _ALIGN:
                raise DumpError(
                    f"{self.file} would have a header of more than {LARGEST_HEADER:,} bytes, which safetensors does "
                    "not open: the pages lie too scattered; choose fewer of them"
                )
            self._put(8 + length, piece)
            length += len(piece)
        padding = b" " * (-length % _ALIGN)
        self._put(8 + length, padding)
        length += len(padding)
        self._put(0, length.to_bytes(8, "little"))
        self._data = 8 + length
        self.total_bytes += self._data

    def _header(self, metadata: Mapping[str, str | Iterable[bytes]]) -> Iterator[bytes]:
        yield b'{"__metadata__":{'
        for number, (name, value) in enumerate(metadata.items()):
            yield b"," * (number > 0) + json.dumps(name).encode() + b":"
            if isinstance(value, str):
                yield json.dumps(value).encode()
            else:
                yield b'"'
                yield from value
                yield b'"'
        yield b"}"
        for name, tensor in self._tensors.items():
            span = [self._begins[name], self._begins[name] + tensor.nbytes]
            entry = {"dtype": _NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": span}
            yield b"," + json.dumps(name).encode() + b":" + json.dumps(entry, separators=(",", ":")).encode()
        yield b"}"

    def write(self, name: str, values: torch.Tensor, *index: int) -> None:
        """Write consecutive elements of a tensor.

        Args:
            name: the tensor's.
            values: on the CPU, of its dtype; how many there are decides how far they reach.
            index: where they begin, from the tensor's first axis on; axes that are not given begin at 0.

        Raises:
            DumpError: the disk is full, or fails.
        """
        tensor = self._tensors[name]
        strides = [math.prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape))]
        first = sum(position * stride for position, stride in zip(index, strides, strict=False))
        if values.dtype != tensor.dtype or first + values.numel() > math.prod(tensor.shape):
            raise ValueError(f"{values.dtype} {tuple(values.shape)} at {index} of {tensor}")
        piece = values.contiguous().flatten().view(torch.uint8)
        self._put(self._data + self._begins[name] + first * tensor.dtype.itemsize, piece.numpy())

    def finish(self) -> None:
        """Wait until all of it is on the disk.

        Raises:
            DumpError: the disk is full, or fails.
        """
        assert self._descriptor is not None
        with self._explained():
            os.ftruncate(self._descriptor, self.total_bytes)
            os.fsync(self._descriptor)

    def commit(self) -> None:
        """Give the finished file its name.

        Raises:
            DumpError: meanwhile another file has it.
        """
        self._close()
        self._refuse_existing()
        with self._explained():
            os.replace(self._partial, self.file)
            self._committed = True
            folder = os.open(self.file.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def discard(self) -> None:
        """Remove what was written; of a file that has its name already, nothing."""
        self._close()
        with contextlib.suppress(OSError):
            os.unlink(self._partial)

    def withdraw(self) -> None:
        """Remove what was written, also from under its name."""
        if self._committed:
            os.unlink(self.file)
        self.discard()

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.discard()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _put(self, offset: int, data: object) -> None:
        assert self._descriptor is not None
        rest = memoryview(data).cast("B")  # type: ignore[arg-type]
        with self._explained():
            while rest:
                written = os.pwrite(self._descriptor, rest, offset)
                rest, offset = rest[written:], offset + written

    def _refuse_existing(self) -> None:
        if os.path.lexists(self.file):
            raise DumpError(f"{self.file} exists; no dump replaces a file: choose another name, or remove it")

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _FULL:
                free = shutil.disk_usage(self.file.parent).free
                raise DumpError(
                    f"{self.file.parent} is full: {self.file.name} needs {_size(self.total_bytes)}, and "
                    f"{_size(free)} more are free"
                ) from error
            raise DumpError(f"cannot write {self.file}: {error.strerror}") from error


def require_room(folder: Path, needed: int) -> None:
    """Check that a folder's file system has room.

    Args:
        folder: exists.
        needed: bytes.

    Raises:
        DumpError: it has not; or its room cannot be told.
    """
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise DumpError(f"cannot write to {folder}: {error.strerror}") from error
    if free < needed:
        raise DumpError(f"{folder} is too full: the dump needs {_size(needed)}, and {_size(free)} are free")


def _size(count: int) -> str:
    return f"{count:,} bytes ({count / 1e9:.2f} GB)"


def dump_tensors(shape: ArenaShape, pages: int, exponents: KeyExponents | None = None) -> list[TensorSpec]:
    """What a dump of so many pages of an arena, encoded with such exponents, holds.

    Raises:
        DumpError: safetensors has no name for a section's element type.
    """
    sections = [
        TensorSpec(tensor_name(part, name), layout[name].dtype, (shape.layers, pages, *layout[name].shape))
        for part, layout in shape.layouts.items()
        for name in dumped_sections(layout)
    ]
    if exponents is None or not exponents.any:
        return sections
    return [TensorSpec(EXPONENTS, exponents.values.dtype, exponents.values.shape), *sections]


def write_pages(
    writer: SafetensorsWriter, arena: HostArena, metadata: Metadata, progress: Callable[[int], None],
    exponents: KeyExponents | None = None,
) -> None:  # fmt: skip
    """Copy pages from an arena to a file of `dump_tensors`, and wait until they are on the disk.

    Args:
        writer: not begun yet.
        arena: nobody writes to these pages meanwhile.
        metadata: names the pages.
        progress: told how many pages are written, every now and then.
        exponents: as for `dump_tensors`.

    Raises:
        DumpError: the disk is full, or fails.
    """
    shape, ids = arena.shape, metadata.page_ids
    writer.begin({**metadata.without_page_ids(), PAGE_IDS: ranges_in_pieces(ids)})
    if exponents is not None and exponents.any:
        writer.write(EXPONENTS, exponents.values)
    page_bytes = shape.layers * max(layout.block_bytes for layout in shape.layouts.values())
    step = max(1, CHUNK_BYTES // page_bytes)
    for first in range(0, len(ids), step):
        chosen = ids[first : first + step]
        for part, layout in shape.layouts.items():
            # Pages first: in a `page_first` arena one page is then one copy.
            blocks = arena.blocks(part).transpose(0, 1)[chosen].transpose(0, 1)
            for name in dumped_sections(layout):
                for layer, values in enumerate(layout.view(blocks, name)):
                    writer.write(tensor_name(part, name), values, layer, first)
        progress(first + len(chosen))
    writer.finish()


def dump_arena(arena: HostArena, metadata: Metadata, file: Path, exponents: KeyExponents | None = None) -> None:
    """Write a dump of `metadata.page_ids` from first to last.

    Raises:
        DumpError: there are no such pages, or as `SafetensorsWriter` and `write_pages`.
    """
    if not len(metadata.page_ids):
        raise DumpError("there is no page to dump")
    if (last := int(metadata.page_ids[-1])) >= arena.shape.pages:
        raise DumpError(f"there is no page {last}; the pool's are 0 to {arena.shape.pages - 1}")
    with SafetensorsWriter(file, dump_tensors(arena.shape, len(metadata.page_ids), exponents)) as writer:
        write_pages(writer, arena, metadata, lambda pages: None, exponents)
        writer.commit()
