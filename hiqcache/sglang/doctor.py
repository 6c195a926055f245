"""What `hiqcache doctor` asks SGLang, in a process of its own: `python -m hiqcache.sglang.doctor` prints JSON.

Importing SGLang takes half a minute, needs a stand-in where there is no driver, may fail in any way, and its plugins
change it; none of that should happen to the command.
"""

import json
import logging
import os
import sys
from typing import Any


def main() -> None:
    # Standard output is for the answer alone: what SGLang prints there goes to standard error.
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    facts: dict[str, Any] = {}
    try:
        _ask(facts)
    except (Exception, SystemExit) as error:
        facts["error"] = f"{type(error).__name__}: {error}"
    with answer:
        json.dump(facts, answer)


def _ask(facts: dict[str, Any]) -> None:
    """Fill in the fields of `hiqcache.doctor.SGLang`, as far as one gets."""
    import psutil
    import torch

    from hiqcache.sglang import cpu

    if not torch.cuda.is_available():
        cpu.prepare()
    complaints = _Complaints()
    logging.getLogger("sglang.srt.plugins").addHandler(complaints)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    facts["log"] = complaints.texts

    from hiqcache.sglang import support

    missing, problem = support.missing_hooks(), support.problem()
    if problem and not missing:
        raise RuntimeError(problem)
    facts["missing_hooks"] = missing

    from sglang.srt.mem_cache.host_memory import _cgroup_memory_headroom
    from sglang.srt.mem_cache.pool_host import base

    # What SGLang's `available_host_memory_bytes` takes the smaller one of.
    facts["machine_bytes"] = psutil.virtual_memory().available
    try:
        facts["cgroup_bytes"] = _cgroup_memory_headroom()
    except (OSError, RuntimeError) as error:
        facts["cgroup_error"] = str(error)
    facts["reserve_bytes"] = base.HICACHE_HOST_MEMORY_RESERVE_BYTES

    if torch.cuda.is_available():
        from sglang.kernels.jit.utils.compile import toolchain

        facts["compilers"] = toolchain.compilers()


class _Complaints(logging.Handler):
    """Keeps warnings and errors."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.texts.append(record.getMessage() + (f": {type(error).__name__}: {error}" if error else ""))


if __name__ == "__main__":
    main()
