"""The hooks that serve a representation, in the order in which a server meets them.

Each does nothing for a server that asked for none. The ones that hear what was asked for are in asking.py.
"""

import functools
import gc
import logging
import multiprocessing
import os
from collections.abc import Callable
from contextvars import ContextVar
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

import attrs
import torch
import zmq
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.entrypoints.engine import Engine, SchedulerInitResult
from sglang.srt.mem_cache.device_pool_info import MHABufferInfo
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import kill_process_tree

from hiqcache import __version__, registry
from hiqcache.geometry import HiqcacheError
from hiqcache.sglang import dump, key_biases, nodes, proof, rules, support
from hiqcache.sglang.choice import Choice, Refused, chosen, settle
from hiqcache.sglang.metrics import Metrics
from hiqcache.sglang.pool import RepresentationHostPool, geometry_of
from hiqcache.sglang.support import Hook

logger = logging.getLogger(__name__)

_ABOUT_SETTINGS = (HiqcacheError, ValueError, NotImplementedError, MemoryError, OSError)
"""Exceptions by which SGLang and hiqcache tell a user of settings that cannot be served."""

_ASSEMBLER = logging.getLogger("sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler")

REAP_SECONDS = 5.0
"""To wait for a killed process to be gone."""

_building: ContextVar[Choice | None] = ContextVar("hiqcache_building", default=None)
"""The choice of the server whose KV cache this process is building."""


# -- the launcher ------------------------------------------------------------------------------------------------------


def around_launch_scheduler_processes(
    original: Callable, cls: type[Engine], server_args: ServerArgs, *args: Any, **kwargs: Any
) -> tuple[SchedulerInitResult, list | None]:
    """Check the resolved settings before any scheduler starts, and the schedulers before anything is served."""
    settle(server_args, {})  # an engine may have a way of its own up to here
    choice = chosen(server_args)
    if choice is None:
        return original(cls, server_args, *args, **kwargs)
    try:
        settings = resolving_view(server_args)
        broken = list(rules.violations(settings))
        if choice.dump_dir is not None:
            broken += dump.violations(settings)
            dump.add_route()
        if broken:
            raise Refused("\n".join(f"  - {violation}" for violation in broken))
    except (HiqcacheError, AttributeError) as error:
        choice.refuse(error)

    children, contexts = multiprocessing.active_children(), _socket_contexts()
    result, processes = original(cls, server_args, *args, **kwargs)
    wait_for_ready = result.wait_for_ready

    def wait_and_verify() -> None:
        try:
            wait_for_ready()
            proof.verify(choice, result.scheduler_infos)
        except Exception as error:
            _undo_launch(children, contexts)
            if isinstance(error, RuntimeError):
                error = f"A scheduler stopped while it started; its reason is in the log above. ({error})"
            choice.refuse(error)
        key_biases.tell(result.scheduler_infos)

    result.wait_for_ready = wait_and_verify
    return result, processes


def _undo_launch(children_before: list[BaseProcess], contexts_before: list[zmq.Context]) -> None:
    """Stop what a launch started, by `multiprocessing` all of it, so that the process around it can go on, or end."""
    for child in multiprocessing.active_children():
        if child not in children_before and child.pid is not None:
            kill_process_tree(child.pid)
            child.join(REAP_SECONDS)
    for context in _socket_contexts():
        # Sockets with words for a scheduler that is gone would hold this process when it ends.
        if not any(context is other for other in contexts_before):
            context.destroy(linger=0)


def _socket_contexts() -> list[zmq.Context]:
    return [found for found in gc.get_objects() if issubclass(type(found), zmq.Context)]


# -- the scheduler: building the pool --------------------------------------------------------------------------------


def around_build_kv_cache(original: Callable, *args: Any, server_args: ServerArgs, **kwargs: Any) -> Any:
    """Build with our pool, and go no further with any other."""
    launched = chosen(server_args) is not None
    try:
        settle(server_args, {})
        if not launched and (choice := chosen(server_args)) is not None:
            choice.refuse("Its scheduler was started past SGLang's Engine, so that nobody would verify it.")
    except (HiqcacheError, SystemExit) as error:
        _stop(str(error), error)
    choice = chosen(server_args)
    if choice is None:
        return original(*args, server_args=server_args, **kwargs)
    token = _building.set(choice)
    _ASSEMBLER.addFilter(_without_traceback)
    try:
        return _build(choice, original, *args, server_args=server_args, **kwargs)
    except Exception as error:
        if _is_a_bug(error):
            nodes.give_up(f"{type(error).__name__}: {error}")
            raise
        logger.debug("hiqcache: while the KV cache was built", exc_info=True)
        whose = "" if isinstance(error, HiqcacheError) else "SGLang cannot build its KV cache: "
        _stop(f"hiqcache: host representation {choice.name!r} ({choice.source}): {whose}{error}", error)
    finally:
        _ASSEMBLER.removeFilter(_without_traceback)
        _building.reset(token)


def _build(choice: Choice, original: Callable, *args: Any, tp_worker: Any, **kwargs: Any) -> Any:
    proof.plain_pool(tp_worker.model_runner.token_to_kv_pool)
    tag = registry.get(choice.name).format_tag
    nodes.compare(nodes.ASKED, {"representation": choice.name, "byte format": tag, "hiqcache": __version__})
    result = original(*args, tp_worker=tp_worker, **kwargs)
    pool = proof.pool_in_force(result.tree_cache)
    stage = f"bytes per token in pipeline stage {get_parallel().pp_rank}"
    nodes.compare(nodes.BUILT, {"tokens of L2": pool.size, stage: pool.size_per_token})
    key_biases.scale(tp_worker.model_runner, pool)
    return result


def _is_a_bug(error: Exception) -> bool:
    """Whether a traceback says more than a sentence."""
    if support.untested() or isinstance(error, _ABOUT_SETTINGS):
        return False
    return not (isinstance(error, AssertionError) and str(error))


def _without_traceback(record: logging.LogRecord) -> bool:
    """A log filter: SGLang's assembler logs what it raises, and a sentence is on its way."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, Exception) and not _is_a_bug(error):
        record.exc_info = None
    return True


def _stop(text: str, error: BaseException) -> NoReturn:
    """End this scheduler with a sentence."""
    nodes.give_up(text)
    if get_parallel().num_dp_ranks > 1:
        raise Refused(text) from error  # the data-parallel controller notices an exception only
    logger.error(text)
    logging.shutdown()
    # Not SystemExit: threads that SGLang has started by now would keep the process, and its launcher waiting.
    os._exit(1)


def around_estimate_hicache_bytes(original: Callable, params: Any, draft_plan: Any) -> int:
    """Count encoded bytes where SGLang fits its default ratio to the free host memory."""
    device_bytes = original(params, draft_plan)
    choice = _building.get()
    if choice is None:
        return device_bytes
    infos = params.token_to_kv_pool_allocator.get_kvcache().get_device_pool_infos()
    if len(infos) != 1 or not isinstance(infos[0].buffer_info, MHABufferInfo):
        return device_bytes  # not a pool we replace: the server will be refused for it, with the reason
    geometry = geometry_of(infos[0].buffer_info, params.page_size)
    encoded = registry.get(choice.name)(geometry).bytes_per_token()
    return device_bytes * encoded // geometry.device_bytes_per_token


def around_get_mha_host_pool_cls(original: Callable, buffer_info: MHABufferInfo) -> Callable:
    """Hand out our pool where SGLang would build its plain MHA one."""
    sglang_class = original(buffer_info)
    choice = _building.get()
    if choice is None:
        return sglang_class
    if sglang_class is not MHATokenToKVPoolHost:
        raise Refused(f"SGLang chose {sglang_class.__name__} for this model; allowed: {MHATokenToKVPoolHost.__name__}")
    return functools.partial(RepresentationHostPool, representation=registry.get(choice.name))


# -- the scheduler: serving ------------------------------------------------------------------------------------------


def after_scheduler_init_info(info: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    """Report what is really in force."""
    if chosen(scheduler.server_args) is None:
        return info
    pool = proof.pool_in_force(scheduler.tree_cache)
    report = proof.Report.of(pool)
    if scheduler.metrics_collector_context.current_scheduler_metrics_enabled:
        scheduler.metrics_collector._hiqcache = Metrics(scheduler.metrics_collector, report, pool.transfer)
    info[proof.KEY] = [attrs.asdict(report)]
    info[key_biases.KEY] = key_biases.findings(pool)
    return info


def after_controller_init_info(info: dict[str, Any], controller: Any) -> dict[str, Any]:
    """Pass on the reports of every replica; one that sent none is passed on as that."""
    if chosen(controller.server_args) is not None:
        reports = (entry.get(proof.KEY) or [None] for entry in controller._scheduler_init_infos)
        info[proof.KEY] = [report for replica in reports for report in replica]
        info[key_biases.KEY] = key_biases.merged(controller._scheduler_init_infos)
    return info


def around_move_pool_indices(
    original: Callable,
    controller: Any,
    host_pool: Any,
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    *,
    write_back_jit: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Leave host slots on the CPU where the transfer computes addresses there; SGLang would upload them first."""
    if type(host_pool) is not RepresentationHostPool:
        return original(controller, host_pool, host_indices, device_indices, write_back_jit=write_back_jit)
    if host_indices.device.type == "cpu":
        host_indices = host_indices.to(host_pool.transfer.host_indices_device, non_blocking=True)
    return host_indices, device_indices


def after_log_stats(result: None, collector: Any, stats: Any) -> None:
    """Bring our series on the `/metrics` page up to date with SGLang's."""
    if (metrics := getattr(collector, "_hiqcache", None)) is not None:
        metrics.update()


def around_attach_storage_backend(original: Callable, tree_cache: Any, *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """`PUT /hicache/storage-backend` would write encoded pages under BF16 keys."""
    group = tree_cache.host_pool_group
    if group is not None and any(type(entry.host_pool) is RepresentationHostPool for entry in group.entries):
        name = group.entries[0].host_pool.representation.name
        return False, f"hiqcache: L2 holds {name!r} pages, which no storage backend (L3) can take yet"
    return original(tree_cache, *args, **kwargs)


def around_handle_dumper_control(original: Callable, scheduler: Any, request: Any) -> None:
    """Begin a dump of L2, or say how far it is."""
    dump.handle(original, scheduler, request)


def after_check_hicache_events(result: None, tree_cache: Any) -> None:
    """Take a dump further; all ranks come by here in the same step."""
    pool = dump.pool_of(tree_cache)
    if pool is not None and pool.dump is not None:
        pool.dump.advance()


def around_evict_host(original: Callable, tree_cache: Any, *args: Any, **kwargs: Any) -> int:
    """Evict nothing during a dump: pages that are held would be given up, and nothing could take their place."""
    pool = dump.pool_of(tree_cache)
    if pool is not None and pool.holding:
        return 0
    return original(tree_cache, *args, **kwargs)


HOOKS = (
    Hook(
        "sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes",
        around_launch_scheduler_processes,
        HookType.AROUND,
    ),
    Hook("sglang.srt.mem_cache.kv_cache_builder.build_kv_cache", around_build_kv_cache, HookType.AROUND),
    Hook(
        "sglang.srt.mem_cache.hicache_auto_size._estimate_hicache_bytes",
        around_estimate_hicache_bytes,
        HookType.AROUND,
    ),
    Hook("sglang.srt.mem_cache.pool_host.mha.get_mha_host_pool_cls", around_get_mha_host_pool_cls, HookType.AROUND),
    Hook("sglang.srt.managers.scheduler.Scheduler.get_init_info", after_scheduler_init_info, HookType.AFTER),
    Hook(
        "sglang.srt.managers.data_parallel_controller.DataParallelController.get_init_info",
        after_controller_init_info,
        HookType.AFTER,
    ),
    Hook(
        "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController._move_pool_indices",
        around_move_pool_indices,
        HookType.AROUND,
    ),
    Hook(
        "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector.log_stats",
        after_log_stats,
        HookType.AFTER,
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.handle_dumper_control", around_handle_dumper_control, HookType.AROUND
    ),
    Hook(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.check_hicache_events",
        after_check_hicache_events,
        HookType.AFTER,
    ),
    Hook("sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.evict_host", around_evict_host, HookType.AROUND),
    Hook(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.attach_storage_backend",
        around_attach_storage_backend,
        HookType.AROUND,
    ),
)
