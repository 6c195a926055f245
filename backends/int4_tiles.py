"""int4 for the GPU kernels: the same bytes as `Int4.encode` and the same values as `Int4.decode`."""

import triton
import triton.language as tl

from hiqcache.numerics.tiles import decode_groups, encode_groups

GROUP = tl.constexpr(16)


@triton.jit
def encode(values, DIM: tl.constexpr):
    """`[rows, dim]` BF16 -> codes, bytes of groups, bytes of heads."""
    return encode_groups(values, GROUP, DIM)


@triton.jit
def decode(codes, group, head, DIM: tl.constexpr):
    """Codes, bytes of groups, bytes of heads -> `[rows, dim]` BF16."""
    return decode_groups(codes, group, head, GROUP, DIM)
