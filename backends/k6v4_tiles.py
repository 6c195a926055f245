"""k6v4 for the GPU kernels: the same bytes as `K6V4.encode` and the same values as `K6V4.decode`."""

import triton
import triton.language as tl

from hiqcache.numerics import tiles

GROUP = tl.constexpr(32)
LEVELS = tl.constexpr(32)
MANTISSA_BITS = tl.constexpr(5)
NAN_BITS = tl.constexpr(0x7FC0)
INFINITY_BITS = tl.constexpr(0x7F80)


@triton.jit
def encode_k(values, DIM: tl.constexpr):
    """`[rows, dim]` BF16 -> upper and lower planes, scales `[rows]` BF16."""
    x, finite = tiles.finite_rows(values.to(tl.float32))
    y = tiles.rotate(x, DIM & -DIM)
    bits = tiles.scale_bits(tl.max(tl.abs(y), axis=1), LEVELS, MANTISSA_BITS)
    y, factors = tl.broadcast(y, tiles.reciprocals(tiles.from_bits(bits, MANTISSA_BITS))[:, None])
    codes = tiles.quantise(y, factors, LEVELS)
    kept = tl.where(finite, bits << 2, NAN_BITS).to(tl.int16).to(tl.bfloat16, bitcast=True)  # 5 of 7 mantissa bits
    return tiles.pack4(codes >> 2).to(tl.uint8), tiles.pack2(codes & 3).to(tl.uint8), kept


@triton.jit
def decode_k(upper, lower, scales, DIM: tl.constexpr):
    """Upper and lower planes, scales -> `[rows, dim]` BF16."""
    bits = scales.to(tl.int16, bitcast=True).to(tl.int32)
    finite = bits < INFINITY_BITS
    scale = (tl.where(finite, bits, 0) << 16).to(tl.float32, bitcast=True)
    codes = tiles.unpack4(upper) << 2 | tiles.unpack2(lower)
    codes, scale = tl.broadcast(codes, scale[:, None])
    return tiles.as_bf16(tiles.rotate_back(tiles.dequantise(codes, scale, LEVELS), DIM & -DIM), finite)


@triton.jit
def encode_v(values, DIM: tl.constexpr):
    """`[rows, dim]` BF16 -> codes, bytes of groups, bytes of heads."""
    return tiles.encode_groups(values, GROUP, DIM)


@triton.jit
def decode_v(codes, group, head, DIM: tl.constexpr):
    """Codes, bytes of groups, bytes of heads -> `[rows, dim]` BF16."""
    return tiles.decode_groups(codes, group, head, GROUP, DIM)
