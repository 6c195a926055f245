"""What the transfer benchmark makes of its options and samples, without a GPU."""

import json
from pathlib import Path

import bench_transfer
import click
import pytest
from bench_transfer import BASELINE, Place, Sample, Setting, constants, parse_variant, summarise

from hiqcache.transfer import chunks, copy_engine, cuda, movers

REPOSITORY = Path(__file__).parents[1]


def test_places():
    assert Place.parse("1x128:layer_first:64") == Place(1, 128, "layer_first", 64)
    assert [str(Place.parse(text)) for text in bench_transfer.PLACES] == list(bench_transfer.PLACES)
    for text in ("8x128", "8x128:page_first", "8:page_first:64", "8x128:page_head:64"):
        with pytest.raises(click.BadParameter, match="HEADSxDIM:LAYOUT:PAGE_SIZE"):
            Place.parse(text)


def test_variants_change_constants_and_leave_them_as_they_were():
    values = parse_variant("RESTORE_STAGING=8M,FIRST_GROUP=16M,WANTED_RUN=4K,LATER_GROUPS=0.5/0.5,MANY=7")

    def current() -> tuple[object, ...]:
        run = movers.CopyEngineMover.WANTED_RUN
        return cuda.RESTORE_STAGING, chunks.FIRST_GROUP, run, chunks.LATER_GROUPS, copy_engine.MANY

    before = current()
    with constants(values):
        assert current() == (8 << 20, 16 << 20, 4096, (0.5, 0.5), 7)
        assert [len(group) for group in chunks.layer_groups(36, 8_519_680, 1, 100)] == [2, 17, 17]
    assert current() == before


@pytest.mark.parametrize("text", ["SMALL=1", "FIRST_GROUP", "FIRST_GROUP=many", "layer_groups=1"])
def test_variants_of_nothing_are_refused(text):
    with pytest.raises(click.BadParameter, match="CONSTANT=VALUE"):
        parse_variant(text)


def test_ratios_are_of_the_same_repetitions():
    setting = Setting("8x128:page_first:64", "shuffled", 4096)
    times = {BASELINE: [(10.0, 1.0), (20.0, 2.0), (40.0, 4.0)], "int8": [(5.0, 0.5), (5.0, 0.5), (10.0, 4.0)]}
    samples = [Sample(setting, name, "restore", 0.1, last, host) for name, each in times.items() for last, host in each]
    sizes = {("8x128:page_first:64", BASELINE): 147_456, ("8x128:page_first:64", "int8"): 74_880}
    rows = {row.contender: row for row in summarise(samples, sizes, {"restore": 55.0})}
    assert rows[BASELINE].ratio == 1
    assert (rows["int8"].ratio, rows["int8"].ratio_range) == (4, (2, 4))
    assert rows["int8"].host_ratio == 0.5
    assert rows["int8"].gb_per_s == pytest.approx(4096 / 5e-3 * 74_880 / 1e9)


def test_a_codecs_share_of_the_link():
    """40,960 bytes a token, 4,096 tokens: 168 MB, 3.05 ms at 55 GB/s."""
    codec = bench_transfer.Codec("8x128:page_first:64", "int4", "restore", 40_960, 0.61)
    assert codec.share_of_link({"restore": 55.0, "backup": 1.0}) == pytest.approx(0.2, rel=1e-3)


def test_the_page_has_the_files_ratios():
    result = json.loads((REPOSITORY / "docs/results/transfer-h200.json").read_text())
    rows = {
        (row["setting"]["place"], row["setting"]["tokens"], row["direction"], row["contender"]): row
        for row in result["rows"]
    }
    page = (REPOSITORY / "docs/performance.md").read_text()
    names = ("int8", "k6v4", "int4")
    for tokens in (512, 4096, 16384, 32768):
        for direction in ("restore", "backup"):
            found = [rows["8x128:page_first:64", tokens, direction, name] for name in names]
            cells = ["{:.2f} ({:.2f}-{:.2f})".format(row["ratio"], *row["ratio_range"]) for row in found]
            assert f"| {' | '.join(cells)} | " in page, (tokens, direction)
        host = [rows["8x128:page_first:64", tokens, "restore", name]["host_ms"] for name in (BASELINE, *names)]
        columns = [
            line.split("|")[2:6]
            for line in page.splitlines()
            if line.startswith(("| SGLang BF16", "| int8 |", "| k6v4 |", "| int4 |"))
        ]
        column = (512, 4096, 16384, 32768).index(tokens)
        assert [float(cells[column]) for cells in columns[:4]] == [round(each, 2) for each in host]
    for place in bench_transfer.PLACES[1:]:
        for tokens in (512, 4096, 32768):
            both = (rows[place, tokens, way, name]["ratio"] for way in ("restore", "backup") for name in names)
            assert f"| {tokens:,} | {' | '.join(f'{ratio:.2f}' for ratio in both)} |" in page, (place, tokens)
    for codec in result["codecs"]:
        assert 0.05 < codec["share_of_link"] + 0.005 < 0.25
