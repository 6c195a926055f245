"""How a block of KV looks in host memory: the interface that every representation implements.

A *block* is one page, one layer, one part (K or V): values `[page_size, heads, dim]` that become `block_bytes` bytes.
A representation promises:

* `block_layout(part)` names every byte of a block. Everything that needs an offset reads it there: the pool, the
  transfer, the dump, the inspector and the kernels.
* `encode` writes *every* byte of the blocks it is given, and the same values give the same bytes on every device.
* `decode` reads blocks alone, so a block can be moved, dumped or compared without its neighbours.
* `encode(decode(b)) == b` for every block `b` that `encode` wrote: write-back may evict what was itself restored, and
  a second trip must not cost a second error.
* Construction on a geometry that it cannot hold raises `UnsupportedGeometry` with every rule broken.

It never sees an address, a stream or the arrangement of the arena.
"""

import abc
import math
from collections.abc import Iterator
from typing import ClassVar

import torch
from attrs import field, frozen

from hiqcache.geometry import HiqcacheError, KVGeometry, Part, UnsupportedGeometry, Violation


@frozen
class Section:
    """A named array inside a block.

    Attributes:
        name: `payload`, `scales`, `padding`, or what the representation calls it.
        dtype: element type.
        shape: axes of the array in one block, the page's tokens first.
        offset: byte of the block at which element (0, 0, ...) starts.
        strides: bytes between neighbours along each axis.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]

    def byte_offsets(self) -> torch.Tensor:
        """Offset in the block of every byte of this section, `[bytes]` int64."""
        offsets = torch.arange(self.dtype.itemsize)
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            offsets = (torch.arange(size)[:, None] * stride + offsets).flatten()
        return offsets + self.offset


LARGEST_BLOCK = 64 << 20
"""Bytes: far more than a real model's, and little enough to be checked byte by byte."""


def padded_bytes(used: int, tokens: int, align: int) -> int:
    """Bytes of a block that needs `used` of them: a multiple of `align` that divides evenly among its tokens."""
    step = math.lcm(align, tokens)
    return -(-used // step) * step


PAGE_SIZES = [2**power for power in range(11)]
"""Looked through for one that a refused geometry could have; the larger, the less padding a token has."""


def without_gain(geometry: KVGeometry, dim: int, pair_bytes: int, align: int) -> Iterator[Violation]:
    """The rule that a token takes fewer bytes than in BF16, if the padding of `BlockLayout.arrays` breaks it.

    Args:
        geometry: asked for.
        dim: values of a head.
        pair_bytes: bytes of one token and head, before padding.
        align: as for `BlockLayout.arrays`.
    """
    heads, size = geometry.heads, geometry.page_size

    def taken(tokens: int) -> int:
        return padded_bytes(tokens * heads * pair_bytes, tokens, align) // tokens

    bf16 = 2 * heads * dim
    if taken(size) >= bf16:
        would_do = next((tokens for tokens in PAGE_SIZES if taken(tokens) < bf16), None)
        large = max(64, would_do or 0)
        yield Violation(
            rule="bytes of one token in one layer of K or V",
            seen=f"{taken(size)} ({heads} local KV heads x {dim} at TP={geometry.tp_size}, page size {size}, padded)",
            allowed=f"fewer than BF16's {bf16}",
            flag=f"--page-size ({would_do} or a larger power of two; {large} would take {taken(large)})"
            if would_do
            else "the model (its heads are too narrow for a scale each)",
        )


@frozen
class BlockLayout:
    """The sections of a block; together they cover each of its bytes exactly once.

    Raises:
        HiqcacheError: the block is larger than `LARGEST_BLOCK`.
        ValueError: sections overlap, leave a byte unnamed, share a name or cannot be viewed as their dtype.
    """

    block_bytes: int
    sections: tuple[Section, ...] = field(converter=tuple)

    def __attrs_post_init__(self) -> None:
        if self.block_bytes > LARGEST_BLOCK:
            raise HiqcacheError(
                f"a block of {self.block_bytes:,} bytes (one page, layer and part); allowed: {LARGEST_BLOCK:,}; "
                "changed by --page-size"
            )
        if len({section.name for section in self.sections}) != len(self.sections):
            raise ValueError(f"section names repeat: {[section.name for section in self.sections]}")
        for section in self.sections:
            steps = (section.offset, *section.strides, self.block_bytes)
            if any(step % section.dtype.itemsize for step in steps):
                raise ValueError(f"section {section.name!r}: {steps} bytes are not whole {section.dtype} elements")
        # A counter a byte and no list of offsets: a block can be large.
        counts = torch.zeros(self.block_bytes, dtype=torch.uint8)
        for section in self.sections:
            steps = [(size, stride) for size, stride in zip(section.shape, section.strides, strict=True) if size > 1]
            if any(stride <= 0 for _, stride in steps):
                raise ValueError(f"section {section.name!r} has strides {section.strides}; allowed: positive ones")
            end = section.offset + sum((size - 1) * stride for size, stride in steps) + section.dtype.itemsize
            if section.offset < 0 or end > self.block_bytes:
                raise ValueError(f"a section reaches outside the block's {self.block_bytes} bytes")
            counts.as_strided((*section.shape, section.dtype.itemsize), (*section.strides, 1), section.offset).add_(1)
        if not bool((counts == 1).all()):
            byte = int((counts != 1).nonzero()[0])
            raise ValueError(f"byte {byte} of the block belongs to {int(counts[byte])} sections instead of one")
        # Adding to elements that overlap within a section may count a byte once.
        named = sum(math.prod(section.shape) * section.dtype.itemsize for section in self.sections)
        if named != self.block_bytes:
            raise ValueError(f"the sections have {named} bytes, some of them shared; the block has {self.block_bytes}")

    @classmethod
    def records(cls, tokens: int, align: int = 1, /, **sections: tuple[torch.dtype, tuple[int, ...]]) -> "BlockLayout":
        """A block of `tokens` equal records, each holding `sections` one after the other.

        Args:
            tokens: records in the block (the page size).
            align: a record is padded with a `padding` section to a multiple of this many bytes.
            sections: name -> (dtype, shape for one token).
        """
        used = sum(dtype.itemsize * math.prod(shape) for dtype, shape in sections.values())
        record_bytes = -(-used // align) * align
        if record_bytes > used:
            sections["padding"] = (torch.uint8, (record_bytes - used,))
        offset, placed = 0, []
        for name, (dtype, shape) in sections.items():
            inner = [dtype.itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
            placed.append(Section(name, dtype, (tokens, *shape), offset, (record_bytes, *inner)))
            offset += dtype.itemsize * math.prod(shape)
        return cls(tokens * record_bytes, placed)

    @classmethod
    def arrays(cls, tokens: int, align: int = 1, /, **sections: tuple[torch.dtype, tuple[int, ...]]) -> "BlockLayout":
        """A block that holds each of `sections` of all its tokens as one array, one array after the other.

        The block is padded with a `padding` section, once and not for each token, to `padded_bytes`.

        Args:
            tokens: tokens in the block (the page size).
            align: the block's bytes are a multiple of this.
            sections: name -> (dtype, shape for one token).
        """
        offset, placed = 0, []

        def place(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
            nonlocal offset
            strides = [dtype.itemsize * math.prod(shape[axis:]) for axis in range(len(shape) + 1)]
            placed.append(Section(name, dtype, (tokens, *shape), offset, tuple(strides)))
            offset += tokens * strides[0]

        for name, (dtype, shape) in sections.items():
            place(name, dtype, shape)
        if padding := padded_bytes(offset, tokens, align) - offset:
            place("padding", torch.uint8, (padding // tokens,))
        return cls(offset, placed)

    def clear_padding(self, blocks: torch.Tensor) -> None:
        """Zero the `padding` section of `[..., block_bytes]` blocks, if there is one."""
        if "padding" in self:
            self.view(blocks, "padding").zero_()

    def __getitem__(self, name: str) -> Section:
        for section in self.sections:
            if section.name == name:
                return section
        raise KeyError(f"no section {name!r}; there are {[section.name for section in self.sections]}")

    def __contains__(self, name: str) -> bool:
        return any(section.name == name for section in self.sections)

    def view(self, blocks: torch.Tensor, name: str) -> torch.Tensor:
        """Section `name` of many blocks, without a copy.

        Args:
            blocks: `[..., block_bytes]` uint8; the last axis is contiguous, the others may have any stride.
            name: a section's name.

        Returns:
            `[..., *section.shape]` of the section's dtype, sharing memory with `blocks`.
        """
        section = self[name]
        typed = blocks.view(section.dtype)
        size = section.dtype.itemsize
        return typed.as_strided(
            (*typed.shape[:-1], *section.shape),
            (*typed.stride()[:-1], *(stride // size for stride in section.strides)),
            typed.storage_offset() + section.offset // size,
        )


@frozen
class Tiles:
    """What a representation gives the GPU kernels: two `@triton.jit` functions that see values and sections only.

    A tile is `rows` (token, head) pairs. The kernels find the addresses in the block layout, load and store; a section
    named `padding` is zeroed by them. Bytes and values must equal those of `encode` and `decode`.

    Attributes:
        encode: values `[rows, dim]` of the device's dtype, and `DIM: tl.constexpr`, dim before it was rounded up -> a
            tuple with one tile for each of `sections`.
        decode: those tiles, in that order, and `DIM` -> values `[rows, dim]`.
        sections: names of sections shaped `(page_size, heads)`, whose tiles are `[rows]`, or `(page_size, heads, n)`,
            whose tiles are `[rows, n]`. `dim` and `n` are rounded up to powers of two: what is beyond them reads as
            zero and is not stored.
    """

    encode: object
    decode: object
    sections: tuple[str, ...]


class HostRepresentation(abc.ABC):
    """One way to store KV blocks in host memory, bound to one geometry.

    Subclasses set `name`, `format_tag` and `summary`, implement the three abstract methods, and add what they cannot
    hold to `requirements`. `backends/bf16.py` is the shortest complete one.

    Raises:
        UnsupportedGeometry: `geometry` breaks at least one of `requirements(geometry)`.
    """

    name: ClassVar[str]
    """What `--hicache-representation` takes."""
    format_tag: ClassVar[str]
    """Names the byte format; changes whenever the same values would give other bytes."""
    older_tags: ClassVar[tuple[str, ...]] = ()
    """Tags of earlier formats whose sections have the names, shapes and meaning of today's: their dumps can be read."""
    summary: ClassVar[str]
    """One line for `hiqcache list`."""
    scales_keys: ClassVar[bool] = True
    """Whether channels of K that a bias raises are divided by powers of two before `encode` sees them, and multiplied
    after `decode` (`hiqcache/key_biases.py`). False for a format in which a large channel costs the others nothing."""

    def __init__(self, geometry: KVGeometry):
        violations = list(self.requirements(geometry))
        if violations:
            raise UnsupportedGeometry(self.name, violations)
        self.geometry = geometry
        self.layouts = {part: self.block_layout(part) for part in Part}
        """The layouts, declared once and checked; `encode` and `decode` read these."""

    @classmethod
    def requirements(cls, geometry: KVGeometry) -> Iterator[Violation]:
        """Every rule that `geometry` breaks. Subclasses yield from this one first."""
        if geometry.dtype != torch.bfloat16:
            yield Violation(
                rule="element type of the device KV cache",
                seen=str(geometry.dtype).removeprefix("torch."),
                allowed="bfloat16",
                flag="--kv-cache-dtype bf16 (and --dtype bfloat16)",
            )
        if geometry.head_dim != geometry.v_head_dim:
            yield Violation(
                rule="width of K and V heads",
                seen=f"{geometry.head_dim} and {geometry.v_head_dim}",
                allowed="the same width",
                flag="the model (its head_dim and v_head_dim)",
            )

    @abc.abstractmethod
    def block_layout(self, part: Part) -> BlockLayout:
        """The bytes of one block of `part`."""

    @abc.abstractmethod
    def encode(self, values: torch.Tensor, part: Part, out: torch.Tensor) -> None:
        """Encode blocks.

        Args:
            values: `[blocks, page_size, heads, dim]` of the geometry's dtype.
            part: K or V.
            out: `[blocks, block_bytes]` uint8 on the same device; every byte is written.
        """

    @abc.abstractmethod
    def decode(self, blocks: torch.Tensor, part: Part, out: torch.Tensor) -> None:
        """Decode blocks.

        Args:
            blocks: `[blocks, block_bytes]` uint8 that `encode` wrote.
            part: K or V.
            out: `[blocks, page_size, heads, dim]` of the geometry's dtype on the same device; fully overwritten.
        """

    def tiles(self, part: Part) -> Tiles | None:
        """Tile functions for blocks of `part`; None leaves them to the plain-PyTorch transfer.

        Only called where Triton can be imported.
        """
        return None

    def error_bound(self, values: torch.Tensor, decoded: torch.Tensor, part: Part) -> torch.Tensor | None:
        """Largest |decoded - values| that a correct codec may show, elementwise, in float64; None if unstated.

        Args:
            values: `[..., heads, dim]` finite values, as given to `encode`.
            decoded: the same shape, as `decode` returned them.
            part: K or V.
        """
        return None

    def bytes_per_token(self) -> int:
        """Host bytes of one token, all layers, K and V, padding included.

        Raises:
            HiqcacheError: a page's bytes do not divide evenly among its tokens, so SGLang could not size a pool.
        """
        per_page = self.geometry.layers * sum(layout.block_bytes for layout in self.layouts.values())
        if per_page % self.geometry.page_size:
            raise HiqcacheError(f"{self.name}: {per_page} bytes a page are not a whole number for each token")
        return per_page // self.geometry.page_size
