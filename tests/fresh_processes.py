"""Servers asked for a representation in processes whose plugins SGLang has yet to load; run as a program by tests.

SGLang is imported once and the process forks for each case, so that each one meets SGLang as a user's program does.
Where a scheduler would be started, the case ends instead. Prints JSON: name of the case -> what happened.
"""

import functools
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

from serving import device_settings
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.server_args import ServerArgs, prepare_server_args

CONFIG = sys.argv[1] if len(sys.argv) > 1 else ""
FLAG = ["--hicache-representation", "int8"]
ALIAS, ALLOW = "SGLANG_EXPERIMENTAL_HICACHE_INT8", "HIQCACHE_ALLOW_UNTESTED_SGLANG"


class SchedulersStarted(Exception):
    """What no server may come to that is refused."""


def start_none(cls: type, server_args: Any, *arguments: Any, **options: Any) -> Any:
    choice = getattr(server_args, "_hiqcache_choice", None)
    raise SchedulersStarted(f"{choice.name}, dumps: {choice.dump_dir}" if choice else "BF16")


def settings(**more: Any) -> dict[str, Any]:
    plain = {"model_path": CONFIG, "skip_tokenizer_init": True, "load_format": "dummy"}
    return device_settings() | plain | {"enable_hierarchical_cache": True} | more


def record(**attributes: Any) -> ServerArgs:
    made = ServerArgs(**settings())
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def parsed(*words: str) -> ServerArgs:
    load_plugins()
    return prepare_server_args(["--model-path", CONFIG, "--device", "cpu", "--enable-hierarchical-cache", *words])


# -- ways to ask -------------------------------------------------------------------------------------------------------


def nothing_asked() -> None:
    launch_server(record())


def alias_and_launch_server() -> None:
    os.environ[ALIAS] = "1"
    launch_server(record())


def alias_and_engine_with_a_record() -> None:
    os.environ[ALIAS] = "1"
    Engine(server_args=record())


def alias_and_engine() -> None:
    os.environ[ALIAS] = "1"
    Engine(**settings())


def alias_and_command_line() -> None:
    os.environ[ALIAS] = "1"
    launch_server(parsed())


def attribute_and_launch_server() -> None:
    launch_server(record(hicache_representation="int8", hicache_dump_dir="/tmp"))


def attribute_and_engine() -> None:
    Engine(server_args=record(hicache_representation="int8"))


def attribute_of_a_package_that_is_not_there() -> None:
    launch_server(record(hicache_representation="int9"))


def folder_as_attribute_alone() -> None:
    launch_server(record(hicache_dump_dir="/tmp"))


def keyword_beside_a_record() -> None:
    Engine(server_args=record(), hicache_representation="int8", hicache_dump_dir="/tmp")


def keyword_beside_a_record_that_asks_for_another() -> None:
    Engine(server_args=record(hicache_representation="bf16"), hicache_representation="int8")


def keyword() -> None:
    Engine(**settings(hicache_representation="int8", hicache_dump_dir="/tmp"))


def keyword_of_an_engine_of_ones_own() -> None:
    class Another(Engine):
        def __init__(self, **kwargs: Any):
            super().__init__(server_args=record(), **kwargs)

    Another(hicache_representation="int8")


def flag() -> None:
    launch_server(parsed(*FLAG))


def alias_and_schedulers_started_in_another_way() -> None:
    class Another(Engine):  # as SGLang's RayEngine does, for ray.http_server.launch_server
        @classmethod
        def _launch_scheduler_processes(cls, *arguments: Any, **options: Any) -> Any:
            raise SchedulersStarted("another way")

    os.environ[ALIAS] = "1"
    Another._launch_subprocesses(
        server_args=record(),
        init_tokenizer_manager_func=Another.init_tokenizer_manager_func,
        run_scheduler_process_func=Another.run_scheduler_process_func,
        run_detokenizer_process_func=Another.run_detokenizer_process_func,
    )


# -- other plugins -----------------------------------------------------------------------------------------------------


def hook_early(target: str) -> None:
    """As a plugin does that is loaded before hiqcache, and applies its hooks itself."""
    HookRegistry.register(target, lambda original, *args, **kwargs: original(*args, **kwargs), HookType.AROUND)
    HookRegistry.apply_hooks()


def flag_after_an_early_hook_on_from_cli_args() -> None:
    hook_early("sglang.srt.server_args.ServerArgs.from_cli_args")
    launch_server(parsed(*FLAG))


def keyword_after_an_early_hook_on_evict_host() -> None:
    hook_early("sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.evict_host")
    Engine(**settings(hicache_representation="int8"))


def flag_where_another_plugin_makes_the_record() -> None:
    """Its hook is outside ours, and does not call what is inside."""
    load_plugins()
    replaced: Any = ServerArgs

    @functools.wraps(replaced.from_cli_args.__func__)
    def outer(cls: type, args: Any) -> ServerArgs:
        return record()

    replaced.from_cli_args = classmethod(outer)
    launch_server(parsed(*FLAG))


def hook_replaced_later() -> None:
    load_plugins()
    from sglang.srt.managers.scheduler import Scheduler

    replaced: Any = Scheduler
    replaced.get_init_info = lambda scheduler: {}
    Engine(**settings(hicache_representation="int8"))


def a_caller_that_kept_the_original() -> None:
    """An earlier plugin wraps the function in its module alone; SGLang's caller has it by name."""
    from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler as caller
    from sglang.srt.mem_cache.pool_host import mha

    original = mha.get_mha_host_pool_cls
    assert caller.get_mha_host_pool_cls is original
    mha.get_mha_host_pool_cls = lambda buffer_info: original(buffer_info)
    Engine(**settings(hicache_representation="int8"))


# -- records that lose what a command line asked -----------------------------------------------------------------------


def flag_and_a_copy() -> None:
    import copy

    launch_server(copy.copy(parsed(*FLAG)))


def flag_and_a_record_of_its_fields() -> None:
    import msgspec

    made: Any = parsed(*FLAG)
    Engine(**msgspec.structs.asdict(made))


def flag_and_a_deep_copy() -> None:
    import copy

    launch_server(copy.deepcopy(parsed(*FLAG)))


def flag_and_a_server_that_wants_none() -> None:
    parsed(*FLAG)
    launch_server(record(hicache_representation=None))


def flag_and_an_engine_that_wants_none() -> None:
    parsed(*FLAG)
    Engine(**settings(hicache_representation=None))


def flag_and_another_command_line() -> None:
    parsed(*FLAG)
    launch_server(parsed())


# -- other releases ----------------------------------------------------------------------------------------------------


def another_release(case: Callable[[], None], *, broken: bool = True, allowed: bool = False) -> Callable[[], None]:
    """The case in a SGLang that says it is another release and, if `broken`, lacks what such a release lacks."""

    def run() -> None:
        import sglang.version

        sglang.version.__version__ = "0.5.22"
        if broken:
            from sglang.srt.mem_cache import device_pool_info

            del device_pool_info.MHABufferInfo
        if allowed:
            os.environ[ALLOW] = "1"
        case()

    return run


def allowed_too_late() -> None:
    load_plugins()
    os.environ[ALLOW] = "1"
    Engine(**settings(hicache_representation="int8"))


WAYS = (
    nothing_asked,
    alias_and_launch_server,
    alias_and_engine_with_a_record,
    alias_and_engine,
    alias_and_command_line,
    attribute_and_launch_server,
    attribute_and_engine,
    keyword_beside_a_record,
    keyword,
    flag,
)
CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        *WAYS,
        attribute_of_a_package_that_is_not_there,
        folder_as_attribute_alone,
        keyword_beside_a_record_that_asks_for_another,
        keyword_of_an_engine_of_ones_own,
        alias_and_schedulers_started_in_another_way,
        flag_after_an_early_hook_on_from_cli_args,
        keyword_after_an_early_hook_on_evict_host,
        flag_where_another_plugin_makes_the_record,
        hook_replaced_later,
        a_caller_that_kept_the_original,
        flag_and_a_copy,
        flag_and_a_record_of_its_fields,
        flag_and_a_deep_copy,
        flag_and_a_server_that_wants_none,
        flag_and_an_engine_that_wants_none,
        flag_and_another_command_line,
    )
}
FEW = (nothing_asked, alias_and_launch_server, flag)
CASES |= {f"unsupported: {case.__name__}": another_release(case) for case in WAYS}
CASES |= {f"unsupported, tried: {case.__name__}": another_release(case, allowed=True) for case in FEW}
CASES |= {f"untested, complete: {case.__name__}": another_release(case, broken=False, allowed=True) for case in FEW}
CASES["unsupported: allowed_too_late"] = another_release(allowed_too_late, broken=False)


def run(case: Callable[[], None], pipe: Any) -> None:
    try:
        case()
        pipe.send(("nothing", ""))
    except BaseException as error:
        pipe.send((type(error).__name__, str(error)))
    pipe.close()
    os._exit(0)


def main() -> None:
    engine: Any = Engine
    engine._launch_scheduler_processes = classmethod(start_none)
    happened = {}
    context = multiprocessing.get_context("fork")
    for name, case in CASES.items():
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=run, args=(case, theirs))
        process.start()
        theirs.close()
        try:
            happened[name] = mine.recv()
        except EOFError:
            happened[name] = ("died", "")
        process.join()
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(happened, file)


if __name__ == "__main__":
    main()
