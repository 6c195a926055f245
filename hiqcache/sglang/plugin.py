"""Every hook into SGLang, in the order in which a server meets them.

Each hook does nothing for a server that asked for no representation. SGLang swallows what goes wrong while hooks are
applied, so the first thing that a server with our flag does is to ask whether all of them are in place.
"""

import argparse
import functools
import gc
import logging
import os
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import attrs
import psutil
import torch
import yaml
import zmq
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.entrypoints.engine import Engine, SchedulerInitResult
from sglang.srt.mem_cache.device_pool_info import MHABufferInfo
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import kill_process_tree

from hiqcache import registry
from hiqcache.geometry import HiqcacheError
from hiqcache.sglang import cpu, dump, key_biases, proof, rules
from hiqcache.sglang.choice import ALIAS, DUMP_FLAG, FLAG, Choice, Refused, choose, chosen
from hiqcache.sglang.metrics import Metrics
from hiqcache.sglang.pool import RepresentationHostPool, geometry_of

KEYWORD = "hicache_representation"
DUMP_KEYWORD = "hicache_dump_dir"
CONFIG = "--config"

logger = logging.getLogger(__name__)

_building: ContextVar[Choice | None] = ContextVar("hiqcache_building", default=None)
"""The choice of the server whose KV cache this process is building."""


# -- the launcher: what was asked for --------------------------------------------------------------------------------


def around_prepare_server_args(original: Callable, argv: list[str]) -> ServerArgs:
    """Refuse `--config=FILE` and `--conf FILE`, which SGLang ignores, where ignoring it would drop a representation."""
    for index, argument in enumerate(argv):
        option, given, path = argument.partition("=")
        if argument == CONFIG or len(option) < len("--c") or not CONFIG.startswith(option):
            continue
        path = path if given else "".join(argv[index + 1 : index + 2])
        asked = [word for word in argv if word.startswith("--hicache-rep")] or os.environ.get(ALIAS)
        if asked or _mentions_flag(path):
            raise SystemExit(
                f"hiqcache: SGLang ignores {argument!r} in this form, and a host representation is asked for. "
                f"Write it as two words: {CONFIG} FILE."
            )
    return original(argv)


def _mentions_flag(path: str) -> bool:
    try:
        with open(path, encoding="utf-8") as file:
            keys = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return False  # SGLang does not read it either
    return isinstance(keys, dict) and KEYWORD in {str(key).replace("-", "_") for key in keys}


def after_add_cli_args(result: None, parser: argparse.ArgumentParser) -> None:
    """The flag, unless a server that is given it could not keep its promise."""
    if missing := missing_hooks():
        logger.error("hiqcache: no %s: SGLang did not apply the hooks on %s", FLAG, ", ".join(missing))
        return
    parser.add_argument(
        FLAG,
        dest=KEYWORD,
        metavar="NAME",
        default=None,
        help="How HiCache's host tier (L2) stores KV: " + ", ".join(registry.names()) + " (hiqcache plugin; "
        "`hiqcache list` describes them). Default: SGLang's own BF16 host pool. Needs --enable-hierarchical-cache.",
    )
    parser.add_argument(
        DUMP_FLAG,
        dest=DUMP_KEYWORD,
        metavar="DIR",
        default=None,
        help=f"Let `hiqcache dump` write what L2 holds to files in DIR, which exists. Needs {FLAG}.",
    )


def around_from_cli_args(original: Callable, cls: type[ServerArgs], args: argparse.Namespace) -> ServerArgs:
    """Put what the command line asked for on the record."""
    server_args = original(cls, args)
    name, dump_dir = getattr(args, KEYWORD, None), getattr(args, DUMP_KEYWORD, None)
    choose(server_args, name, source=FLAG, command_line=True, dump_dir=dump_dir)
    return server_args


def engine_server_args(original: Callable, **kwargs: Any) -> ServerArgs:
    """`sgl.Engine(hicache_representation=NAME, ...)`: take the keyword that SGLang's record does not know."""
    name, dump_dir = kwargs.pop(KEYWORD, None), kwargs.pop(DUMP_KEYWORD, None)
    server_args = original(**kwargs)
    source = f"Engine({KEYWORD}=...)"
    choose(server_args, name, source=source, command_line=False, dump_dir=dump_dir and os.fspath(dump_dir))
    return server_args


def around_launch_subprocesses(original: Callable, cls: type[Engine], server_args: ServerArgs, **kwargs: Any) -> Any:
    """Refuse engines that start schedulers in a way of their own, Ray's for one."""
    if chosen(server_args) is None:  # a record that somebody built without us: only the variable can ask
        choose(server_args, None, source=ALIAS, command_line=False)
    choice = chosen(server_args)
    ours = vars(Engine)["_launch_scheduler_processes"].__func__
    if choice is not None and cls._launch_scheduler_processes.__func__ is not ours:
        choice.refuse(f"{cls.__name__} starts schedulers that hiqcache cannot verify; allowed: {Engine.__name__}.")
    return original(cls, server_args=server_args, **kwargs)


def around_launch_scheduler_processes(
    original: Callable, cls: type[Engine], server_args: ServerArgs, *args: Any, **kwargs: Any
) -> tuple[SchedulerInitResult, list | None]:
    """Check the resolved settings before any scheduler starts, and the schedulers before anything is served."""
    choice = chosen(server_args)
    if choice is None:
        return original(cls, server_args, *args, **kwargs)
    try:
        _require_hooks()
        settings = resolving_view(server_args)
        broken = list(rules.violations(settings))
        if choice.dump_dir is not None:
            broken += dump.violations(settings)
            dump.add_route()
        if broken:
            raise Refused("\n".join(f"  - {violation}" for violation in broken))
    except (HiqcacheError, AttributeError) as error:
        choice.refuse(error)

    children, contexts = psutil.Process().children(), _socket_contexts()
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
        key_biases.warn(choice.name, result.scheduler_infos)

    result.wait_for_ready = wait_and_verify
    return result, processes


def _undo_launch(children_before: list[psutil.Process], contexts_before: list[zmq.Context]) -> None:
    """Stop what a launch started, so that the process around it can go on, or end."""
    for child in psutil.Process().children():
        if child not in children_before:
            kill_process_tree(child.pid)
    for context in _socket_contexts():
        # Sockets with words for a scheduler that is gone would hold this process when it ends.
        if not any(context is other for other in contexts_before):
            context.destroy(linger=0)


def _socket_contexts() -> list[zmq.Context]:
    return [found for found in gc.get_objects() if issubclass(type(found), zmq.Context)]


# -- the scheduler: building the pool --------------------------------------------------------------------------------


def around_build_kv_cache(original: Callable, *args: Any, server_args: ServerArgs, **kwargs: Any) -> Any:
    """Build with our pool, and go no further with any other."""
    choice = chosen(server_args)
    if choice is None:
        return original(*args, server_args=server_args, **kwargs)
    token = _building.set(choice)
    try:
        _require_hooks()
        result = original(*args, server_args=server_args, **kwargs)
        proof.pool_in_force(result.tree_cache)
        return result
    except HiqcacheError as error:
        if get_parallel().num_dp_ranks > 1:
            raise  # the data-parallel controller notices an exception only
        logger.error("hiqcache: host representation %r (%s): %s", choice.name, choice.source, error)
        logging.shutdown()
        # Not SystemExit: threads that SGLang has started by now would keep the process, and its launcher waiting.
        os._exit(1)
    finally:
        _building.reset(token)


def around_estimate_hicache_bytes(original: Callable, params: Any, draft_plan: Any) -> int:
    """Count encoded bytes where SGLang fits its default ratio to the free host memory."""
    device_bytes = original(params, draft_plan)
    choice = _building.get()
    if choice is None:
        return device_bytes
    kv_pool = params.token_to_kv_pool_allocator.get_kvcache()
    infos = getattr(kv_pool, "get_device_pool_infos", tuple)()
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
    info[key_biases.KEY] = key_biases.findings(scheduler, pool.representation)
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


# -- registration ----------------------------------------------------------------------------------------------------

HOOKS: tuple[tuple[str, Callable, HookType], ...] = (
    ("sglang.srt.server_args.prepare_server_args", around_prepare_server_args, HookType.AROUND),
    ("sglang.srt.server_args.ServerArgs.add_cli_args", after_add_cli_args, HookType.AFTER),
    ("sglang.srt.server_args.ServerArgs.from_cli_args", around_from_cli_args, HookType.AROUND),
    ("sglang.srt.entrypoints.engine.Engine._launch_subprocesses", around_launch_subprocesses, HookType.AROUND),
    (
        "sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes",
        around_launch_scheduler_processes,
        HookType.AROUND,
    ),
    ("sglang.srt.mem_cache.kv_cache_builder.build_kv_cache", around_build_kv_cache, HookType.AROUND),
    (
        "sglang.srt.mem_cache.hicache_auto_size._estimate_hicache_bytes",
        around_estimate_hicache_bytes,
        HookType.AROUND,
    ),
    ("sglang.srt.mem_cache.pool_host.mha.get_mha_host_pool_cls", around_get_mha_host_pool_cls, HookType.AROUND),
    ("sglang.srt.managers.scheduler.Scheduler.get_init_info", after_scheduler_init_info, HookType.AFTER),
    (
        "sglang.srt.managers.data_parallel_controller.DataParallelController.get_init_info",
        after_controller_init_info,
        HookType.AFTER,
    ),
    (
        "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController._move_pool_indices",
        around_move_pool_indices,
        HookType.AROUND,
    ),
    (
        "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector.log_stats",
        after_log_stats,
        HookType.AFTER,
    ),
    ("sglang.srt.managers.scheduler.Scheduler.handle_dumper_control", around_handle_dumper_control, HookType.AROUND),
    (
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.check_hicache_events",
        after_check_hicache_events,
        HookType.AFTER,
    ),
    ("sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.evict_host", around_evict_host, HookType.AROUND),
    (
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.attach_storage_backend",
        around_attach_storage_backend,
        HookType.AROUND,
    ),
)


def register() -> None:
    """Entry point `sglang.srt.plugins`: SGLang calls it in every process, before arguments are parsed."""
    for target, hook, kind in HOOKS:
        HookRegistry.register(target, hook, kind)
    # SGLang annotates the class attribute as an instance.
    factory = functools.partial(engine_server_args, Engine.server_args_class)  # type: ignore[arg-type]
    Engine.server_args_class = staticmethod(factory)  # type: ignore[assignment]
    cpu.adapt()


def missing_hooks() -> list[str]:
    """Targets of hooks that SGLang could not apply; it logs why, and goes on."""
    return [target for target, _, _ in HOOKS if target not in HookRegistry._patched]


def _require_hooks() -> None:
    """
    Raises:
        Refused: a hook is not in place.
    """
    if missing := missing_hooks():
        raise Refused(f"SGLang did not apply the hooks on {', '.join(missing)}; its log says why.")
