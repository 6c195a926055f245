"""Exponents of K's channels: exact, without effect on models that need none, and what they are for."""

import pytest
import torch

from hiqcache.exponents import MOST, KeyExponents, divide, multiply
from hiqcache.geometry import KVGeometry, Part
from hiqcache.registry import get

GEOMETRY = KVGeometry(layers=2, heads=3, head_dim=64, v_head_dim=64, page_size=16)
SHAPE = (2, 3, 64)


def some() -> KeyExponents:
    values = torch.zeros(SHAPE, dtype=torch.int8)
    values[1, 2, ::7] = 9
    return KeyExponents(values)


def test_none_is_none():
    none = KeyExponents.none(GEOMETRY)
    assert none.values.shape == SHAPE
    assert not none.any
    assert some().any


def test_a_digest_names_values_and_shape():
    assert some().digest == some().digest
    other = some().values.clone()
    other[0, 0, 0] = 1
    assert KeyExponents(other).digest != some().digest
    assert KeyExponents(some().values.reshape(1, 6, 64)).digest != some().digest


@pytest.mark.parametrize("values", [torch.full(SHAPE, -1), torch.full(SHAPE, MOST + 1), torch.zeros(3, 64)])
def test_exponents_that_are_none_are_refused(values):
    with pytest.raises(ValueError, match=f"needed: .layers, heads, dim. from 0 to {MOST}"):
        KeyExponents(values)


def test_dividing_and_multiplying_is_exact_for_every_normal_number_that_stays_one():
    bits = torch.arange(0x0080, 0x7F80, dtype=torch.int32).to(torch.int16)
    every = torch.cat([bits, bits | -(2**15)]).view(torch.bfloat16)
    for exponent in (0, 1, 9, MOST):
        factors = KeyExponents(torch.full((1, 1, 1), exponent)).factors(torch.device("cpu"))[0, 0]
        k = every[every.abs().float() >= 2.0 ** (exponent - 126)].clone()
        before = k.clone()
        divide(k, factors)
        assert torch.equal(k.double(), before.double() / 2**exponent)
        multiply(k, factors)
        assert torch.equal(k, before)


def test_multiplying_saturates_and_keeps_what_is_not_finite():
    k = torch.tensor([3e38, -3e38, float("nan"), float("inf"), 0.0]).bfloat16()
    multiply(k, torch.full((5,), 8.0))
    largest = torch.finfo(torch.bfloat16).max
    assert k[:2].tolist() == [largest, -largest]
    assert k[2].isnan()
    assert k[3:].tolist() == [float("inf"), 0.0]


@pytest.mark.parametrize("name", ["int8", "int4", "k6v4"])
def test_a_large_channel_no_longer_costs_the_others(name):
    """Error of the ordinary channels of keys with a bias of 600 in four of them, against that without a bias."""
    format_ = get(name)(GEOMETRY)
    keys = torch.randn((8, 16, 3, 64), generator=torch.Generator().manual_seed(0))
    bias = torch.zeros(64)
    bias[[3, 20, 35, 52]] = 600.0
    exponents = KeyExponents((bias > 0).to(torch.int8).expand(SHAPE) * 8)  # 600 / 3 is nearest to 2**8

    def error(values: torch.Tensor, factors: torch.Tensor | None) -> float:
        k = values.bfloat16()
        given = k.clone()
        if factors is not None:
            divide(k, factors)
        blocks = torch.empty(len(k), format_.layouts[Part.K].block_bytes, dtype=torch.uint8)
        format_.encode(k, Part.K, blocks)
        format_.decode(blocks, Part.K, k)
        if factors is not None:
            multiply(k, factors)
        ordinary = bias == 0
        return float((k - given).double()[..., ordinary].square().mean().sqrt())

    plain = error(keys, None)
    assert error(keys + bias, None) > 10 * plain
    assert error(keys + bias, exponents.factors(torch.device("cpu"))[0]) < 2 * plain
