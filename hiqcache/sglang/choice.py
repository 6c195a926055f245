"""Which representation a server was asked for.

The choice travels on the server's own argument record (`ServerArgs`), to every process that gets a copy of it, and
not in an environment variable, which would leak into the next Engine of the same process. Nothing here differs
between SGLang's releases.
"""

import os
from collections.abc import Mapping
from typing import Any, NoReturn

from attrs import evolve, frozen

from hiqcache import registry
from hiqcache.geometry import HiqcacheError
from hiqcache.sglang import support

FLAG = "--hicache-representation"
DUMP_FLAG = "--hicache-dump-dir"
KEYWORD = "hicache_representation"
DUMP_KEYWORD = "hicache_dump_dir"
ALIAS = "SGLANG_EXPERIMENTAL_HICACHE_INT8"
"""Set to 1, asks for int8. It fails closed only while the plugin is loaded: without it, nobody reads the variable."""
PARSED = "_HIQCACHE_PARSED"
"""Set by hiqcache: the name that a command line asked for, in the process that parsed it and those it starts."""

_OTHER_LAUNCHERS = ("use_ray", "smg_grpc_mode", "grpc_mode", "encoder_only")
"""Flags that start schedulers past `Engine._launch_scheduler_processes`; checked as given, before SGLang resolves."""

_ATTRIBUTE = "_hiqcache_choice"


class Refused(HiqcacheError):
    """A server that asked for a representation cannot be served with it, and therefore not at all."""


@frozen
class Choice:
    """A representation asked for.

    Attributes:
        name: its registered name.
        source: the flag, keyword or variable that asked, for messages.
        command_line: whether a person at a terminal waits for a sentence (rather than Python code for an exception).
        dump_dir: folder for dumps of a running server; None allows none.
    """

    name: str
    source: str
    command_line: bool
    dump_dir: str | None = None

    def refuse(self, reason: object) -> NoReturn:
        """Stop this process's server.

        Raises:
            SystemExit: on a command line: the sentence on stderr and status 1.
            Refused: anywhere else.
        """
        asked = f"{self.source} asked for host representation {self.name!r}"
        _refuse(f"{asked}, which cannot be served.\n{reason}", self.command_line)


def _refuse(text: str, command_line: bool) -> NoReturn:
    raise SystemExit(f"hiqcache: {text}") if command_line else Refused(f"hiqcache: {text}")


def choose(
    server_args: Any,
    name: str | None,
    *,
    source: str,
    command_line: bool,
    dump_dir: str | os.PathLike[str] | None = None,
) -> None:
    """Record on `server_args` what was asked for, after checking that it can be asked for at all.

    Args:
        server_args: the record of the server to be.
        name: a representation's name; None where only the environment variable may ask.
        source: who passed `name`.
        command_line: see `Choice`.
        dump_dir: see `Choice`; a folder that exists.

    Raises:
        SystemExit, Refused: see `Choice.refuse`.
    """
    if not isinstance(name, str | None):
        _refuse(f"{source}: saw {name!r}; allowed: {', '.join(registry.names())}, or None.", command_line)
    if not (dump_dir is None or (isinstance(dump_dir, str | os.PathLike) and os.fspath(dump_dir))):
        _refuse(f"{DUMP_FLAG}: saw {dump_dir!r}; allowed: a folder that exists.", command_line)
    folder = None if dump_dir is None else os.path.abspath(dump_dir)
    earlier = chosen(server_args)
    if earlier is not None:
        _add(server_args, earlier, name, source, folder)
        return
    if alias(command_line):
        if name not in (None, "int8"):
            Choice(name, source, command_line).refuse(f"{ALIAS}=1 asks for 'int8': unset it, or ask for int8 here too.")
        if name is None:
            name, source = "int8", f"{ALIAS}=1"
    if name is None:
        if folder is not None:
            _refuse(f"{DUMP_FLAG} {folder} is for dumps of an encoded L2: add {FLAG} NAME, or drop it.", command_line)
        return
    choice = Choice(name, source, command_line, folder)
    if problem := support.problem():
        choice.refuse(problem)
    support.warn_if_untested()
    try:
        registry.get(name)
    except HiqcacheError as error:
        choice.refuse(error)
    if not server_args.enable_hierarchical_cache:
        choice.refuse("It changes how HiCache's host tier is stored: add --enable-hierarchical-cache, or drop it.")
    for field in _OTHER_LAUNCHERS:
        if not hasattr(server_args, field):
            choice.refuse(f"SGLang has no setting {field!r}, which hiqcache must know to be off.")
        if getattr(server_args, field):
            flag = "--" + field.replace("_", "-")
            choice.refuse(f"{flag} starts schedulers that hiqcache's launcher cannot verify, or none: drop it.")
    _check_dump_dir(choice, server_args)
    setattr(server_args, _ATTRIBUTE, choice)


def _add(server_args: Any, earlier: Choice, name: str | None, source: str, folder: str | None) -> None:
    """Something else asks, for a server that has a choice."""
    if name not in (None, earlier.name):
        earlier.refuse(f"{source} asks for {name!r}: ask for one of the two.")
    if folder in (None, earlier.dump_dir):
        return
    if earlier.dump_dir is not None:
        earlier.refuse(f"{DUMP_FLAG}: saw {earlier.dump_dir} and {folder}; allowed: one of the two.")
    choice = evolve(earlier, dump_dir=folder)
    _check_dump_dir(choice, server_args)
    setattr(server_args, _ATTRIBUTE, choice)


def decline(server_args: Any) -> None:
    """Record that this server was asked for none, where a command line of this process has asked for one."""
    if PARSED in os.environ and chosen(server_args) is None:
        setattr(server_args, _ATTRIBUTE, None)


def settle(server_args: Any, keywords: Mapping[str, Any]) -> None:
    """Record what a server that is about to start was asked for, by whatever has not been heard yet.

    Heard are attributes that somebody put on the record, the keywords of `Engine(...)`, and the environment variable.
    A record that a command line asked for, and that lost what it asked, is refused.

    Args:
        server_args: the record of the server.
        keywords: what its `Engine` was called with; empty if there is none.

    Raises:
        SystemExit, Refused: see `Choice.refuse`.
    """
    names = (KEYWORD, DUMP_KEYWORD)
    _refuse_misspelt({**getattr(server_args, "__dict__", {}), **keywords}, server_args)
    attributes = {name: getattr(server_args, name) for name in names if hasattr(server_args, name)}
    asked = ((attributes, "server_args.{}"), (keywords, "Engine({}=...)"))
    for given, source in asked:
        choose(server_args, given.get(KEYWORD), source=source.format(KEYWORD), command_line=False)
        if KEYWORD in given:
            decline(server_args)
    for given, source in asked:  # afterwards: a folder alone is refused
        if (folder := given.get(DUMP_KEYWORD)) is not None:
            choose(server_args, None, source=source.format(DUMP_KEYWORD), command_line=False, dump_dir=folder)
    if (choice := chosen(server_args)) is not None:
        if problem := support.problem():  # it may have come with the record, from another process
            choice.refuse(problem)
        return
    parsed = os.environ.get(PARSED)
    if parsed is not None and not hasattr(server_args, _ATTRIBUTE) and server_args.enable_hierarchical_cache:
        Choice(parsed, FLAG, command_line=False).refuse(
            f"It was given on a command line, and this ServerArgs is another one, or a copy that lost it. Set its "
            f"attribute {KEYWORD} to {parsed!r}, or to None for SGLang's own host pool."
        )


def _refuse_misspelt(given: Mapping[str, Any], server_args: Any) -> None:
    """A name that is nearly ours, and that nobody else would miss, must not be dropped silently."""
    for name in given:
        stem = next((stem for stem in ("hicache_rep", "hicache_dump") if name.startswith(stem)), None)
        if stem and name not in (KEYWORD, DUMP_KEYWORD) and not hasattr(type(server_args), name):
            _refuse(f"saw {name!r}; allowed: {KEYWORD!r} and {DUMP_KEYWORD!r}.", command_line=False)


def chosen(server_args: Any) -> Choice | None:
    """What `choose` recorded; None means: leave SGLang as it is."""
    return getattr(server_args, _ATTRIBUTE, None)


def alias(command_line: bool) -> bool:
    """Whether the environment variable asks for int8.

    Raises:
        SystemExit, Refused: it holds neither yes nor no.
    """
    value = os.environ.get(ALIAS, "").strip().lower()
    if value not in ("", "0", "1"):
        Choice("int8", f"{ALIAS}={value}", command_line).refuse("Allowed: 1 (ask for int8), 0 or unset (do not).")
    return value == "1"


def _check_dump_dir(choice: Choice, server_args: Any) -> None:
    folder = choice.dump_dir
    if folder is None:
        return
    if not os.path.isdir(folder):
        choice.refuse(f"{DUMP_FLAG}: saw {folder}, which is no folder; allowed: one that exists.")
    if not os.access(folder, os.W_OK | os.X_OK):
        choice.refuse(f"{DUMP_FLAG}: saw {folder}, which this user cannot write to; allowed: a folder that can be.")
    if choice.command_line and not server_args.admin_api_key:  # an Engine in Python has other ways
        choice.refuse(f"{DUMP_FLAG}: dumps over HTTP need an admin key: add --admin-api-key KEY, or drop it.")
