"""NVFP4 as a third party's representation: its numbers by definition, its bytes by hand, its place in the registry."""

import json
import math
import os
import pathlib
import subprocess
import sys
from fractions import Fraction

import pytest
import torch
from nvfp4.hiqcache_nvfp4 import E2M1, NVFP4, from_e2m1, to_e2m1, to_e4m3
from serving import pip_install

from hiqcache.geometry import KVGeometry, Part, UnsupportedGeometry

PACKAGE = pathlib.Path(__file__).parents[1] / "tools" / "nvfp4"


def e2m1(code: int) -> Fraction:
    """A sign, 2 bits of exponent with bias 1, one of significand."""
    sign, exponent, significand = -1 if code & 8 else 1, code >> 1 & 3, code & 1
    magnitude = Fraction(2 + significand, 2) * 2 ** (exponent - 1) if exponent else Fraction(significand, 2)
    return sign * magnitude


def e4m3(code: int) -> Fraction:
    """Of a code below 127: 4 bits of exponent with bias 7, 3 of significand."""
    exponent, significand = code >> 3, code & 7
    return Fraction(8 + significand, 8) * Fraction(2) ** (exponent - 7) if exponent else Fraction(significand, 512)


def nearest(x: Fraction, numbers: list[Fraction]) -> int:
    """Code of the number nearest to x, of two as near the even one; numbers in ascending order."""
    return min(range(len(numbers)), key=lambda code: (abs(numbers[code] - x), code % 2))


def representation(heads: int = 1, dim: int = 16, page_size: int = 8) -> NVFP4:
    return NVFP4(KVGeometry(layers=1, heads=heads, head_dim=dim, v_head_dim=dim, page_size=page_size))


def encode(rep: NVFP4, values: torch.Tensor) -> torch.Tensor:
    blocks = torch.full((len(values), rep.layouts[Part.K].block_bytes), 0x55, dtype=torch.uint8)
    rep.encode(values, Part.K, blocks)
    return blocks


def decode(rep: NVFP4, blocks: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(like, 7)
    rep.decode(blocks, Part.K, out)
    return out


def test_every_fp4_number():
    assert [Fraction(value) for value in from_e2m1(torch.arange(16, dtype=torch.uint8)).tolist()] == [
        e2m1(code) for code in range(16)
    ]
    assert [Fraction(value) for value in E2M1] == [e2m1(code) for code in range(8)]


def test_fp4_rounds_to_the_nearest_and_half_to_even():
    grid = torch.arange(0, 8, 1 / 64)
    near_ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    up, down = (torch.nextafter(near_ties, torch.full((), to)) for to in (math.inf, 0.0))
    x = torch.cat([grid, near_ties, up, down])
    numbers = [e2m1(code) for code in range(8)]
    wanted = torch.tensor([nearest(Fraction(value), numbers) for value in x.tolist()], dtype=torch.uint8)
    assert torch.equal(to_e2m1(x), wanted)
    assert torch.equal(to_e2m1(-x), wanted + 8)


def test_every_fp8_scale():
    numbers = [e4m3(code) for code in range(127)]
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert [Fraction(value) for value in every.tolist()] == numbers
    middles = (every[1:] + every[:-1]) / 2
    x = torch.cat([every, middles, torch.nextafter(middles, torch.zeros(())), torch.tensor([449.0, 1e30])])
    wanted = [nearest(Fraction(value), numbers) for value in x.tolist()]
    assert to_e4m3(x).view(torch.uint8).tolist() == wanted


def test_bytes_of_a_block_by_hand():
    values = torch.zeros(1, 8, 1, 16, dtype=torch.bfloat16)
    values[0, 0, 0, :6] = torch.tensor([12.0, -12.0, 1.0, 0.5, -3.0, 7.0])  # the scale is 2: 6, -6, 1/2, 1/4, -3/2, 7/2
    block = encode(representation(), values)[0]
    assert block[:8].tolist() == [0xF7, 0x01, 0x6B, 0, 0, 0, 0, 0]  # 7/2 is as near to 4, whose code is even
    assert block[64] == 8 << 3  # of the first of 8 tokens: 2**(8 - 7)
    assert not block[8:64].any()
    assert not block[65:].any()
    back = decode(representation(), block[None], values)
    assert back[0, 0, 0, :6].tolist() == [12, -12, 1, 0, -3, 8]


def test_encoding_again_changes_bytes_only_where_scales_are_coarse():
    rep = representation(heads=2, dim=64)
    x = torch.randn(100, 8, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    blocks = encode(rep, x)
    assert torch.equal(encode(rep, decode(rep, blocks, x)), blocks)
    small = x / 256
    blocks = encode(rep, small)
    assert not torch.equal(encode(rep, decode(rep, blocks, small)), blocks)


def test_a_head_that_is_not_finite_is_nan_and_large_values_saturate():
    rep = representation(heads=2, dim=32)
    values = torch.full((1, 8, 2, 32), 1.5, dtype=torch.bfloat16)
    values[0, 0, 0, 3] = math.inf
    values[0, 0, 1, 20] = torch.finfo(torch.bfloat16).max
    blocks = encode(rep, values)
    back = decode(rep, blocks, values)
    assert back[0, 0, 0].isnan().all()
    assert back[0, 0, 1, 20] == 448 * 6
    assert back[0, 0, 1, :16].tolist() == [1.5] * 16
    assert torch.equal(encode(rep, back), blocks)


def test_its_size():
    assert representation(heads=8, dim=128, page_size=64).bytes_per_token() == 2 * 576
    with pytest.raises(UnsupportedGeometry, match=r"values of a head(?s:.*)fewer than BF16's 128"):
        representation(dim=8)


def test_it_is_found_by_name_once_installed(tmp_path: pathlib.Path):
    site = pip_install(PACKAGE, tmp_path / "site")
    script = "import json; from hiqcache import registry; print(json.dumps(registry.get('nvfp4').format_tag))"
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    answer = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(answer.stdout) == "nvfp4-v1"
