"""Names of representations, ours and other people's."""

import sys

import pytest
import torch
from distributions import HALF, install

from hiqcache.backends.bf16 import Bf16
from hiqcache.backends.int4 import Int4
from hiqcache.backends.int8 import Int8
from hiqcache.backends.k6v4 import K6V4
from hiqcache.geometry import HiqcacheError, KVGeometry, Part
from hiqcache.registry import DuplicateRepresentation, UnknownRepresentation, get, names, register
from hiqcache.representation import HostRepresentation


def test_our_own():
    assert get("bf16") is Bf16
    assert get("int8") is Int8
    assert names() == sorted(names())
    assert (get("int4"), get("k6v4")) == (Int4, K6V4)
    assert {"bf16", "int4", "int8", "k6v4"} <= set(names())


def test_format_tags_are_part_of_the_format():
    assert (Bf16.format_tag, Int8.format_tag) == ("bf16-v1", "int8-head-v2")
    assert (Int4.format_tag, K6V4.format_tag) == ("int4-rotated-v1", "k6v4-rotated-v1")


def test_an_unknown_name_lists_the_known_ones(site):
    install(site, "elsewhere", {}, {"half": "nowhere:Half"})
    with pytest.raises(UnknownRepresentation, match="'int9'; registered: bf16, half, int4, int8, k6v4"):
        get("int9")


def test_a_third_partys_package_is_found_and_works(site):
    install(site, "half-kv", {"half_kv": HALF}, {"half": "half_kv:Half"})
    assert "half" in names()
    assert "half_kv" not in sys.modules, "names() must import nothing"
    half = get("half")(KVGeometry(layers=5, heads=2, head_dim=4, v_head_dim=4, page_size=2))
    assert get("half") is type(half)
    assert half.bytes_per_token() == 5 * 2 * 8

    values = torch.tensor([1.0, -2.5, 0.0, 3.0]).bfloat16().expand(3, 2, 2, 4)
    blocks, out = torch.full((3, 16), 0x55, dtype=torch.uint8), torch.full((3, 2, 2, 4), torch.nan).bfloat16()
    half.encode(values, Part.V, blocks)
    half.decode(blocks, Part.V, out)
    assert out[0, 0, 0].tolist() == [0.5, -2.0, 0.0, 2.0]  # the lower byte holds the last exponent bit


def test_one_name_for_two_classes(site):
    class Once(Bf16):
        name = "once"

    class Twice(Bf16):
        name = "once"

    assert register(Once) is Once
    assert register(Once) is Once, "a module may be imported again"
    with pytest.raises(DuplicateRepresentation, match=r"'once' is claimed by .*Once and .*Twice.*bf16, .*k6v4, once"):
        register(Twice)
    assert get("once") is Once


def test_one_name_offered_by_two_packages(site):
    for name in ("one", "two"):
        install(site, name, {f"{name}_module": HALF}, {"half": f"{name}_module:Half"})
    with pytest.raises(DuplicateRepresentation, match=r"'half' is offered by several packages: one 1\.0, two 1\.0"):
        get("half")


def test_nobody_can_take_over_our_names(site):
    source = HALF.replace('name = "half"', 'name = "int8"')
    install(site, "usurper", {"usurper": source}, {"int8": "usurper:Half"})
    with pytest.raises(DuplicateRepresentation, match=r"'int8' is offered by .*hiqcache .*usurper 1\.0"):
        get("int8")
    assert "usurper" not in sys.modules


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise RuntimeError('no such chip')", "cannot load broken:Half of broken-kv 1.0: RuntimeError: no such chip"),
        ("import no_such_module", "cannot load broken:Half of broken-kv 1.0: ModuleNotFoundError"),
        ("def half(:", "cannot load broken:Half of broken-kv 1.0: SyntaxError"),
        ("", "cannot load broken:Half of broken-kv 1.0: AttributeError"),
        ("Half = 8", "broken:Half of broken-kv 1.0 is not a HostRepresentation subclass"),
        ("class Half: name = 'half'", "broken:Half of broken-kv 1.0 is not a HostRepresentation subclass"),
        (HALF.replace('"half"', '"full"'), "entry point 'half' of broken-kv 1.0 leads to .* called 'full'"),
        (HALF.replace('format_tag = "half-v1"', ""), "broken:Half of broken-kv 1.0 lacks format_tag"),
        (HALF.replace("def decode", "def decoed").replace('name = "half"', ""), "of broken-kv 1.0 lacks decode, name"),
    ],
    ids=["raises", "import", "syntax", "attribute", "value", "class", "name", "tag", "abstract"],
)
def test_a_broken_package_says_what_is_wrong_and_hurts_nobody_else(site, source, reason):
    install(site, "broken-kv", {"broken": source}, {"half": "broken:Half"})
    assert "half" in names()
    assert get("int8") is Int8
    with pytest.raises(UnknownRepresentation, match=reason) as caught:
        get("half")
    assert "'half'" in str(caught.value)
    assert get("int8") is Int8


def test_errors_are_meant_for_the_reader():
    assert issubclass(UnknownRepresentation, HiqcacheError)
    assert issubclass(DuplicateRepresentation, HiqcacheError)


def test_the_interface_cannot_be_half_implemented():
    class Nothing(HostRepresentation):
        name = "nothing"

    with pytest.raises(TypeError, match="abstract"):
        Nothing(KVGeometry(layers=1, heads=1, head_dim=2, v_head_dim=2, page_size=1))  # pyright: ignore[reportAbstractUsage]
