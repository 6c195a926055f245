"""What the facts mean: every check is a function of the facts and of what the machine is wanted for."""

import enum
from collections.abc import Callable, Iterator, Mapping

from attrs import field, frozen

from hiqcache.capacity import Capacity
from hiqcache.doctor.facts import PLUGIN, PLUGIN_FILTER, PLUGIN_GROUP, PROBE_BYTES, Facts
from hiqcache.sglang.versions import ALLOW_UNTESTED, TESTED_SGLANG

CAPABILITY = (8, 0)
"""Compute capability from which a GPU has BF16 arithmetic."""


class Status(enum.Enum):
    """How a check ended; one that failed means that the machine is not ready."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@frozen
class Finding:
    """What one check found.

    Attributes:
        check: what was checked.
        status: how it ended.
        seen: what was found.
        advice: what to do about it; empty where there is nothing to do.
    """

    check: str
    status: Status
    seen: str
    advice: str = ""


@frozen(kw_only=True)
class Request:
    """What the machine is wanted for.

    Attributes:
        size: `--hicache-size`, GB of 10**9 bytes for each rank; None where SGLang is to choose.
        tp_size: ranks.
        model_error: why the model cannot be served at all.
        verdicts: representation -> what it makes of the model, or every reason why it cannot hold it.
    """

    size: int | None = None
    tp_size: int = 1
    model_error: str | None = None
    verdicts: Mapping[str, Capacity | list[str]] = field(factory=dict)


def diagnose(facts: Facts, request: Request) -> list[Finding]:
    """Every check's finding, in the order in which a server would meet what was checked."""
    checks: tuple[Callable[[Facts, Request], Iterator[Finding]], ...] = (
        _sglang,
        _plugin,
        _hooks,
        _representations,
        _gpu,
        _driver,
        _triton_compiler,
        _sglang_compiler,
        _host_memory,
        _pinned_memory,
        _model,
    )
    return [finding for check in checks for finding in check(facts, request)]


def ready(findings: list[Finding]) -> bool:
    """Whether nothing failed."""
    return all(finding.status is not Status.FAILED for finding in findings)


def _sglang(facts: Facts, request: Request) -> Iterator[Finding]:
    tested = ", ".join(TESTED_SGLANG)
    install = f"pip install 'sglang=={TESTED_SGLANG[-1]}'"
    if facts.sglang_version is None:
        yield Finding("SGLang", Status.FAILED, "not installed in this Python", install)
    elif facts.sglang_version in TESTED_SGLANG:
        yield Finding("SGLang", Status.OK, f"{facts.sglang_version}, tested")
    elif facts.allow_untested:
        yield Finding("SGLang", Status.WARNING, f"{facts.sglang_version}, untested; {ALLOW_UNTESTED}=1 is set", install)
    else:
        yield Finding("SGLang", Status.FAILED, f"{facts.sglang_version}; tested: {tested}", install)


def _plugin(facts: Facts, request: Request) -> Iterator[Finding]:
    allowed = {name.strip() for name in facts.plugin_filter.split(",")} - {""}
    if not facts.plugins:
        advice = "pip install hiqcache, in the Python that runs SGLang"
        yield Finding("plugin", Status.FAILED, f"no entry point {PLUGIN!r} in {PLUGIN_GROUP}", advice)
    elif allowed and PLUGIN not in allowed:
        seen = f"{PLUGIN_FILTER}={facts.plugin_filter} leaves it out"
        yield Finding("plugin", Status.FAILED, seen, f"add {PLUGIN} to {PLUGIN_FILTER}, or unset it")
    else:
        yield Finding("plugin", Status.OK, "SGLang finds it")


def _hooks(facts: Facts, request: Request) -> Iterator[Finding]:
    sglang = facts.sglang
    if sglang is None:
        return
    advice = f"install a tested SGLang ({', '.join(TESTED_SGLANG)}); a server would refuse to start"
    because = f" ({'; '.join(sglang.log)})" if sglang.log else ""
    if sglang.missing_hooks is None:
        seen = f"SGLang or the plugin cannot be loaded: {sglang.error}{because}"
        yield Finding("hooks", Status.FAILED, seen, "repair what the message names")
    elif sglang.missing_hooks:
        yield Finding("hooks", Status.FAILED, f"cannot hook {', '.join(sglang.missing_hooks)}{because}", advice)
    elif sglang.log:
        yield Finding("hooks", Status.WARNING, f"all in place, but SGLang said: {'; '.join(sglang.log)}")
    else:
        yield Finding("hooks", Status.OK, "all in place")


def _representations(facts: Facts, request: Request) -> Iterator[Finding]:
    for name, problem in facts.broken.items():
        if name not in request.verdicts:  # a model's verdict says it too
            yield Finding(name, Status.WARNING, problem, "repair or uninstall that package")


def _gpu(facts: Facts, request: Request) -> Iterator[Finding]:
    if facts.gpus:
        kinds = {gpu: facts.gpus.count(gpu) for gpu in facts.gpus}
        seen = "; ".join(f"{count} x {gpu}" for gpu, count in kinds.items())
        if not facts.torch_build.startswith("CUDA"):
            seen = f"{seen}; PyTorch is built for {facts.torch_build}"
            yield Finding("GPU", Status.FAILED, seen, "only NVIDIA GPUs are supported")
        elif min(gpu.capability for gpu in facts.gpus) < CAPABILITY:
            yield Finding("GPU", Status.FAILED, seen, "BF16 KV needs compute capability 8.0 or higher")
        elif len(facts.gpus) < request.tp_size:
            yield Finding("GPU", Status.WARNING, seen, f"--tp-size {request.tp_size} needs more GPUs, or more machines")
        else:
            yield Finding("GPU", Status.OK, seen)
    elif facts.driver_gpus:
        seen = f"the driver lists {facts.driver_gpus}, PyTorch (built for {facts.torch_build}) can use none"
        advice = "install a driver and a PyTorch that fit each other; look at CUDA_VISIBLE_DEVICES"
        yield Finding("GPU", Status.FAILED, seen, advice)
    else:
        seen = "none: only the CPU engine works here, which is for trying things"
        yield Finding("GPU", Status.WARNING, seen, "python -m hiqcache.sglang.cpu --model-path ... starts a server")


def _driver(facts: Facts, request: Request) -> Iterator[Finding]:
    if not facts.gpus:
        return
    seen = f"{facts.driver or 'version unknown, as nvidia-smi does not answer'}; PyTorch for {facts.torch_build}"
    if facts.batched_copies:
        yield Finding("driver", Status.OK, seen)
    else:
        advice = "install a driver for CUDA 12.8 or later: without batched copies, transfers are slower"
        yield Finding("driver", Status.WARNING, seen, advice)


def _triton_compiler(facts: Facts, request: Request) -> Iterator[Finding]:
    if not facts.gpus:
        return
    missing = [name for name in ("C compiler", "Python.h") if not facts.found.get(name)]
    if missing:
        advice = "Triton compiles with them: install gcc (or set CC) and Python's development files (python3-dev)"
        yield Finding("Triton's compiler", Status.FAILED, f"missing: {', '.join(missing)}", advice)
    else:
        yield Finding("Triton's compiler", Status.OK, str(facts.found["C compiler"]))


def _sglang_compiler(facts: Facts, request: Request) -> Iterator[Finding]:
    if not facts.gpus or facts.sglang is None or not facts.sglang.compilers:
        return
    programs = (*facts.sglang.compilers, "ninja")
    missing = [program for program in programs if not facts.found.get(program)]
    if missing:
        advice = (
            "SGLang compiles norms, activations and more when it starts: install g++ (or set CXX), the CUDA toolkit "
            "(or set CUDA_HOME) and ninja, and put them on PATH"
        )
        yield Finding("SGLang's compilers", Status.FAILED, f"missing: {', '.join(missing)}", advice)
    else:
        yield Finding("SGLang's compilers", Status.OK, ", ".join(str(facts.found[program]) for program in programs))


def _host_memory(facts: Facts, request: Request) -> Iterator[Finding]:
    sglang = facts.sglang
    if sglang is None:
        return
    if sglang.machine_bytes is None or sglang.reserve_bytes is None:
        yield Finding("host memory", Status.WARNING, f"SGLang could not be asked: {sglang.error}", "repair that first")
        return
    available, where = sglang.machine_bytes, "on the machine"
    if sglang.cgroup_bytes is not None and sglang.cgroup_bytes < available:
        available, where = sglang.cgroup_bytes, "within the container's limit"
    most = max(0, (available - sglang.reserve_bytes) // 10**9 // request.tp_size)
    seen = (
        f"{available / 1e9:.1f} GB free {where}, of which SGLang keeps "
        f"{sglang.reserve_bytes / 1e9:.1f} GB: room for {most} GB on each of {request.tp_size} rank(s)"
    )
    if sglang.cgroup_error:
        seen += f"; the cgroups' limits are unknown ({sglang.cgroup_error})"
    if request.size is not None and request.size > most:
        advice = f"--hicache-size {most} or less" if most else "free host memory, or raise the container's limit"
        yield Finding("host memory", Status.FAILED, f"{seen}; wanted: {request.size} GB each", advice)
    elif not most:
        yield Finding("host memory", Status.FAILED, seen, "free host memory, or raise the container's limit")
    elif sglang.cgroup_error:
        advice = "give --hicache-size: SGLang sizes nothing by itself here, and nobody checks the container's limit"
        yield Finding("host memory", Status.WARNING, seen, advice)
    else:
        yield Finding("host memory", Status.OK, seen)


def _pinned_memory(facts: Facts, request: Request) -> Iterator[Finding]:
    limit = facts.memlock_bytes
    stated = "ulimit -l is unlimited" if limit is None else f"ulimit -l is {limit / 1e6:,.1f} MB"
    advice = "raise the limit: ulimit -l unlimited, or docker run --ulimit memlock=-1"
    if not facts.gpus:
        yield Finding("pinned memory", Status.OK, f"{stated}; the CPU engine pins none")
    elif facts.pinning_error:
        yield Finding("pinned memory", Status.FAILED, f"{stated}; CUDA: {facts.pinning_error}", advice)
    elif limit is None or limit < PROBE_BYTES or limit >= (request.size or 0) * 1e9:
        # With a limit below the probe, memory was pinned beyond it: it does not count.
        yield Finding("pinned memory", Status.OK, f"{stated}; CUDA pinned {PROBE_BYTES / 1e6:,.0f} MB")
    else:
        seen = f"{stated}, less than the {request.size} GB wanted; CUDA pinned {PROBE_BYTES / 1e6:,.0f} MB"
        yield Finding("pinned memory", Status.WARNING, seen, advice)


def _model(facts: Facts, request: Request) -> Iterator[Finding]:
    if request.model_error:
        yield Finding("model", Status.FAILED, request.model_error, "no representation can serve it")
    held = any(isinstance(verdict, Capacity) for verdict in request.verdicts.values())
    for name, verdict in request.verdicts.items():
        if isinstance(verdict, Capacity):
            seen = f"{verdict.bytes_per_token:,} bytes per token, {verdict.gain:.2f}x BF16's tokens"
            if request.size is not None:
                seen += f", {verdict.tokens:,} tokens in {request.size} GB"
            yield Finding(name, Status.OK, seen)
        else:
            status = Status.WARNING if held else Status.FAILED
            advice = "take another representation" if held else "no representation can hold this model"
            yield Finding(name, status, f"refused: {'; '.join(verdict)}", advice)
