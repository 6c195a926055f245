"""bf16 keeps every bit."""

import pytest
import torch

from hiqcache.backends.bf16 import Bf16
from hiqcache.geometry import KVGeometry, Part

EVERY_PATTERN = torch.arange(-(2**15), 2**15).to(torch.int16)
"""All 65,536 BF16 numbers, as bits; NaNs of every payload and both zeros among them."""


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("part", list(Part))
def test_every_bit_pattern_comes_back(part, page_size):
    bf16 = Bf16(KVGeometry(layers=1, heads=8, head_dim=128, v_head_dim=128, page_size=page_size))
    bits = EVERY_PATTERN[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))].view(-1, page_size, 8, 128)
    blocks = torch.full((len(bits), page_size * 2048), 0x55, dtype=torch.uint8)
    bf16.encode(bits.view(torch.bfloat16), part, blocks)
    low, high = blocks.view(len(bits), page_size, 8, 128, 2).unbind(-1)
    assert torch.equal(low, (bits & 0xFF).to(torch.uint8))
    assert torch.equal(high, (bits >> 8 & 0xFF).to(torch.uint8))

    out = torch.full_like(bits, 0x55AA)
    bf16.decode(blocks, part, out.view(torch.bfloat16))
    assert torch.equal(out, bits)


def test_inputs_and_outputs_may_have_any_stride():
    bf16 = Bf16(KVGeometry(layers=1, heads=4, head_dim=64, v_head_dim=64, page_size=2))
    bits = EVERY_PATTERN.view(2, 4, 64, 128).permute(2, 0, 1, 3)[..., ::2]
    blocks = torch.full((64, 2, 1024), 0x55, dtype=torch.uint8)
    bf16.encode(bits.view(torch.bfloat16), Part.K, blocks[:, 1])
    assert torch.equal(blocks[:, 1].view(torch.int16), bits.reshape(64, 512))
    assert (blocks[:, 0] == 0x55).all(), "bytes between the blocks are not the codec's"

    out = torch.zeros(2, 4, 64, 128, dtype=torch.int16).permute(2, 0, 1, 3)[..., ::2]
    bf16.decode(blocks[:, 1], Part.K, out.view(torch.bfloat16))
    assert torch.equal(out, bits)


def test_sizes_are_the_device_pools():
    geometry = KVGeometry(layers=36, heads=8, head_dim=128, v_head_dim=128, page_size=64)
    assert Bf16(geometry).layouts[Part.K].block_bytes == 64 * 2048
    assert Bf16(geometry).bytes_per_token() == geometry.device_bytes_per_token == 147_456


def test_the_stated_error_is_none():
    bf16 = Bf16(KVGeometry(layers=1, heads=1, head_dim=4, v_head_dim=4, page_size=1))
    values = torch.ones(1, 1, 1, 4, dtype=torch.bfloat16)
    assert torch.equal(bf16.error_bound(values, values, Part.K), torch.zeros(1, 1, 1, 4, dtype=torch.float64))
