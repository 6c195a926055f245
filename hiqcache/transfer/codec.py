"""Encoding device rows into staging and decoding staging into device rows, by a representation's tile functions."""

import torch
import triton
import triton.language as tl

from hiqcache.arena import ArenaShape
from hiqcache.exponents import KeyExponents
from hiqcache.geometry import Part
from hiqcache.representation import BlockLayout, HostRepresentation
from hiqcache.transfer.base import DeviceRows
from hiqcache.transfer.kernels import decode_blocks, encode_blocks
from hiqcache.transfer.launch import Launcher

ROWS = 32
"""(Token, head) pairs that one program encodes or decodes."""


class BlockCodec:
    """Launches both kernels over many pages and layers at once.

    Staging is `[page][layer]` of cells. K and V share a launch where they are stored alike.

    Args:
        representation: has tile functions for both parts.
        shape: of the arena, whose cells staging has too.
        rows: the device pool.

    Raises:
        ValueError: a section has a shape that `Tiles` does not allow.
    """

    def __init__(self, representation: HostRepresentation, shape: ArenaShape, rows: DeviceRows):
        same_layout = representation.layouts[Part.K] == representation.layouts[Part.V]
        alike = same_layout and representation.tiles(Part.K) == representation.tiles(Part.V)
        launches = ((Part.K, Part.V),) if alike else ((Part.K,), (Part.V,))
        self._launches = [_Launch(representation, shape, rows, parts) for parts in launches]

    def scale_keys(self, exponents: KeyExponents) -> None:
        """From now on, divide K's channels before they are encoded, and multiply them after decoding."""
        for launch in self._launches:
            launch.scale_keys(exponents)

    def encode(
        self, slots: torch.Tensor, layers: range, staging: torch.Tensor, stream: torch.cuda.Stream | None
    ) -> None:
        """Enqueue rows to blocks.

        Args:
            slots: `[pages, page_size]` int64 on the device.
            layers: neighbouring layers.
            staging: uint8 on the device, as large as the blocks or larger.
            stream: to enqueue on; None: the current one, once, to compile.
        """
        for launch in self._launches:
            launch(launch.encode, slots, layers, staging, stream)

    def decode(
        self, slots: torch.Tensor, layers: range, staging: torch.Tensor, stream: torch.cuda.Stream | None
    ) -> None:
        """Enqueue blocks to rows, the arguments as for `encode`."""
        for launch in self._launches:
            launch(launch.decode, slots, layers, staging, stream)


class _Launch:
    """Both kernels for parts that are stored alike."""

    def __init__(
        self, representation: HostRepresentation, shape: ArenaShape, rows: DeviceRows, parts: tuple[Part, ...]
    ):
        geometry, layout = representation.geometry, representation.layouts[parts[0]]
        tiles = representation.tiles(parts[0])
        assert tiles is not None
        self._parts, self._heads = len(parts), geometry.heads
        self._table = torch.tensor(
            [[layer.data_ptr() for layer in rows.of(part)] for part in parts], device=rows.device
        )
        self._exponents = self._table  # of no layer, and not read
        sections = tuple(_described(layout, name, heads=True) for name in tiles.sections)
        padding = (_described(layout, "padding", heads=False),) if "padding" in layout else ()
        constants = {
            "PAGE_SIZE": geometry.page_size,
            "CELL_BYTES": shape.cell_bytes,
            "PART_OFFSET": shape.part_offset(parts[0]),
            "BLOCK_BYTES": layout.block_bytes,
            "HEADS": geometry.heads,
            "DIM": geometry.dim(parts[0]),
            "DIM_TILE": triton.next_power_of_2(geometry.dim(parts[0])),
            "ROWS": ROWS,
            "SCALED": False,
        }
        self.encode = Launcher(encode_blocks, 4, ENCODE=tiles.encode, SECTIONS=sections, PADDING=padding, **constants)
        self.decode = Launcher(decode_blocks, 4, DECODE=tiles.decode, SECTIONS=sections, **constants)
        self._first_part = parts[0]

    def scale_keys(self, exponents: KeyExponents) -> None:
        """Read exponents from a table: those given for K, zeros for V."""
        if self._first_part is Part.K:
            of_k = exponents.values.to(self._table.device)
            self._exponents = torch.stack([of_k, torch.zeros_like(of_k)][: self._parts])
            self.encode, self.decode = (kernel.changed(SCALED=True) for kernel in (self.encode, self.decode))

    def __call__(
        self,
        kernel: Launcher,
        slots: torch.Tensor,
        layers: range,
        staging: torch.Tensor,
        stream: torch.cuda.Stream | None,
    ) -> None:
        grid = (max(1, -(-slots.numel() * self._heads // ROWS)), len(layers), self._parts)
        kernel(
            grid,
            stream,
            self._table,
            self._exponents,
            slots,
            staging,
            len(slots),
            len(layers),
            layers.start,
            self._table.shape[1],
        )


def _described(layout: BlockLayout, name: str, heads: bool) -> tuple:
    """Section `name` as the kernels read it: (dtype, offset, token stride, head stride, width or 0, tile width).

    Args:
        heads: whether the section's second axis is the heads; else it belongs to the token as a whole.
    """
    section = layout[name]
    token_stride, head_stride, *inner = section.strides if heads else (section.strides[0], 0, *section.strides[1:])
    if inner not in ([], [section.dtype.itemsize]):
        raise ValueError(
            f"section {name!r} has shape {section.shape} and strides {section.strides}; tile functions need (tokens, "
            "heads) or (tokens, heads, n) with contiguous n"
        )
    width = section.shape[-1] if inner else 0
    name_in_torch = str(section.dtype).removeprefix("torch.")
    dtype = getattr(tl, {"float8_e4m3fn": "float8e4nv", "float8_e5m2": "float8e5"}.get(name_in_torch, name_in_torch))
    return dtype, section.offset, token_stride, head_stride, width, triton.next_power_of_2(width)
