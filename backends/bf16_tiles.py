"""bf16 for the GPU kernels: the values are the payload."""

import triton
import triton.language as tl  # noqa: F401 (Triton's interpreter looks for it beside a kernel)


@triton.jit
def encode(values):
    """`[rows, dim]` BF16 -> payload."""
    return (values,)


@triton.jit
def decode(payload):
    """Payload `[rows, dim]` BF16 -> values."""
    return payload
