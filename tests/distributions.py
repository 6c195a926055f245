"""Somebody else's installed package, as importlib.metadata and import see it."""

from collections.abc import Mapping
from pathlib import Path

HALF = """
import torch
from hiqcache.representation import BlockLayout, HostRepresentation

class Half(HostRepresentation):
    name = "half"
    format_tag = "half-v1"
    summary = "[the upper byte] of each BF16"

    def block_layout(self, part):
        shape = (self.geometry.heads, self.geometry.dim(part))
        return BlockLayout.records(self.geometry.page_size, upper=(torch.uint8, shape))

    def encode(self, values, part, out):
        self.layouts[part].view(out, "upper").copy_(values.contiguous().view(torch.uint8)[..., 1::2])

    def decode(self, blocks, part, out):
        out.zero_()
        out.view(torch.uint8)[..., 1::2].copy_(self.layouts[part].view(blocks, "upper"))
"""
"""Source of a complete representation called `half`."""


def install(site: Path, name: str, modules: Mapping[str, str], representations: Mapping[str, str]) -> None:
    """Lay down what an installer would.

    Args:
        site: folder on sys.path.
        name: the distribution's name; its version is 1.0.
        modules: module name -> source.
        representations: entry points of hiqcache's group, name -> `module:Class`.
    """
    for module, source in modules.items():
        (site / f"{module}.py").write_text(source)
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    points = "".join(f"{point} = {value}\n" for point, value in representations.items())
    (info / "entry_points.txt").write_text(f"[hiqcache.representations]\n{points}")
