"""A dump that an earlier format wrote can still be read: tests/dumps/int8-head-v1.safetensors, by the code of 0.1.0."""

import pathlib

import pytest
import torch

from hiqcache.geometry import Part
from hiqcache.inspect.format import DumpError
from hiqcache.inspect.reader import Dump

FILE = pathlib.Path(__file__).parent / "dumps" / "int8-head-v1.safetensors"


def backed_up(part: Part) -> torch.Tensor:
    """The values that it was made of, `[layers, pages, page_size, heads, dim]`: whole numbers, so exact in int8."""
    numbers = torch.arange(2 * 3 * 4 * 3 * 64).view(2, 3, 4, 3, 64) * (37 if part is Part.K else 39)
    values = numbers % 255 - 127
    values[..., 0] = 127
    return values.bfloat16()


@pytest.mark.parametrize("part", list(Part))
def test_a_dump_of_int8_head_v1_is_decoded(part):
    with Dump(FILE) as dump:
        assert dump.metadata.format_tag == "int8-head-v1"
        representation = dump.representation()
        for layer in range(2):
            values = dump.decode(representation, part, layer, slice(0, 2))
            assert torch.equal(values, backed_up(part)[layer, [0, 2]])  # the pages that it names


def test_a_tag_that_nobody_wrote_is_refused_with_those_that_can_be_read(tmp_path):
    raw = FILE.read_bytes().replace(b"int8-head-v1", b"int8-head-v0")
    (tmp_path / "file").write_bytes(raw)
    with (
        Dump(tmp_path / "file") as dump,
        pytest.raises(DumpError, match=r"'int8-head-v0'.*reads 'int8-head-v2', 'int8-head-v1'"),
    ):
        dump.representation()
