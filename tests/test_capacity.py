"""SGLang's arithmetic for a host budget, in exact numbers."""

import random

import pytest

from hiqcache.backends.bf16 import Bf16
from hiqcache.backends.int8 import Int8
from hiqcache.capacity import Capacity, tokens_of_ratio, tokens_of_size
from hiqcache.geometry import KVGeometry

QWEN3_8B = KVGeometry(layers=36, heads=8, head_dim=128, v_head_dim=128, page_size=1)


@pytest.mark.parametrize(
    ("representation", "bytes_per_token", "tokens"), [(Bf16, 147_456, 54_254), (Int8, 82_944, 96_451)]
)
def test_8_gb_of_qwen3_8b(representation, bytes_per_token, tokens):
    assert representation(QWEN3_8B).bytes_per_token() == bytes_per_token
    assert tokens_of_size(8, bytes_per_token, page_size=1) == tokens


@pytest.mark.parametrize(("bytes_per_token", "host_bytes"), [(147_456, 8_000_077_824), (82_944, 4_500_043_776)])
def test_the_same_tokens_in_fewer_bytes(bytes_per_token, host_bytes):
    tokens = tokens_of_ratio(1.0, 54_253, page_size=1)
    assert tokens == 54_254
    assert Capacity(bytes_per_token, 147_456, tokens).host_bytes == host_bytes


def test_gain_and_saving():
    int8 = Capacity(82_944, 147_456, 96_451)
    assert int8.gain == 16 / 9
    assert int8.saving == 7 / 16
    assert (Capacity(147_456, 147_456, 1).gain, Capacity(147_456, 147_456, 1).saving) == (1, 0)


@pytest.mark.parametrize(
    ("page_size", "tokens"),
    [(1, 54_254), (16, 54_256), (64, 54_272), (54_253, 108_506), (54_254, 54_254)],
)
def test_whole_pages_and_one_more(page_size, tokens):
    # 8e9 bytes are 54,253 tokens: 3,390 whole pages of 16, 847 of 64, exactly one of 54,253, none of 54,254.
    assert tokens_of_size(8, 147_456, page_size) == tokens


@pytest.mark.parametrize(
    ("ratio", "device_tokens", "page_size", "tokens"),
    [(2.0, 1000, 1, 2001), (2.0, 1000, 64, 2048), (0.1, 5, 16, 16), (1.5, 3, 1, 5), (0.29, 100, 1, 29)],
)
def test_a_ratio_cuts_off_the_fraction(ratio, device_tokens, page_size, tokens):
    # The last: 0.29 * 100 is 28.999999999999996 in floating point, and SGLang's int() makes 28 of it.
    assert tokens_of_ratio(ratio, device_tokens, page_size) == tokens


def test_floating_point_division_loses_no_token():
    rng = random.Random(0)
    for _ in range(20_000):
        gigabytes, bytes_per_token = rng.randint(1, 4096), rng.randint(64, 2_000_000)
        assert tokens_of_size(gigabytes, bytes_per_token, 1) == gigabytes * 10**9 // bytes_per_token + 1
    assert tokens_of_size(8, 8 * 10**9, 1) == 2
    assert tokens_of_size(8, 8 * 10**9 + 1, 1) == 1
