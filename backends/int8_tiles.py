"""int8 for the GPU kernels: the same bytes as `Int8.encode` and the same values as `Int8.decode`.

Rounding to BF16 is done on the bits, because hardware, compiler and Triton's interpreter differ in how they convert.
"""

import triton
import triton.language as tl

ROUND = tl.constexpr(12582912.0)
"""1.5 x 2**23: adding and subtracting it rounds a small float32 half to even."""
SMALLEST_ABSMAX = tl.constexpr(2.0**-112)
LARGEST_BF16 = tl.constexpr(3.3895313892515355e38)
INFINITY_BITS = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC0)


@triton.jit
def bf16_bits(x):
    """Bits of finite float32 `x` rounded half to even to BF16, in the low half of an int32."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@triton.jit
def as_bf16(bits):
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def encode(values, DIM: tl.constexpr):
    """`[rows, dim]` BF16 -> payload `[rows, dim]` int8, scales `[rows]` BF16."""
    x = values.to(tl.float32)
    # Without the sign, bits order as magnitudes do, infinity and NaN on top.
    absmax_bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    finite = absmax_bits < INFINITY_BITS
    absmax = tl.where(finite, absmax_bits, 0).to(tl.float32, bitcast=True)
    scale_bits = bf16_bits(tl.div_rn(tl.maximum(absmax, SMALLEST_ABSMAX), tl.full(absmax.shape, 127.0, tl.float32)))
    scales = (scale_bits << 16).to(tl.float32, bitcast=True)
    x, scales = tl.broadcast(x, scales[:, None])
    quotients = (tl.div_rn(x, scales) + ROUND) - ROUND
    quotients = tl.minimum(tl.maximum(quotients, -127.0), 127.0)
    payload = tl.where(finite[:, None], quotients, 0.0).to(tl.int8)
    return payload, as_bf16(tl.where(finite, scale_bits, NAN_BITS))


@triton.jit
def decode(payload, scales, DIM: tl.constexpr):
    """Payload `[rows, dim]` int8, scales `[rows]` BF16 -> `[rows, dim]` BF16."""
    scale_bits = scales.to(tl.int16, bitcast=True).to(tl.int32)
    finite = scale_bits < INFINITY_BITS >> 16
    x = payload.to(tl.float32) * (scale_bits << 16).to(tl.float32, bitcast=True)[:, None]
    x = tl.minimum(tl.maximum(tl.where(finite[:, None], x, 0.0), -LARGEST_BF16), LARGEST_BF16)
    return as_bf16(tl.where(finite[:, None], bf16_bits(x), NAN_BITS))
