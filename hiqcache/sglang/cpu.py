"""SGLang on a machine with no NVIDIA driver, for trying a representation and for tests.

SGLang's scheduler, radix tree and HiCache run there as they are, on PyTorch's CPU kernels, once three things are
arranged: a stand-in for the `sgl_kernel` package, whose binary cannot be loaded; `SGLANG_USE_CPU_ENGINE=1`; and
settings that ask for nothing CUDA-only. It is slow, and what it generates is what PyTorch's CPU kernels compute.

    python -m hiqcache.sglang.cpu --model-path MODEL --enable-hierarchical-cache --hicache-representation int8

starts a server; `prepare()` before `import sglang` does the same for `sgl.Engine(**ENGINE_ARGS, ...)`.
"""

import os
import pathlib
import sys
from typing import Any

import psutil

STANDIN = pathlib.Path(__file__).parent / "standin"
"""Holds the `sgl_kernel` stand-in; goes first on PYTHONPATH."""

ENGINE_ARGS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "sleep_on_idle": True,
}
"""Settings of `sgl.Engine` that SGLang needs on a CPU; the last leaves the cores to others between requests."""

FLOAT32 = {"dtype": "float32", "kv_cache_dtype": "bf16"}
"""More such settings, for a model of some size: a CPU without BF16 instructions computes six times faster in float32.
KV stays in BF16."""

VARIABLE = "SGLANG_USE_CPU_ENGINE"


def environment() -> dict[str, str]:
    """Variables that a SGLang process on a machine with no NVIDIA driver needs."""
    path = os.environ.get("PYTHONPATH", "")
    return {
        VARIABLE: "1",
        "PYTHONPATH": os.pathsep.join([str(STANDIN), *filter(None, [path])]),
        # Threads that wait for work give their core to the others: SGLang runs several processes on few cores.
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def prepare() -> None:
    """Make this process, and those it starts, able to `import sglang` with no NVIDIA driver.

    Raises:
        RuntimeError: `sgl_kernel` is imported already.
    """
    if "sgl_kernel" in sys.modules:
        raise RuntimeError("hiqcache.sglang.cpu.prepare() comes before the first `import sglang`")
    os.environ.update(environment())
    sys.path.insert(0, str(STANDIN))


def adapt() -> None:
    """On the CPU engine: lower SGLang's fixed 10 GiB host-memory reserve to a quarter of a small machine's memory."""
    if os.environ.get(VARIABLE) != "1":
        return
    from sglang.srt.mem_cache.pool_host import base

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = min(
        base.HICACHE_HOST_MEMORY_RESERVE_BYTES, psutil.virtual_memory().total // 4
    )


def words(settings: dict[str, Any]) -> list[str]:
    """Settings of `sgl.Engine` as words of a command line."""
    found = []
    for name, value in settings.items():
        found += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return found


def command_line(arguments: list[str]) -> list[str]:
    """The command of a SGLang server with `arguments` on this machine's CPU."""
    return [sys.executable, "-m", "sglang.launch_server", *words(ENGINE_ARGS), *arguments]


if __name__ == "__main__":
    os.environ.update(environment())
    command = command_line(sys.argv[1:])
    os.execv(command[0], command)
