"""Where bytes lie: sections in a block, blocks in an arena."""

import itertools
import struct

import pytest
import torch

from hiqcache.arena import ArenaShape, HostArena
from hiqcache.backends.bf16 import Bf16
from hiqcache.geometry import HiqcacheError, KVGeometry, Part
from hiqcache.representation import BlockLayout, Section

U8, I8, BF16, F32 = torch.uint8, torch.int8, torch.bfloat16, torch.float32


def test_records_lie_one_after_the_other_padded():
    # One record: 2x3 INT8 at 0, 2 BF16 at 6, padding at 10, next record at 16.
    layout = BlockLayout.records(2, 16, payload=(I8, (2, 3)), scales=(BF16, (2,)))
    assert layout.block_bytes == 32
    assert layout["payload"].byte_offsets().tolist() == [0, 1, 2, 3, 4, 5, 16, 17, 18, 19, 20, 21]
    assert layout["scales"].byte_offsets().tolist() == [6, 7, 8, 9, 22, 23, 24, 25]
    assert layout["padding"].byte_offsets().tolist() == [*range(10, 16), *range(26, 32)]
    assert layout["scales"].shape == (2, 2)


@pytest.mark.parametrize(("used", "record_bytes"), [(127, 128), (128, 128), (129, 256)])
def test_records_are_padded_to_the_alignment_and_no_further(used, record_bytes):
    layout = BlockLayout.records(3, 128, payload=(I8, (used,)))
    assert layout.block_bytes == 3 * record_bytes
    assert ("padding" in layout) == (used != record_bytes)


def test_arrays_lie_one_after_the_other_and_the_block_is_padded_once():
    # 3 tokens: 2x3 INT8 each in 0-17, 2 BF16 each in 18-29, padding to the next multiple of 16 and of 3: 48.
    layout = BlockLayout.arrays(3, 16, payload=(I8, (2, 3)), scales=(BF16, (2,)))
    assert layout.block_bytes == 48
    assert layout["payload"].byte_offsets().tolist() == [*range(18)]
    assert layout["scales"].byte_offsets().tolist() == [*range(18, 30)]
    assert layout["padding"].byte_offsets().tolist() == [*range(30, 48)]
    assert (layout["payload"].shape, layout["payload"].strides) == ((3, 2, 3), (6, 3, 1))
    assert (layout["scales"].shape, layout["scales"].strides) == ((3, 2), (4, 2))
    assert layout["padding"].shape == (3, 6), "each token has its share"


@pytest.mark.parametrize(
    ("tokens", "used", "block_bytes"),
    [(1, 1040, 1152), (2, 1040, 2176), (4, 1040, 4224), (8, 1040, 8320), (64, 1040, 66_560), (64, 130, 8320),
     (3, 128, 384), (3, 129, 768), (48, 8, 384), (256, 1, 256)],
)  # fmt: skip
def test_arrays_are_padded_to_the_alignment_and_to_whole_bytes_a_token(tokens, used, block_bytes):
    layout = BlockLayout.arrays(tokens, 128, payload=(I8, (used,)))
    assert layout.block_bytes == block_bytes
    assert ("padding" in layout) == (block_bytes > tokens * used)


def test_arrays_of_one_token_are_a_record():
    sections = {"payload": (I8, (8, 128)), "scales": (BF16, (8,))}
    array, record = BlockLayout.arrays(1, 128, **sections), BlockLayout.records(1, 128, **sections)
    assert array.block_bytes == record.block_bytes == 1152
    for name in ("payload", "scales", "padding"):
        assert torch.equal(array[name].byte_offsets(), record[name].byte_offsets())


def test_a_view_reads_what_lies_at_its_offsets_and_shares_memory():
    layout = BlockLayout.records(2, 16, payload=(I8, (2, 3)), scales=(BF16, (2,)))
    raw = torch.randint(0, 256, (5, 32), dtype=U8)
    scales, payload = layout.view(raw, "scales"), layout.view(raw, "payload")
    for block, token, head in itertools.product(range(5), range(2), range(2)):
        record = bytes(raw[block].tolist())[16 * token :]
        assert struct.pack("<h", scales.view(torch.int16)[block, token, head].item()) == record[6 + 2 * head :][:2]
        assert struct.pack("<3b", *payload[block, token, head].tolist()) == record[3 * head :][:3]
    scales[3, 1, 0] = 1.0  # BF16 bits 0x3F80
    assert raw[3, 22:24].tolist() == [0x80, 0x3F]


def test_a_view_follows_the_strides_of_its_blocks():
    layout = BlockLayout.records(1, payload=(F32, (2,)))
    store = torch.arange(4 * 6 * 8, dtype=torch.int64).to(U8).view(4, 6, 8)
    blocks = store[1:, ::2]
    assert torch.equal(
        layout.view(blocks, "payload").view(torch.int32), blocks.contiguous().view(torch.int32)[:, :, None]
    )


def test_a_layout_need_not_be_records():
    # All payloads of the page first, then all scales: what a page-packed format would declare.
    layout = BlockLayout(12, [Section("payload", I8, (2, 4), 0, (4, 1)), Section("scales", BF16, (2, 1), 8, (2, 2))])
    raw = torch.arange(12, dtype=U8)[None]
    assert layout.view(raw, "payload").tolist() == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    assert layout.view(raw, "scales").view(torch.int16).flatten().tolist() == [0x0908, 0x0B0A]


@pytest.mark.parametrize(
    ("block_bytes", "sections", "words"),
    [
        (8, [Section("a", U8, (6,), 0, (1,)), Section("b", U8, (4,), 4, (1,))], "byte 4 .* 2 sections"),
        (8, [Section("a", U8, (3,), 0, (1,)), Section("b", U8, (4,), 4, (1,))], "byte 3 .* 0 sections"),
        (8, [Section("a", U8, (9,), 0, (1,))], "outside the block's 8 bytes"),
        (8, [Section("a", U8, (8,), -1, (1,))], "outside the block's 8 bytes"),
        (8, [Section("a", U8, (4,), 0, (1,)), Section("a", U8, (4,), 4, (1,))], "names repeat"),
        (4, [Section("a", U8, (1,), 0, (1,)), Section("b", BF16, (1,), 1, (2,))], "not whole torch.bfloat16"),
        (9, [Section("a", BF16, (4,), 0, (2,)), Section("b", U8, (1,), 8, (1,))], "not whole torch.bfloat16"),
    ],
)
def test_a_layout_that_does_not_cover_its_block_once_is_refused(block_bytes, sections, words):
    with pytest.raises(ValueError, match=words):
        BlockLayout(block_bytes, sections)


def test_an_unknown_section_lists_the_known_ones():
    with pytest.raises(KeyError, match=r"no section 'scale'.*payload"):
        BlockLayout.records(1, payload=(U8, (1,)))["scale"]


def test_bytes_per_token_must_be_whole():
    class Headed(Bf16):
        """One byte a page more than its tokens divide."""

        def block_layout(self, part):
            return BlockLayout(
                self.geometry.page_size * 4 + 1,
                [Section("payload", U8, (self.geometry.page_size, 4), 1, (4, 1)), Section("head", U8, (1,), 0, (1,))],
            )

    geometry = KVGeometry(layers=1, heads=1, head_dim=2, v_head_dim=2, page_size=4)
    with pytest.raises(ValueError, match="34 bytes a page"):
        Headed(geometry).bytes_per_token()


LAYOUTS = {
    Part.K: BlockLayout.records(2, 8, payload=(I8, (4,)), scales=(BF16, (1,))),
    Part.V: BlockLayout.records(2, 4, payload=(I8, (2,)), scales=(BF16, (1,))),
}
LAYERS, PAGES = 3, 5


def addresses(arrangement: str, trailer: int = 0) -> dict[tuple[Part, int, int], int]:
    """Where each block must start, found by laying them down one after the other, K and V of a cell side by side."""
    cells = itertools.product(range(LAYERS), range(PAGES))
    if arrangement == "page_first":
        cells = ((layer, page) for page, layer in itertools.product(range(PAGES), range(LAYERS)))
    found, address = {}, 0
    for layer, page in cells:
        for part in (Part.K, Part.V):
            found[part, layer, page] = address
            address += LAYOUTS[part].block_bytes
        if arrangement == "page_first" and layer == LAYERS - 1:
            address += trailer
    return found


@pytest.mark.parametrize(("arrangement", "trailer"), [("layer_first", 0), ("page_first", 0), ("page_first", 64)])
def test_every_block_has_its_address(arrangement, trailer):
    shape = ArenaShape(LAYOUTS, LAYERS, PAGES, arrangement, trailer)
    assert shape.total_bytes == PAGES * (LAYERS * (16 + 8) + trailer)
    # Away from the start of its storage, as a buffer carved out of a larger allocation is.
    buffer = torch.zeros(shape.total_bytes + 64, dtype=U8)[64:]
    arena = HostArena(shape, buffer)
    for value, ((part, layer, page), start) in enumerate(addresses(arrangement, trailer).items(), 1):
        end = start + LAYOUTS[part].block_bytes
        assert shape.offset(part, layer, page) == start
        assert not buffer[start:end].any()
        arena.blocks(part)[layer, page] = value
        assert (buffer[start:end] == value).all()
        assert int((buffer == value).sum()) == end - start
    assert int((buffer == 0).sum()) == PAGES * trailer


@pytest.mark.parametrize("arrangement", ["layer_first", "page_first"])
def test_sections_of_the_arena_share_its_memory(arrangement):
    arena = HostArena(shape := ArenaShape(LAYOUTS, LAYERS, PAGES, arrangement), torch.zeros(360, dtype=U8))
    start = addresses(arrangement)[Part.V, 2, 4]
    arena.section(Part.V, "scales")[2, 4, 1, 0] = -2.0  # BF16 bits 0xC000, at byte 2 of a record of 4
    assert shape.total_bytes == 360
    assert arena.buffer.nonzero().flatten().tolist() == [start + 4 + 2 + 1]


def test_a_page_is_one_run_and_its_stride_may_be_longer():
    shape = ArenaShape(LAYOUTS, LAYERS, PAGES, "page_first", 64)
    assert (shape.cell_bytes, shape.page_bytes, shape.page_stride) == (24, 72, 136)
    assert [shape.offset(part, 0, 1) for part in Part] == [136, 136 + 16]


@pytest.mark.parametrize(("arrangement", "trailer"), [("layer_first", 64), ("page_first", -64)])
def test_a_trailer_that_has_no_place_is_refused(arrangement, trailer):
    with pytest.raises(ValueError, match=f"trailer of {trailer} bytes in a {arrangement} arena; allowed: 0"):
        ArenaShape(LAYOUTS, LAYERS, PAGES, arrangement, trailer)


@pytest.mark.parametrize(
    ("v", "trailer"), [(BlockLayout.records(1, payload=(I8, (3,))), 0), (BlockLayout.records(1, payload=(I8, (4,))), 1)]
)
def test_blocks_that_would_lie_unaligned_in_the_arena_are_refused(v, trailer):
    layouts = {Part.K: BlockLayout.records(1, payload=(BF16, (2,))), Part.V: v}
    with pytest.raises(HiqcacheError, match=r"K blocks .* not whole torch\.bfloat16 elements of section 'payload'"):
        ArenaShape(layouts, LAYERS, PAGES, "page_first", trailer)


def test_an_unknown_arrangement_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"page_head.*layer_first, page_first"):
        ArenaShape(LAYOUTS, LAYERS, PAGES, "page_head")


@pytest.mark.parametrize(
    "buffer",
    [
        torch.zeros(359, dtype=U8),
        torch.zeros(360, dtype=I8),
        torch.zeros(720, dtype=U8)[::2],
        torch.zeros(2, 180, dtype=U8),
    ],
    ids=["size", "dtype", "strided", "shape"],
)
def test_a_buffer_that_does_not_fit_is_refused(buffer):
    with pytest.raises(ValueError, match=r"needed: contiguous torch\.uint8 \(360,\)"):
        HostArena(ArenaShape(LAYOUTS, LAYERS, PAGES, "page_first"), buffer)


def test_a_block_that_is_absurdly_large_is_refused_before_memory_is_taken():
    with pytest.raises(HiqcacheError, match=r"a block of 4,398,046,511,104 bytes .*allowed: 67,108,864.*--page-size"):
        BlockLayout.arrays(1 << 20, payload=(torch.uint8, (1 << 22,)))
