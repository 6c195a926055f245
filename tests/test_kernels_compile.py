"""Every GPU kernel compiles with the installed Triton for each generation of NVIDIA GPUs. Needs no GPU."""

import pathlib
from typing import Any

import pytest
import torch
import transfers
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from hiqcache import registry
from hiqcache.transfer.codec import BlockCodec
from hiqcache.transfer.launch import Launcher
from hiqcache.transfer.movers import KernelMover

CAPABILITIES = {80: "A100", 90: "H100, H200", 100: "B200"}
"""Compute capability, in tenths, of what is compiled for."""
LEAST_SHARED_MEMORY = 99 << 10
"""Bytes that one program may have on each NVIDIA GPU since compute capability 8.0."""
PAGE_SIZE = 64


class Absent:
    """What Triton asks of its driver before it compiles, for a GPU that is not there."""

    def __init__(self, capability: int):
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # Triton keeps what it compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_compiles(capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path):
    compiled: dict[str, list[Any]] = {}

    def compile_only(launcher: Launcher, grid: tuple[int, int, int], stream: None, *args: object) -> None:
        kernel = launcher._kernel.warmup(*args, grid=grid, **launcher._options)
        compiled.setdefault(kernel.metadata.name, []).append(kernel)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", Absent(capability))
    monkeypatch.setattr(Launcher, "__call__", compile_only)
    built_in = [
        cls for name in registry.names() if (cls := registry.get(name)).__module__.startswith("hiqcache.backends.")
    ]
    for cls in built_in:
        representation = cls(transfers.geometry((8, 128), PAGE_SIZE, layers=1))
        generator = torch.Generator().manual_seed(0)
        arena = transfers.random_arena(representation, 1, "page_first", generator)
        rows = transfers.random_rows(representation.geometry, PAGE_SIZE, generator)
        codec = BlockCodec(representation, arena.shape, rows)
        slots, staging = torch.arange(PAGE_SIZE), torch.empty(1 << 20, dtype=torch.uint8)
        codec.encode(slots.view(1, PAGE_SIZE), range(1), staging, None)
        codec.decode(slots.view(1, PAGE_SIZE), range(1), staging, None)
        for to_host in (True, False):
            mover = KernelMover(arena, PAGE_SIZE, torch.device("cpu"), to_host)
            mover.move(slice(0, 1), range(1), staging, None)
    assert {name: len(kernels) >= len(built_in) for name, kernels in compiled.items()} == {
        "encode_blocks": True,
        "decode_blocks": True,
        "move_blocks": True,
    }
    for kernel in (kernel for kernels in compiled.values() for kernel in kernels):
        assert kernel.metadata.target.arch == capability
        assert kernel.metadata.shared <= LEAST_SHARED_MEMORY
        assert kernel.asm["cubin"][:4] == b"\x7fELF", f"Triton {triton.__version__} made no machine code"
