"""`hiqcache/numerics` for the GPU kernels: the same bits, on tiles `[rows, width]` that are padded to powers of two.

Widths are those of tiles; `BLOCK`, `SIZE` and `DIM` are the head's own. What lies beyond `DIM` in a tile never mixes
with what lies before it, because blocks of the rotation and groups divide `DIM`.
"""
# Triton's own annotations do not describe code inside a kernel.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl

TINY = tl.constexpr(2.0**-100)
SMALLEST_NORMAL = tl.constexpr(2.0**-126)
LARGEST_BF16 = tl.constexpr(3.3895313892515355e38)
INFINITY_BITS = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC0)
GROUP_LEVELS = tl.constexpr(8)
GROUP_MANTISSA_BITS = tl.constexpr(3)
GROUP_MANTISSA = tl.constexpr(7)
"""All bits of it set."""
FARTHEST = tl.constexpr(3)
NOT_FINITE = tl.constexpr(255)


@triton.jit
def as_bf16(x, finite):
    """float32 `[rows, width]` to BF16, half to even; NaN in rows that are not finite."""
    bits = tl.where(finite[:, None], x, 0.0).to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(finite[:, None], bits, NAN_BITS).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def finite_rows(x):
    """Float32 `[rows, width]` -> the same with rows that hold infinity or NaN zeroed, and `[rows]` which do not."""
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    finite = bits < INFINITY_BITS
    return tl.where(finite[:, None], x, 0.0), finite


@triton.jit
def _butterfly(x, STEP: tl.constexpr):
    """Sums and differences of the values that are `STEP` apart."""
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    a, b = tl.split(tl.permute(tl.reshape(x, (ROWS, WIDTH // (2 * STEP), 2, STEP)), (0, 1, 3, 2)))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (ROWS, WIDTH))


@triton.jit
def _butterflies(x, BLOCK: tl.constexpr):
    for level in tl.static_range(16):
        if (1 << level) < BLOCK:
            x = _butterfly(x, 1 << level)
    return x


@triton.jit
def rotate(x, BLOCK: tl.constexpr):
    """As `rotation.rotate`."""
    return _butterflies(tl.where(tl.abs(x) < TINY, 0.0, x) * (1.0 / BLOCK), BLOCK)


@triton.jit
def rotate_back(y, BLOCK: tl.constexpr):
    """As `rotation.rotate_back`."""
    x = _butterflies(y * (1.0 / BLOCK), BLOCK)
    return tl.minimum(tl.maximum(x, -LARGEST_BF16 / BLOCK), LARGEST_BF16 / BLOCK) * BLOCK


@triton.jit
def pack4(codes):
    """int32 `[rows, width]` below 16 -> `[rows, width / 2]`."""
    first, second = tl.split(tl.reshape(codes, (codes.shape[0], codes.shape[1] // 2, 2)))
    return first | second << 4


@triton.jit
def unpack4(packed):
    """`[rows, width / 2]` uint8 -> int32 `[rows, width]`."""
    packed = packed.to(tl.int32)
    return tl.reshape(tl.join(packed & 15, packed >> 4), (packed.shape[0], packed.shape[1] * 2))


@triton.jit
def pack2(codes):
    """int32 `[rows, width]` below 4 -> `[rows, width / 4]`."""
    first, second = tl.split(tl.reshape(codes, (codes.shape[0], codes.shape[1] // 2, 2)))
    pairs = first | second << 2
    first, second = tl.split(tl.reshape(pairs, (codes.shape[0], codes.shape[1] // 4, 2)))
    return first | second << 4


@triton.jit
def unpack2(packed):
    """`[rows, width / 4]` uint8 -> int32 `[rows, width]`."""
    nibbles = unpack4(packed)
    return tl.reshape(tl.join(nibbles & 3, nibbles >> 2), (nibbles.shape[0], nibbles.shape[1] * 2))


@triton.jit
def scale_bits(largest, LEVELS: tl.constexpr, MANTISSA_BITS: tl.constexpr):
    """As `scales.scale_bits`."""
    quotient = tl.div_rn(largest, tl.full(largest.shape, LEVELS - 0.5, tl.float32))
    return ((quotient.to(tl.int32, bitcast=True) >> (22 - MANTISSA_BITS)) + 1) >> 1


@triton.jit
def from_bits(bits, MANTISSA_BITS: tl.constexpr):
    """As `scales.from_bits`."""
    return (bits << (23 - MANTISSA_BITS)).to(tl.float32, bitcast=True)


@triton.jit
def reciprocals(scales):
    """1 / s for `quantise`."""
    return tl.div_rn(tl.full(scales.shape, 1.0, tl.float32), tl.maximum(scales, SMALLEST_NORMAL))


@triton.jit
def quantise(y, reciprocals, LEVELS: tl.constexpr):
    """As `scales.quantise`, int32; both of one shape."""
    quotients = y * reciprocals + LEVELS
    return tl.minimum(tl.maximum(quotients, 0.0), 2.0 * LEVELS - 1.0).to(tl.int32)


@triton.jit
def dequantise(codes, scales, LEVELS: tl.constexpr):
    """As `scales.dequantise`."""
    return (codes.to(tl.float32) - (LEVELS - 0.5)) * scales


@triton.jit
def _largest_of_groups(y, SIZE: tl.constexpr):
    """`[rows, width]` -> `[rows, width / SIZE]`, by halves: a reduction would pass every value between threads."""
    for level in tl.static_range(16):
        if (1 << level) < SIZE:
            a, b = tl.split(tl.reshape(y, (y.shape[0], y.shape[1] // 2, 2)))
            y = tl.maximum(a, b)
    return y


@triton.jit
def _group_scales(group, head):
    exponent = head[:, None] - (group >> GROUP_MANTISSA_BITS)
    bits = exponent << GROUP_MANTISSA_BITS | group & GROUP_MANTISSA
    return from_bits(bits, GROUP_MANTISSA_BITS)


@triton.jit
def encode_groups(values, WANTED: tl.constexpr, DIM: tl.constexpr):
    """`[rows, width]` BF16 -> codes `[rows, width / 2]`, bytes of groups `[rows, width / size]`, of heads `[rows]`."""
    BLOCK: tl.constexpr = DIM & -DIM
    SIZE: tl.constexpr = min(WANTED, BLOCK)
    ROWS: tl.constexpr = values.shape[0]
    WIDTH: tl.constexpr = values.shape[1]
    x, finite = finite_rows(values.to(tl.float32))
    y = rotate(x, BLOCK)
    bits = scale_bits(_largest_of_groups(tl.abs(y), SIZE), GROUP_LEVELS, GROUP_MANTISSA_BITS)
    head = tl.max(bits, axis=1) >> GROUP_MANTISSA_BITS
    bits = tl.maximum(bits, ((head - FARTHEST) << GROUP_MANTISSA_BITS)[:, None])
    below = head[:, None] - (bits >> GROUP_MANTISSA_BITS)
    group = below << GROUP_MANTISSA_BITS | bits & GROUP_MANTISSA
    grouped = tl.reshape(y, (ROWS, WIDTH // SIZE, SIZE))
    y, factors = tl.broadcast(grouped, tl.expand_dims(reciprocals(_group_scales(group, head)), 2))
    codes = tl.reshape(quantise(y, factors, GROUP_LEVELS), (ROWS, WIDTH))
    return pack4(codes).to(tl.uint8), group.to(tl.uint8), tl.where(finite, head, NOT_FINITE).to(tl.uint8)


@triton.jit
def decode_groups(codes, group, head, WANTED: tl.constexpr, DIM: tl.constexpr):
    """What `encode_groups` gave -> `[rows, width]` BF16."""
    BLOCK: tl.constexpr = DIM & -DIM
    SIZE: tl.constexpr = min(WANTED, BLOCK)
    finite = head != NOT_FINITE
    scales = _group_scales(group.to(tl.int32), tl.where(finite, head, 0).to(tl.int32))
    codes = unpack4(codes)
    ROWS: tl.constexpr = codes.shape[0]
    WIDTH: tl.constexpr = codes.shape[1]
    codes, scales = tl.broadcast(tl.reshape(codes, (ROWS, WIDTH // SIZE, SIZE)), tl.expand_dims(scales, 2))
    y = tl.reshape(dequantise(codes, scales, GROUP_LEVELS), (ROWS, WIDTH))
    return as_bf16(rotate_back(y, BLOCK), finite)
