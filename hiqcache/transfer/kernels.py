"""The GPU kernels of `CudaTransfer`. They address rows and blocks; a representation's tile functions do the rest.

Staging holds the cells of one chunk, K and V side by side, as `[page][layer]`. Importing this needs Triton.
"""
# Triton's own annotations do not describe code inside a kernel.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

WORD_BYTES = 8
LINE_BYTES = 128
"""What the mover kernel reads or writes at once; blocks are whole lines."""
LINE_WORDS = tl.constexpr(LINE_BYTES // WORD_BYTES)
LARGEST_BF16 = tl.constexpr(3.3895313892515355e38)

# A transfer's size must never pick another compiled variant: all are built, and warmed, before the first request.
_SIZES = ["pages", "layers", "first_layer"]
_SHAPE = ["pages", "segments", "segment_lines", "page_stride", "segment_stride"]


@triton.jit
def _rows(slots, staging, pages, layers, PAGE_SIZE: tl.constexpr, CELL_BYTES: tl.constexpr, PART_OFFSET: tl.constexpr,
          BLOCK_BYTES: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """What one program works on: `ROWS` neighbouring (token, head) pairs of one layer of one part.

    Returns:
        `[ROWS]` each: the device row (slot x heads + head), the block's address, the token's place in its page, the
        head, and whether the pair exists.
    """
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = pair < pages * (PAGE_SIZE * HEADS)
    token = pair // HEADS
    head = pair % HEADS
    slot = tl.load(slots + token, mask=live, other=0)
    cell = (token // PAGE_SIZE).to(tl.int64) * layers + tl.program_id(1)
    block = staging + cell * CELL_BYTES + (PART_OFFSET + tl.program_id(2) * BLOCK_BYTES)
    return slot * HEADS + head, block, token % PAGE_SIZE, head, live


@triton.jit
def _values(table, first_layer, row, live, table_layers, DIM: tl.constexpr, DIM_TILE: tl.constexpr):
    """Addresses `[ROWS, DIM_TILE]` of device values, and their mask."""
    address = tl.load(table + tl.program_id(2) * table_layers + first_layer + tl.program_id(1))
    base = tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16)), 16)
    column = tl.arange(0, DIM_TILE)
    return base + row[:, None] * DIM + column[None, :], live[:, None] & (column < DIM)[None, :]


@triton.jit
def _exponents(table, first_layer, head, live, table_layers, HEADS: tl.constexpr, DIM: tl.constexpr,
               DIM_TILE: tl.constexpr):  # fmt: skip
    """Exponents `[ROWS, DIM_TILE]` int32 of the channels of each pair."""
    layer = tl.program_id(2) * table_layers + first_layer + tl.program_id(1)
    column = tl.arange(0, DIM_TILE)
    address = table + ((layer * HEADS + head) * DIM)[:, None] + column[None, :]
    return tl.load(address, mask=live[:, None] & (column < DIM)[None, :], other=0).to(tl.int32)


@triton.jit
def _scaled(values, exponents):
    """BF16 values times powers of two, rounded half to even, saturated; NaN and infinity stay as they are."""
    bits = values.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    x = values.to(tl.float32) * ((exponents + 127) << 23).to(tl.float32, bitcast=True)
    x = tl.minimum(tl.maximum(x, -LARGEST_BF16), LARGEST_BF16).to(tl.int32, bitcast=True)
    rounded = ((x + 0x7FFF + ((x >> 16) & 1)) >> 16) & 0xFFFF
    return tl.where((bits & 0x7F80) == 0x7F80, bits, rounded).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _section(block, token, head, live, SECTION: tl.constexpr):
    """Addresses and mask of a section's tile: `[ROWS]` if it holds one element for each head, else `[ROWS, n]`."""
    DTYPE: tl.constexpr = SECTION[0]
    WIDTH: tl.constexpr = SECTION[4]
    start = block + (SECTION[1] + token * SECTION[2] + head * SECTION[3])
    if WIDTH == 0:
        return start.to(tl.pointer_type(DTYPE)), live
    else:  # noqa: RET505 (a branch at compile time)
        column = tl.arange(0, SECTION[5])
        address = start.to(tl.pointer_type(DTYPE))[:, None] + column[None, :]
        return address, live[:, None] & (column < WIDTH)[None, :]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=["slots"])
def encode_blocks(
    table, exponents, slots, staging, pages, layers, first_layer, table_layers,
    ENCODE: tl.constexpr, SECTIONS: tl.constexpr, PADDING: tl.constexpr,
    PAGE_SIZE: tl.constexpr, CELL_BYTES: tl.constexpr, PART_OFFSET: tl.constexpr, BLOCK_BYTES: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_TILE: tl.constexpr, ROWS: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Device rows to blocks in staging; grid `(cdiv(pages * PAGE_SIZE * HEADS, ROWS), layers, parts)`.

    Args:
        table: `[parts, table_layers]` int64 addresses of the device rows.
        exponents: `[parts, table_layers, HEADS, DIM]` int8, by whose powers of two values are divided; read if SCALED.
        slots: `[pages * PAGE_SIZE]` int64.
        staging: uint8.
        ENCODE: `[ROWS, DIM_TILE]` values and DIM -> a tile for each of SECTIONS.
        SECTIONS: for each, (dtype, offset, bytes between tokens, between heads, width or 0, tile width).
        PADDING: sections to zero, described likewise; they belong to a token's first head.
        CELL_BYTES: of a page in one layer, K and V.
        PART_OFFSET: of the first part's block in a cell; that of another follows BLOCK_BYTES later.
    """
    row, block, token, head, live = _rows(
        slots, staging, pages, layers, PAGE_SIZE, CELL_BYTES, PART_OFFSET, BLOCK_BYTES, HEADS, ROWS
    )
    address, mask = _values(table, first_layer, row, live, table_layers, DIM, DIM_TILE)
    values = tl.load(address, mask=mask, other=0.0)
    if SCALED:
        values = _scaled(values, -_exponents(exponents, first_layer, head, live, table_layers, HEADS, DIM, DIM_TILE))
    tiles = ENCODE(values, DIM)
    for i in tl.static_range(len(SECTIONS)):
        address, mask = _section(block, token, head, live, tl.constexpr(SECTIONS[i]))
        tl.store(address, tiles[i], mask=mask)
    for i in tl.static_range(len(PADDING)):
        address, mask = _section(block, token, head, live & (head == 0), tl.constexpr(PADDING[i]))
        tl.store(address, 0, mask=mask)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=["slots"])
def decode_blocks(
    table, exponents, slots, staging, pages, layers, first_layer, table_layers,
    DECODE: tl.constexpr, SECTIONS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, CELL_BYTES: tl.constexpr, PART_OFFSET: tl.constexpr, BLOCK_BYTES: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_TILE: tl.constexpr, ROWS: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Blocks in staging to device rows: `encode_blocks` backwards, with the same arguments."""
    row, block, token, head, live = _rows(
        slots, staging, pages, layers, PAGE_SIZE, CELL_BYTES, PART_OFFSET, BLOCK_BYTES, HEADS, ROWS
    )
    tiles = ()
    for i in tl.static_range(len(SECTIONS)):
        address, mask = _section(block, token, head, live, tl.constexpr(SECTIONS[i]))
        tiles = tiles + (tl.load(address, mask=mask, other=0),)  # noqa: RUF005 (Triton knows no other way)
    values = DECODE(*tiles, DIM)
    if SCALED:
        values = _scaled(values, _exponents(exponents, first_layer, head, live, table_layers, HEADS, DIM, DIM_TILE))
    address, mask = _values(table, first_layer, row, live, table_layers, DIM, DIM_TILE)
    tl.store(address, values, mask=mask)


@triton.jit(do_not_specialize=_SHAPE, do_not_specialize_on_alignment=["host_pages"])
def move_blocks(
    host, staging, host_pages, pages, segments, segment_lines, page_stride, segment_stride,
    TO_HOST: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Cells between pinned host memory and staging, unchanged; any grid `(programs,)`.

    A page is `segments` runs of `segment_lines` lines; all strides are in lines.

    Args:
        host: int64 words of pinned memory, from the first segment of page 0.
        staging: int64 words; `[pages][segments][segment_lines]` lines.
        host_pages: `[pages]` int64 numbers of pages in the arena.
    """
    total = pages * segments * segment_lines
    for first in range(tl.program_id(0) * LINES, total, tl.num_programs(0) * LINES):
        line = first + tl.arange(0, LINES)
        live = line < total
        segment = line // segment_lines
        number = tl.load(host_pages + segment // segments, mask=live, other=0)
        place = number * page_stride + (segment % segments).to(tl.int64) * segment_stride + line % segment_lines
        word = tl.arange(0, LINE_WORDS)[None, :]
        far = host + place[:, None] * LINE_WORDS + word
        near = staging + line[:, None] * LINE_WORDS + word
        if TO_HOST:
            tl.store(far, tl.load(near, mask=live[:, None]), mask=live[:, None])
        else:
            tl.store(near, tl.load(far, mask=live[:, None]), mask=live[:, None])
