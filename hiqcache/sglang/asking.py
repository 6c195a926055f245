"""The hooks that hear what was asked for: command line, `Engine(...)`, and the record of a server about to start.

They hang on names that every release of SGLang since 0.5.17 has, and import nothing that differs between them.
"""

import argparse
import functools
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import yaml
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.server_args import ServerArgs

from hiqcache import registry
from hiqcache.geometry import HiqcacheError
from hiqcache.sglang import support
from hiqcache.sglang.choice import (
    DUMP_FLAG,
    DUMP_KEYWORD,
    FLAG,
    KEYWORD,
    PARSED,
    Choice,
    alias,
    choose,
    chosen,
    decline,
    settle,
)
from hiqcache.sglang.support import Hook

CONFIG = "--config"


def around_prepare_server_args(original: Callable, argv: list[str]) -> ServerArgs:
    """Refuse `--config=FILE` and `--conf FILE`, which SGLang ignores, where ignoring it would drop a representation."""
    for index, argument in enumerate(argv):
        option, given, path = argument.partition("=")
        if argument == CONFIG or not _abbreviates(option, CONFIG):
            continue
        path = path if given else "".join(argv[index + 1 : index + 2])
        asked = any(_abbreviates(word.partition("=")[0], FLAG) for word in argv)
        if asked or alias(command_line=True) or _mentions_flag(path):
            raise SystemExit(
                f"hiqcache: SGLang ignores {argument!r} in this form, and a host representation is asked for. "
                f"Write it as two words: {CONFIG} FILE."
            )
    return original(argv)


def _abbreviates(word: str, flag: str) -> bool:
    """Whether argparse may take `word` for `flag`."""
    return len(word) > len("--") and flag.startswith(word)


def _mentions_flag(path: str) -> bool:
    """Whether a file asks for a representation; one that is no YAML, if it might."""
    try:
        with open(os.path.expanduser(path), "rb") as file:
            text = file.read()
    except OSError:
        return False
    try:
        keys = yaml.safe_load(text)
    except (UnicodeDecodeError, yaml.YAMLError):
        return re.search(rb"hicache[-_]rep", text) is not None
    return isinstance(keys, dict) and any(_abbreviates("--" + str(key).replace("_", "-"), FLAG) for key in keys)


class _Ask(argparse.Action):
    """Stores the name, and refuses it at once where no server could keep the promise."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        choice = Choice(values, FLAG, command_line=True)
        if problem := support.problem():
            choice.refuse(problem)
        try:
            registry.get(values)
        except HiqcacheError as error:
            choice.refuse(error)
        # Not every program makes its record with `ServerArgs.from_cli_args`: `settle` asks whether the name arrived.
        os.environ[PARSED] = values
        setattr(namespace, self.dest, values)


def after_add_cli_args(result: None, parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument(
        FLAG,
        dest=KEYWORD,
        metavar="NAME",
        default=None,
        action=_Ask,
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
    if hasattr(args, KEYWORD):
        decline(server_args)
    return server_args


def engine_server_args(original: Callable, **kwargs: Any) -> ServerArgs:
    """`sgl.Engine(hicache_representation=NAME, ...)`: take the keywords that SGLang's record does not know."""
    name, dump_dir = kwargs.pop(KEYWORD, None), kwargs.pop(DUMP_KEYWORD, None)
    server_args = original(**kwargs)
    choose(server_args, name, source=f"Engine({KEYWORD}=...)", command_line=False, dump_dir=dump_dir)
    return server_args


def take_engine_keywords() -> None:
    """Let `Engine` make its record with `engine_server_args`."""
    # SGLang annotates the class attribute as an instance.
    factory = functools.partial(engine_server_args, Engine.server_args_class)  # type: ignore[arg-type]
    Engine.server_args_class = staticmethod(factory)  # type: ignore[assignment]


def before_check_server_args(server_args: ServerArgs) -> None:
    """Hear a record that somebody built without us; refuse engines that start schedulers in a way of their own.

    Every launch comes by here right after SGLang has loaded its plugins, also the first one of a process, which is
    too far under way for a hook on the launch itself.
    """
    engine, keywords = _launch_under_way()
    settle(server_args, keywords)
    choice = chosen(server_args)
    if choice is None or engine is None:
        return
    ours = vars(Engine)["_launch_scheduler_processes"].__func__
    if engine._launch_scheduler_processes.__func__ is not ours:
        choice.refuse(f"{engine.__name__} starts schedulers that hiqcache cannot verify; allowed: {Engine.__name__}.")


def _launch_under_way() -> tuple[type[Engine] | None, Mapping[str, Any]]:
    """The engine class that launches, and what it was called with.

    They are read from the calls under way, as SGLang loads plugins in the middle of them: `Engine(server_args=record,
    hicache_representation=NAME)` drops the keyword before any code of ours runs.
    """
    engine, keywords = None, {}
    frame = sys._getframe()
    while frame is not None:
        name, variables = frame.f_code.co_name, frame.f_locals
        if name == "_launch_subprocesses" and engine is None:
            engine = variables.get("cls")
        elif name == "__init__" and isinstance(variables.get("self"), Engine):
            keywords = {**variables.get("kwargs", {}), **keywords}
        frame = frame.f_back
    return engine, keywords


HOOKS = (
    Hook("sglang.srt.server_args.prepare_server_args", around_prepare_server_args, HookType.AROUND),
    Hook("sglang.srt.server_args.ServerArgs.add_cli_args", after_add_cli_args, HookType.AFTER),
    Hook("sglang.srt.server_args.ServerArgs.from_cli_args", around_from_cli_args, HookType.AROUND),
    Hook("sglang.srt.server_args.ServerArgs.check_server_args", before_check_server_args, HookType.BEFORE),
)
