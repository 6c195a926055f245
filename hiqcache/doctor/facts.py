"""A machine as it was found."""

import contextlib
import importlib.metadata
import json
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import torch
from attrs import converters, field, frozen

from hiqcache.sglang.versions import ALLOW_UNTESTED

PLUGIN = "hiqcache"
PLUGIN_GROUP = "sglang.srt.plugins"
PLUGIN_FILTER = "SGLANG_PLUGINS"

PROBE_BYTES = 256 << 20
"""Host memory that is pinned for a moment to see whether that works."""
ASK_SECONDS = 300
"""How long SGLang may take to be imported."""


@frozen(kw_only=True)
class SGLang:
    """What an installed SGLang says of itself once its plugins are loaded; None where it was not reached.

    Attributes:
        error: what stopped the questions.
        log: warnings and errors from loading plugins.
        missing_hooks: our hooks' targets that could not be hooked.
        machine_bytes: host memory that the machine has available.
        cgroup_bytes: what the process's cgroups have left; None where they set no limit, or none that is known.
        cgroup_error: why their limits cannot be known.
        reserve_bytes: what SGLang leaves free of the smaller of the two.
        compilers: C++ and CUDA compiler of SGLang's own kernels; none without a GPU.
    """

    error: str | None = None
    log: tuple[str, ...] = field(default=(), converter=tuple)
    missing_hooks: tuple[str, ...] | None = field(default=None, converter=converters.optional(tuple))
    machine_bytes: int | None = None
    cgroup_bytes: int | None = None
    cgroup_error: str | None = None
    reserve_bytes: int | None = None
    compilers: tuple[str, ...] = field(default=(), converter=tuple)


@frozen
class Gpu:
    """A GPU that PyTorch can use.

    Attributes:
        name: the product.
        capability: compute capability.
        memory_bytes: its memory.
    """

    name: str
    capability: tuple[int, int]
    memory_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.name}, {self.memory_bytes / 1e9:.0f} GB, compute capability {'.'.join(map(str, self.capability))}"
        )


@frozen(kw_only=True)
class Facts:
    """A machine as it was found.

    Attributes:
        sglang_version: None where SGLang is not installed.
        allow_untested: whether another version than the tested ones is let through.
        plugins: our entry points that SGLang would find.
        plugin_filter: `SGLANG_PLUGINS`.
        sglang: what SGLang says; None where it is not installed.
        torch_build: the CUDA version that PyTorch is built for, or what else it is built for.
        gpus: those that PyTorch can use.
        driver: version of NVIDIA's driver; None where `nvidia-smi` did not say.
        driver_gpus: GPUs that the driver lists.
        batched_copies: whether the driver has the copies that the fast transfer uses.
        found: program -> where it is; None where it is not.
        memlock_bytes: `ulimit -l`; None where there is no limit.
        pinning_error: why CUDA refused to pin `PROBE_BYTES` of host memory; None where it did not.
        broken: representation -> what is wrong with its package; sound ones are left out.
    """

    sglang_version: str | None = None
    allow_untested: bool = False
    plugins: int = 1
    plugin_filter: str = ""
    sglang: SGLang | None = None
    torch_build: str = "CPU"
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    driver_gpus: int = 0
    batched_copies: bool = False
    found: Mapping[str, str | None] = field(factory=dict)
    memlock_bytes: int | None = None
    pinning_error: str | None = None
    broken: Mapping[str, str] = field(factory=dict)


def observe() -> Facts:
    """This machine, this Python and this environment; takes as long as importing SGLang does."""
    version = _version("sglang")
    sglang = None if version is None else ask_sglang([sys.executable, "-m", "hiqcache.sglang.doctor"])
    gpus = _gpus()
    driver = _driver_versions()
    return Facts(
        sglang_version=version,
        allow_untested=os.environ.get(ALLOW_UNTESTED) == "1",
        plugins=len(importlib.metadata.entry_points(group=PLUGIN_GROUP, name=PLUGIN)),
        plugin_filter=os.environ.get(PLUGIN_FILTER, ""),
        sglang=sglang,
        torch_build=_torch_build(),
        gpus=gpus,
        driver=driver[0] if driver else None,
        driver_gpus=len(driver),
        batched_copies=bool(gpus) and _batched_copies(),
        found=_programs(sglang),
        memlock_bytes=_memlock(),
        pinning_error=_pinning_error() if gpus else None,
        broken=_broken_representations(),
    )


def ask_sglang(command: list[str]) -> SGLang:
    """What `hiqcache.sglang.doctor` answers; whatever happens to it, an answer comes back."""
    variables = dict(os.environ)
    if chosen := variables.get(PLUGIN_FILTER):  # that it leaves us out is a finding of its own
        variables[PLUGIN_FILTER] = f"{chosen},{PLUGIN}"
    try:
        child = subprocess.run(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",  # a library's last words may be in any encoding
            timeout=ASK_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return SGLang(error=f"importing SGLang took more than {ASK_SECONDS} seconds")
    try:
        answer = json.loads(child.stdout)
    except ValueError:
        words = (child.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return SGLang(error=f"importing SGLang ended its process with status {child.returncode}: {words}")
    return SGLang(**answer)


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _torch_build() -> str:
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return f"ROCm {torch.version.hip}" if torch.version.hip else "CPU"


def _gpus() -> tuple[Gpu, ...]:
    if not torch.cuda.is_available():
        return ()
    properties = (torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count()))
    return tuple(Gpu(p.name, (p.major, p.minor), p.total_memory) for p in properties)


def _driver_versions() -> list[str]:
    """The driver's version, once for each GPU that it lists."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        smi = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return []
    return smi.stdout.split()


def _batched_copies() -> bool:
    from hiqcache.transfer import copy_engine

    try:
        return copy_engine.available()
    except OSError:
        return False


def _programs(sglang: SGLang | None) -> dict[str, str | None]:
    compilers = sglang.compilers if sglang else ()
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    c_compilers = [os.environ["CC"]] if "CC" in os.environ else ["clang", "gcc"]  # as Triton looks for one
    return {
        "C compiler": next(filter(None, map(shutil.which, c_compilers)), None),
        "Python.h": str(header) if header.exists() else None,
        **{program: shutil.which(program) for program in (*compilers, "ninja")},
    }


def _memlock() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _pinning_error() -> str | None:
    runtime, buffer = torch.cuda.cudart(), torch.empty(PROBE_BYTES, dtype=torch.uint8)
    assert runtime is not None  # it is only where PyTorch is built without CUDA
    code = int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
    if code:
        return f"cudaHostRegister failed with error {code}"
    runtime.cudaHostUnregister(buffer.data_ptr())
    return None


def _broken_representations() -> dict[str, str]:
    from hiqcache import registry
    from hiqcache.geometry import HiqcacheError

    problems = {}
    for name in registry.names():
        try:
            registry.get(name)
        except HiqcacheError as error:
            problems[name] = str(error)
    return problems
