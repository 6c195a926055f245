"""Dumps of pools whose K channels were divided: the exponents travel with the pages, and nothing else is believed."""

import pathlib

import pytest
import torch
import transfers
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from test_inspect import GEOMETRY, PAGES, dumped, metadata, normal_rows

from hiqcache.__main__ import main
from hiqcache.arena import HostArena
from hiqcache.backends.bf16 import Bf16
from hiqcache.backends.int8 import Int8
from hiqcache.exponents import KeyExponents
from hiqcache.geometry import Part
from hiqcache.inspect.compare import compare
from hiqcache.inspect.format import DumpError
from hiqcache.inspect.reader import Dump
from hiqcache.inspect.writer import dump_arena

SHAPE = (GEOMETRY.layers, GEOMETRY.heads, GEOMETRY.head_dim)


def powers() -> KeyExponents:
    return transfers.random_exponents(GEOMETRY, torch.Generator().manual_seed(5))


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    of, rows = Int8(GEOMETRY), normal_rows(GEOMETRY, PAGES * GEOMETRY.page_size)
    empty = transfers.random_arena(of, PAGES, "page_first", torch.Generator().manual_seed(1))
    slots = torch.arange(PAGES * GEOMETRY.page_size)
    arena = HostArena(empty.shape, transfers.after_backup(of, empty, rows, slots, slots, powers()))
    dump_arena(arena, metadata(of), tmp_path / "dump", powers())
    return tmp_path / "dump"


def test_values_are_multiplied_back(file: pathlib.Path):
    rows = normal_rows(GEOMETRY, PAGES * GEOMETRY.page_size)
    with Dump(file) as dump:
        assert torch.equal(dump.key_exponents.values, powers().values)
        representation, ids = dump.representation(), dump.metadata.page_ids
        for part in Part:
            found = dump.decode(representation, part, 1, slice(None))
            exact = rows.of(part)[1].view(PAGES, GEOMETRY.page_size, *found.shape[2:])[ids]
            factors = 2.0 ** powers().values[1].double() if part is Part.K else torch.ones(SHAPE[1:]).double()
            # Half a step of the head's scale, which is of the divided values, times the channel's own power.
            scale = (exact.double() / factors).abs().amax(-1, keepdim=True) / 127
            assert bool(((found.double() - exact.double()).abs() <= 0.52 * scale * factors + 2**-8 * exact.abs()).all())


def test_the_bound_is_that_of_the_divided_values(file: pathlib.Path, tmp_path: pathlib.Path):
    exact = dumped(tmp_path / "exact", Bf16(GEOMETRY), normal_rows(GEOMETRY, PAGES * GEOMETRY.page_size))
    with Dump(file) as dump, Dump(exact) as reference:
        k, v = compare(dump, reference)
    for each in (k, v):
        assert each.beyond_bound is not None
        assert not each.beyond_bound.any()
    # A step of a channel that is divided by 2**e is 2**e as wide, and its bits are fewer by e.
    divided = (powers().values > 0) & (powers().values <= 4)  # not so far that nothing is left of them
    lost = k.channel_bits[powers().values == 0].mean() - (k.channel_bits + powers().values)[divided].mean()
    assert abs(float(lost)) < 0.5


def test_the_command_says_so(file: pathlib.Path):
    count = int(powers().values.count_nonzero())
    result = CliRunner().invoke(main, ["inspect", str(file)])
    assert f"{count:,} of {powers().values.numel():,} channels of K were divided by powers of two" in result.output
    assert powers().digest in CliRunner().invoke(main, ["inspect", str(file), "--json"]).output


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(SHAPE, dtype=torch.int16), "'key_exponents' is torch.int16"),
        (torch.zeros((1, *SHAPE[1:]), dtype=torch.int8), "'key_exponents' is torch.int8 .1, "),
        (torch.full(SHAPE, -3, dtype=torch.int8), "needed: .layers, heads, dim. from 0 to 24"),
        (torch.full(SHAPE, 25, dtype=torch.int8), "needed: .layers, heads, dim. from 0 to 24"),
    ],
)
def test_exponents_that_make_no_sense_are_a_sentence(file: pathlib.Path, tensor: torch.Tensor, message: str):
    with Dump(file) as dump:
        text = dump.metadata.to_text()
    save_file({**load_file(file), "key_exponents": tensor}, file, text)
    with pytest.raises(DumpError, match=message):
        Dump(file)
