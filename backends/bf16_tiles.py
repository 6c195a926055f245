"""bf16 for the GPU kernels: the values are the payload."""

import triton
import triton.language as tl


@triton.jit
def encode(values, DIM: tl.constexpr):
    """`[rows, dim]` BF16 -> payload."""
    return (values,)


@triton.jit
def decode(payload, DIM: tl.constexpr):
    """Payload `[rows, dim]` BF16 -> values."""
    return payload
