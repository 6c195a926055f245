"""nvfp4: the format that TensorRT-LLM keeps cold pages in, to compare with; not a format of hiqcache.

\b
    pip install --no-deps --target /tmp/nvfp4 tools/nvfp4
    PYTHONPATH=/tmp/nvfp4 python tools/quality.py run --representation nvfp4 --out quality.json

A group of 16 neighbouring values has one scale in FP8 E4M3, and each of its values is an FP4 E2M1 number times it:

    s = e4m3(max|x| / 6)        q = e2m1(x / s)        x^ = q * s

Both round half to even and saturate. TensorRT-LLM multiplies scales by a float32 number of each layer, which comes from
a calibrated checkpoint and is 1 otherwise; here it is 1. It divides by approximate reciprocals where this divides
exactly.

Two promises of a representation do not hold, because they do not in NVFP4. Values above 448 x 6 = 2,688 saturate. And
where max|x| is below 0.09, E4M3's steps are so coarse that the largest value may not be stored as 6 s; encoding again
then finds another scale, and other bytes.
"""

import math
from collections.abc import Iterator

import torch

from hiqcache.geometry import KVGeometry, Part, Violation
from hiqcache.representation import BlockLayout, HostRepresentation, padded_bytes

ALIGN = 128
"""Bytes; a block is padded to a multiple of it, as int8's are."""
GROUP = 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the codes 0 to 7; 8 more is the same with a minus."""
LARGEST_E4M3 = 448.0


def to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Codes `[...]` uint8 of float32 values: the nearest number, of two as near the one with the even code."""
    magnitude = x.abs()
    codes = torch.zeros_like(x, dtype=torch.uint8)
    for code in range(1, len(E2M1)):
        middle = (E2M1[code - 1] + E2M1[code]) / 2
        codes += magnitude >= middle if code % 2 == 0 else magnitude > middle
    return codes | x.signbit().to(torch.uint8) << 3


def from_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Float32 values of codes."""
    return torch.tensor([*E2M1, *(-value for value in E2M1)], device=codes.device)[codes.int()]


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """The nearest E4M3 number to each non-negative float32; 448 for all above it."""
    return x.clamp(max=LARGEST_E4M3).to(torch.float8_e4m3fn)


class NVFP4(HostRepresentation):
    """Block format: codes of all tokens and heads, two in a byte, the first in its low half; E4M3 scales; zeros.

    A head with infinity or NaN in it has NaN scales and decodes to NaN throughout.
    """

    name = "nvfp4"
    format_tag = "nvfp4-v1"
    summary = "NVFP4 as TensorRT-LLM's cold pages, global scale 1; to compare with"

    @classmethod
    def requirements(cls, geometry: KVGeometry) -> Iterator[Violation]:
        yield from super().requirements(geometry)
        for dim in sorted({geometry.head_dim, geometry.v_head_dim}):
            if dim % GROUP:
                yield Violation(
                    rule="values of a head, in groups",
                    seen=str(dim),
                    allowed=f"a multiple of {GROUP}",
                    flag="the model (its head_dim)",
                )
            tokens, values = geometry.page_size, geometry.page_size * geometry.heads * dim
            if (taken := padded_bytes(values // 2 + values // GROUP, tokens, ALIGN)) >= (bf16 := 2 * values):
                yield Violation(
                    rule="bytes of a block of K or V",
                    seen=f"{taken} ({geometry.heads} local KV heads x {dim}, page size {tokens}, padded)",
                    allowed=f"fewer than BF16's {bf16}",
                    flag="--page-size (a larger one)",
                )

    def block_layout(self, part: Part) -> BlockLayout:
        heads, dim = self.geometry.heads, self.geometry.dim(part)
        return BlockLayout.arrays(
            self.geometry.page_size,
            ALIGN,
            codes=(torch.uint8, (heads, dim // 2)),
            scales=(torch.float8_e4m3fn, (heads, dim // GROUP)),
        )

    def encode(self, values: torch.Tensor, part: Part, out: torch.Tensor) -> None:
        layout, x = self.layouts[part], values.float()
        finite = x.isfinite().all(-1, keepdim=True)
        groups = x.masked_fill(~finite, 0).unflatten(-1, (-1, GROUP))
        scales = to_e4m3(groups.abs().amax(-1) / E2M1[-1])
        steps = scales.float()[..., None]
        codes = to_e2m1(torch.where(steps > 0, groups / steps, groups * 0)).flatten(-2)
        layout.view(out, "codes").copy_(codes[..., ::2] | codes[..., 1::2] << 4)
        layout.view(out, "scales").copy_(scales.float().masked_fill(~finite, math.nan).to(torch.float8_e4m3fn))
        if "padding" in layout:
            layout.view(out, "padding").zero_()

    def decode(self, blocks: torch.Tensor, part: Part, out: torch.Tensor) -> None:
        layout = self.layouts[part]
        packed = layout.view(blocks, "codes")
        codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
        scales = layout.view(blocks, "scales").float().repeat_interleave(GROUP, -1)
        out.copy_(from_e2m1(codes) * scales).masked_fill_(scales.isnan(), math.nan)
