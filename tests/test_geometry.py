"""The geometry's arithmetic, and refusals that name every broken rule."""

import pickle

import pytest
import torch

from hiqcache.backends.bf16 import Bf16
from hiqcache.backends.int8 import Int8
from hiqcache.geometry import HiqcacheError, KVGeometry, Part, UnsupportedGeometry, Violation

QWEN3_8B = KVGeometry(layers=36, heads=8, head_dim=128, v_head_dim=128, page_size=1)


def test_device_bytes_of_qwen3_8b():
    assert QWEN3_8B.row_bytes(Part.K) == QWEN3_8B.row_bytes(Part.V) == 2048
    assert QWEN3_8B.device_bytes_per_token == 147_456


def test_parts_of_different_width():
    geometry = KVGeometry(layers=3, heads=2, head_dim=192, v_head_dim=128, page_size=4, dtype=torch.float32)
    assert (geometry.dim(Part.K), geometry.dim(Part.V)) == (192, 128)
    assert (geometry.row_bytes(Part.K), geometry.row_bytes(Part.V)) == (1536, 1024)
    assert geometry.device_bytes_per_token == 7680


@pytest.mark.parametrize("name", ["layers", "heads", "head_dim", "v_head_dim", "page_size", "tp_size"])
@pytest.mark.parametrize("value", [0, -1, 1.0, "8", None])
def test_counts_are_positive_whole_numbers(name, value):
    counts = {"layers": 1, "heads": 1, "head_dim": 2, "v_head_dim": 2, "page_size": 1, "tp_size": 1}
    with pytest.raises((TypeError, ValueError)):
        KVGeometry(**{**counts, name: value})


def test_a_violation_says_what_where_and_how():
    text = str(Violation(rule="the rule", seen=3, allowed="1 or 2", flag="--some-flag"))
    assert all(part in text for part in ("the rule", "3", "1 or 2", "--some-flag"))


def test_every_broken_rule_is_listed_at_once():
    # float16 device KV, K and V of different width, and one head too narrow for INT8 to save anything.
    geometry = KVGeometry(layers=1, heads=1, head_dim=64, v_head_dim=32, page_size=1, dtype=torch.float16, tp_size=8)
    with pytest.raises(UnsupportedGeometry) as caught:
        Int8(geometry)
    message = str(caught.value)
    assert "'int8' refused (4 rules broken)" in message
    assert len(caught.value.violations) == 4
    for words in (
        "float16",
        "--kv-cache-dtype bf16",
        "64 and 32",
        "1 local KV heads x 64 at TP=8",
        "--page-size (4 or a",
    ):
        assert words in message


def test_a_refusal_is_meant_for_the_reader_and_crosses_processes():
    with pytest.raises(HiqcacheError) as caught:
        Bf16(KVGeometry(layers=1, heads=1, head_dim=64, v_head_dim=64, page_size=1, dtype=torch.float16))
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is UnsupportedGeometry
    assert str(again) == str(caught.value)
    assert "'bf16' refused (1 rule broken)" in str(again)
