"""int8 against an exact quantiser, written here from the format's definition and not from the code."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from attrs import evolve

from hiqcache.backends.int8 import Int8
from hiqcache.geometry import KVGeometry, Part, UnsupportedGeometry

LARGEST = 0x7F7F
"""Bits of the largest finite BF16."""
LARGEST_VALUE = 255 * 2.0**120
QUIET_NAN = 0x7FC0
QWEN3_8B = KVGeometry(layers=36, heads=8, head_dim=128, v_head_dim=128, page_size=1)


# The exact quantiser. All of it is float64 on BF16 values: 53 bits hold every product of two 8-bit significands, and
# a quotient of two cannot come so close to a rounding boundary that float64 would miss on which side it lies.


def value(bits: np.ndarray) -> np.ndarray:
    """BF16 bits -> the number, in float64."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def nearest(x: np.ndarray) -> np.ndarray:
    """The BF16 number (normal or zero) nearest to x, ties to even, with no upper end of the range."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(np.ldexp(mantissa, 8)), exponent - 8)


def bits_of(x: np.ndarray) -> np.ndarray:
    """The bits of numbers that BF16 holds exactly."""
    bits = (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    assert np.array_equal(value(bits), x)
    return bits


def quantise(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """BF16 bits `[..., heads, dim]` of finite values -> INT8 values and, in float64, the scale of each head."""
    x = value(bits)
    scale = nearest(np.maximum(np.abs(x).max(axis=-1), 2.0**-112) / 127)
    return np.clip(np.rint(x / scale[..., None]), -127, 127).astype(np.int8), scale


def dequantise(q: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return np.clip(nearest(q * scale[..., None]), -LARGEST_VALUE, LARGEST_VALUE)


def block(q: np.ndarray, scale_bits: np.ndarray) -> np.ndarray:
    """The bytes of blocks: `[blocks, page_size, heads, dim]` INT8 values of all tokens, then one BF16 for each head of
    each token, then zeros up to a multiple of 128 and of the page size."""
    payload = q.reshape(len(q), -1).view(np.uint8)
    scales = np.stack([scale_bits & 0xFF, scale_bits >> 8], axis=-1).astype(np.uint8)
    used = np.concatenate([payload, scales.reshape(len(q), -1)], axis=-1)
    return np.pad(used, [(0, 0), (0, -used.shape[-1] % math.lcm(128, q.shape[1]))])


def test_the_quantiser_of_this_test_is_exact():
    rng = np.random.default_rng(1)
    heads = rng.integers(0, LARGEST + 1, (200, 4), dtype=np.uint16)
    heads[:100] = 0x4000 + heads[:100] % 0x400  # of like size, so that quotients spread over the whole range
    heads[0], heads[1], heads[2] = [0, 0, 0, 0], [LARGEST, 1, 0, 0x80], [0x427F, 0x3F00, 0x3FC0, 0x4020]
    quantised, scales = quantise(heads)
    decoded = dequantise(quantised, scales)

    def rounded(x: Fraction) -> Fraction:
        step = Fraction(2) ** (math.frexp(x)[1] - 8) if x else Fraction(1)
        return round(x / step) * step  # Python rounds a Fraction half to even

    for head, q, s, y in zip(heads, quantised, scales, decoded, strict=True):
        x = [Fraction(v) for v in value(head).tolist()]
        scale = rounded(max(*x, Fraction(2) ** -112) / 127)
        assert Fraction(s.item()) == scale
        assert q.tolist() == [max(-127, min(127, round(v / scale))) for v in x]
        assert [Fraction(v) for v in y.tolist()] == [
            min(rounded(scale * n), Fraction(LARGEST_VALUE)) for n in q.tolist()
        ]


def encode(int8: Int8, bits: np.ndarray, part: Part = Part.K, poison: int = 0x55) -> torch.Tensor:
    """Blocks of BF16 bits `[blocks, page_size, heads, dim]`, written over memory full of `poison`."""
    values = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    out = torch.full((len(bits), int8.layouts[part].block_bytes), poison, dtype=torch.uint8)
    int8.encode(values, part, out)
    return out


def decode(int8: Int8, blocks: torch.Tensor, part: Part = Part.K) -> np.ndarray:
    """BF16 bits `[blocks, page_size, heads, dim]`, written over memory full of an odd NaN."""
    geometry = int8.geometry
    shape = (len(blocks), geometry.page_size, geometry.heads, geometry.dim(part))
    out = torch.full(shape, 0x7FA5, dtype=torch.int16).view(torch.bfloat16)
    int8.decode(blocks, part, out)
    return out.view(torch.int16).numpy().view(np.uint16)


def random_bits(*shape: int, seed: int = 0) -> np.ndarray:
    """Finite BF16 bits of all sizes: half of the heads of like values, half over the whole range of exponents."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, LARGEST + 1, shape, dtype=np.uint16)
    like = rng.integers(0, 0x7B00, (*shape[:-1], 1), dtype=np.uint16) + rng.integers(0, 0x480, shape, dtype=np.uint16)
    bits = np.where(rng.random((*shape[:-1], 1)) < 0.5, bits, like)
    return bits | rng.integers(0, 2, shape, dtype=np.uint16) << 15


def check_bytes_and_values(heads: int, dim: int, page_size: int) -> Int8:
    """Bytes and decoded values of random blocks are those of the exact quantiser."""
    int8 = Int8(KVGeometry(layers=2, heads=heads, head_dim=dim, v_head_dim=dim, page_size=page_size))
    bits = random_bits(5, page_size, heads, dim)
    q, scale = quantise(bits)
    for part in Part:
        blocks = encode(int8, bits, part)
        assert np.array_equal(blocks.numpy(), block(q, bits_of(scale)))
        assert np.array_equal(value(decode(int8, blocks, part)), dequantise(q, scale))
    return int8


@pytest.mark.parametrize(
    ("heads", "dim", "page_size", "block_bytes"),
    [
        (8, 128, 1, 1152),
        (8, 128, 16, 16 * 1040),
        (8, 128, 64, 64 * 1040),
        (8, 128, 3, 3 * 1152),  # 3,120 bytes: a multiple of 128 and of 3 tokens is 3,456
        (4, 128, 1, 640),
        (2, 128, 4, 4 * 288),  # 4 x 260 = 1,040, padded to 1,152
        (1, 128, 64, 64 * 130),
        (1, 128, 2, 2 * 192),
        (3, 64, 1, 256),
        (3, 64, 16, 16 * 200),  # 16 x 198 = 3,168, padded to 3,200
        (5, 80, 64, 64 * 410),
        (9, 96, 128, 128 * 882),
    ],
)
def test_bytes_and_decoded_values_are_those_of_the_exact_quantiser(heads, dim, page_size, block_bytes):
    int8 = check_bytes_and_values(heads, dim, page_size)
    assert int8.layouts[Part.K].block_bytes == block_bytes
    assert int8.bytes_per_token() == 2 * 2 * block_bytes / page_size


SWEEP = list(itertools.product((1, 2, 3, 5, 8, 9), (64, 80, 96, 128, 256), [2**power for power in range(8)]))


@pytest.mark.sweep
@pytest.mark.parametrize(("heads", "dim", "page_size"), SWEEP)
def test_every_geometry_is_that_of_the_exact_quantiser_or_refused(heads, dim, page_size):
    used = page_size * heads * (dim + 2)
    if -(-used // 128) * 128 < page_size * heads * dim * 2:
        check_bytes_and_values(heads, dim, page_size)
    else:
        with pytest.raises(UnsupportedGeometry, match="fewer than BF16's"):
            Int8(KVGeometry(layers=1, heads=heads, head_dim=dim, v_head_dim=dim, page_size=page_size))


@pytest.mark.parametrize(("page_size", "bytes_per_token"), [(1, 82_944), (16, 74_880), (64, 74_880), (128, 74_880)])
def test_bytes_per_token_of_qwen3_8b(page_size, bytes_per_token):
    assert Int8(evolve(QWEN3_8B, page_size=page_size)).bytes_per_token() == bytes_per_token


def test_bytes_per_token_of_llama_3_70b_on_eight_gpus():
    geometry = KVGeometry(layers=80, heads=1, head_dim=128, v_head_dim=128, page_size=64)
    assert Int8(geometry).bytes_per_token() == 20_800
    assert geometry.device_bytes_per_token == 40_960


def test_one_head_of_128_at_page_size_1_is_refused_and_told_of_a_page_size_that_would_do():
    geometry = KVGeometry(layers=36, heads=1, head_dim=128, v_head_dim=128, page_size=1, tp_size=8)
    words = (
        r"saw 256 \(1 local KV heads x 128 at TP=8, page size 1, padded\); allowed: fewer than BF16's 256; "
        r"changed by --page-size \(2 or a larger power of two; 64 would take 130\)"
    )
    with pytest.raises(UnsupportedGeometry, match=words):
        Int8(geometry)
    assert Int8(evolve(geometry, page_size=2)).bytes_per_token() == 36 * 2 * 192
    with pytest.raises(UnsupportedGeometry, match="page size 3"):  # which pads each token to 256 bytes too
        Int8(evolve(geometry, page_size=3))


def test_heads_too_narrow_for_a_scale_are_refused_at_any_page_size():
    with pytest.raises(UnsupportedGeometry, match="changed by the model"):
        Int8(KVGeometry(layers=1, heads=64, head_dim=2, v_head_dim=2, page_size=64))


@pytest.mark.parametrize(("heads", "dim", "holds"), [(1, 64, False), (2, 64, False), (1, 128, False), (1, 130, True)])
def test_a_geometry_is_held_exactly_where_it_saves_bytes(heads, dim, holds):
    # Padded against BF16: 64 + 2 -> 128 of 128, 128 + 4 -> 256 of 256, 128 + 2 -> 256 of 256, 130 + 2 -> 256 of 260.
    geometry = KVGeometry(layers=1, heads=heads, head_dim=dim, v_head_dim=dim, page_size=1)
    if holds:
        assert Int8(geometry).bytes_per_token() == 2 * 256 < geometry.device_bytes_per_token
    else:
        with pytest.raises(UnsupportedGeometry, match="fewer than BF16's"):
            Int8(geometry)


def test_scales_that_would_be_unaligned_are_refused_and_an_even_page_size_aligns_them():
    with pytest.raises(UnsupportedGeometry, match=r"1 tokens x 3 local KV heads x 129 = 387.*an even.*--page-size"):
        Int8(KVGeometry(layers=1, heads=3, head_dim=129, v_head_dim=129, page_size=1))
    check_bytes_and_values(3, 129, 2)


def bound_of(scale: np.ndarray, decoded: np.ndarray) -> np.ndarray:
    """`(0.5 + 2**-8) * s + 2**-8 * |x^|`."""
    return (0.5 + 2**-8) * scale[..., None] + 2**-8 * np.abs(decoded)


def test_every_absmax_is_exact_bounded_finite_and_stable():
    """Each of the 32,640 finite BF16 magnitudes leads a head of 32 values, the others random below it."""
    rng = np.random.default_rng(2)
    absmax = np.arange(LARGEST + 1, dtype=np.uint16)[:, None]
    bits = rng.integers(0, absmax + 1, (absmax.size, 32), dtype=np.uint16)
    near = rng.integers(absmax - absmax // 40, absmax + 1, bits.shape, dtype=np.uint16)
    bits[:, ::2] = near[:, ::2]  # of like size: so that all INT8 values occur, not only the small ones
    bits[np.arange(absmax.size), rng.integers(0, 32, absmax.size)] = absmax[:, 0]
    bits |= rng.integers(0, 2, bits.shape, dtype=np.uint16) << 15
    bits = bits.reshape(-1, 1, 8, 32)
    int8 = Int8(KVGeometry(layers=1, heads=8, head_dim=32, v_head_dim=32, page_size=1))

    blocks = encode(int8, bits)
    q, scale = quantise(bits)
    assert np.array_equal(blocks.numpy(), block(q, bits_of(scale)))
    assert set(np.unique(q)) == set(range(-127, 128))

    decoded = decode(int8, blocks)
    assert np.array_equal(value(decoded), dequantise(q, scale))
    assert np.isfinite(value(decoded)).all()

    error, bound = np.abs(value(decoded) - value(bits)), bound_of(scale, value(decoded))
    assert (error <= bound).all()
    before, after = (torch.from_numpy(b.view(np.int16)).view(torch.bfloat16) for b in (bits, decoded))
    stated = int8.error_bound(before, after, Part.K)
    assert np.array_equal(stated.numpy(), bound)
    # Neither term of the bound is idle: without one of them, some values break it.
    assert (error > 0.5 * scale[..., None]).any()
    assert (error > 2**-8 * np.abs(value(decoded))).any()

    for _ in range(3):
        again = encode(int8, decoded, poison=0xAA)
        assert torch.equal(again, blocks)
        decoded = decode(int8, again)


def one_head(*head: int, others: int = 0x3F80) -> tuple[Int8, np.ndarray]:
    """A token of two heads x 128: the first begins with `head` and is zero beyond, the second is `others` (1.0)."""
    bits = np.zeros((1, 1, 2, 128), np.uint16)
    bits[0, 0, 0, : len(head)] = head
    bits[0, 0, 1] = others
    return Int8(KVGeometry(layers=1, heads=2, head_dim=128, v_head_dim=128, page_size=1)), bits


def test_zero_heads_decode_to_exact_zero():
    int8, bits = one_head(0x8000)  # negative zero
    blocks = encode(int8, bits)
    assert not blocks[0, :128].any()
    assert not decode(int8, blocks)[0, 0, 0].any()


@pytest.mark.parametrize("bits", [0x0001, 0x007F, 0x0080, 0x0380])
def test_values_too_small_for_a_scale_become_zero(bits):
    # Subnormals and the smallest normals lie below half of the smallest step, 2**-112 / 127.
    int8, values = one_head(bits, bits | 0x8000)
    blocks = encode(int8, values)
    assert not blocks[0, :128].any()
    assert not decode(int8, blocks)[0, 0, 0].any()


def test_subnormals_beside_a_normal_value():
    int8, bits = one_head(0x3F80, 0x0001, 0x807F)
    decoded = decode(int8, encode(int8, bits))
    assert decoded[0, 0, 0, :3].tolist() == [0x3F80, 0, 0]


def test_the_largest_bf16_stays_finite():
    int8, bits = one_head(LARGEST, LARGEST | 0x8000, 0x7F00)
    decoded = decode(int8, encode(int8, bits))[0, 0, 0, :3]
    # 127 * bf16(LARGEST / 127) rounds up past the largest BF16, so without saturation these would be infinite.
    assert decoded[:2].tolist() == [LARGEST, LARGEST | 0x8000]
    assert np.isfinite(value(decoded)).all()


@pytest.mark.parametrize("broken", [0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x7F81, 0xFFFF], ids=hex)
def test_a_head_with_nan_or_infinity_becomes_nan_throughout(broken):
    int8, bits = one_head(0x3F80, broken, LARGEST)
    blocks = encode(int8, bits)
    assert not blocks[0, :128].any()
    assert blocks[0, 256:258].tolist() == [0xC0, 0x7F]
    decoded = decode(int8, blocks)
    assert (decoded[0, 0, 0] == QUIET_NAN).all()
    assert (decoded[0, 0, 1] == 0x3F80).all(), "the other head must not notice"
    assert torch.equal(encode(int8, decoded, poison=0xAA), blocks)


@pytest.mark.parametrize("part", list(Part))
def test_inputs_and_outputs_may_have_any_stride(part):
    int8 = Int8(KVGeometry(layers=1, heads=4, head_dim=128, v_head_dim=128, page_size=16))
    bits = random_bits(3, 16, 4, 128)
    blocks = encode(int8, bits, part)
    decoded = decode(int8, blocks, part)

    rows = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    strided = torch.zeros(3, 4, 16, 256, dtype=torch.bfloat16).transpose(1, 2)[..., ::2]
    strided.copy_(rows)
    arena = torch.full((3, 2, blocks.shape[1]), 0x55, dtype=torch.uint8)
    int8.encode(strided, part, arena[:, 1])
    assert torch.equal(arena[:, 1], blocks)
    assert (arena[:, 0] == 0x55).all(), "bytes between the blocks are not the codec's"

    out = torch.zeros(3, 4, 16, 256, dtype=torch.bfloat16).transpose(1, 2)[..., ::2]
    int8.decode(arena[:, 1], part, out)
    assert np.array_equal(out.contiguous().view(torch.int16).numpy().view(np.uint16), decoded)


def test_no_byte_keeps_what_was_there_before():
    int8 = Int8(KVGeometry(layers=1, heads=3, head_dim=64, v_head_dim=64, page_size=16))
    bits = random_bits(2, 16, 3, 64)
    assert torch.equal(encode(int8, bits, poison=0x55), encode(int8, bits, poison=0xAA))


def test_inputs_are_left_as_they_were():
    int8 = Int8(QWEN3_8B)
    bits = random_bits(4, 1, 8, 128)
    blocks = encode(int8, before := bits.copy())
    kept = blocks.clone()
    decode(int8, blocks)
    assert np.array_equal(bits, before)
    assert torch.equal(blocks, kept)
