"""Which representation a server was asked for.

The choice travels on the server's own argument record (`ServerArgs`), to every process that gets a copy of it, and
not in an environment variable, which would leak into the next Engine of the same process.
"""

import importlib.metadata
import logging
import os
from typing import NoReturn

from attrs import frozen
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.server_args import ServerArgs

from hiqcache import registry
from hiqcache.geometry import HiqcacheError
from hiqcache.sglang.versions import ALLOW_UNTESTED, TESTED_SGLANG

logger = logging.getLogger(__name__)

FLAG = "--hicache-representation"
DUMP_FLAG = "--hicache-dump-dir"
ALIAS = "SGLANG_EXPERIMENTAL_HICACHE_INT8"
"""Set to 1, asks for int8. It fails closed only while the plugin is loaded: without it, nobody reads the variable."""

_OTHER_LAUNCHERS = ("use_ray", "smg_grpc_mode", "grpc_mode", "encoder_only")
"""Flags that take another road than `Engine._launch_scheduler_processes`; checked as given, before SGLang resolves."""

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
    server_args: ServerArgs, name: str | None, *, source: str, command_line: bool, dump_dir: str | None = None
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
    if _alias(command_line):
        if name not in (None, "int8"):
            Choice(name, source, command_line).refuse(f"{ALIAS}=1 asks for 'int8': unset it, or ask for int8 here too.")
        if name is None:
            name, source = "int8", f"{ALIAS}=1"
    if name is None:
        if dump_dir is not None:
            _refuse(f"{DUMP_FLAG} {dump_dir} is for dumps of an encoded L2: add {FLAG} NAME, or drop it.", command_line)
        return
    choice = Choice(name, source, command_line, dump_dir and os.path.abspath(dump_dir))
    try:
        registry.get(name)
    except HiqcacheError as error:
        choice.refuse(error)
    _check_sglang(choice)
    if not resolving_view(server_args).enable_hierarchical_cache:
        choice.refuse("It changes how HiCache's host tier is stored: add --enable-hierarchical-cache, or drop it.")
    for field in _OTHER_LAUNCHERS:
        if getattr(server_args, field):
            flag = "--" + field.replace("_", "-")
            choice.refuse(f"{flag} starts schedulers that hiqcache's launcher cannot verify, or none: drop it.")
    _check_dump_dir(choice, resolving_view(server_args).admin_api_key)
    setattr(server_args, _ATTRIBUTE, choice)


def chosen(server_args: ServerArgs) -> Choice | None:
    """What `choose` recorded; None means: leave SGLang as it is."""
    return getattr(server_args, _ATTRIBUTE, None)


def _alias(command_line: bool) -> bool:
    value = os.environ.get(ALIAS, "").strip().lower()
    if value not in ("", "0", "1"):
        Choice("int8", f"{ALIAS}={value}", command_line).refuse("Allowed: 1 (ask for int8), 0 or unset (do not).")
    return value == "1"


def _check_sglang(choice: Choice) -> None:
    found = importlib.metadata.version("sglang")
    if found in TESTED_SGLANG:
        return
    tested = ", ".join(TESTED_SGLANG)
    if os.environ.get(ALLOW_UNTESTED) == "1":
        logger.warning("hiqcache: SGLang %s is untested (tested: %s); %s=1 lets it run", found, tested, ALLOW_UNTESTED)
        return
    choice.refuse(f"SGLang {found} is untested; tested: {tested}. {ALLOW_UNTESTED}=1 turns this into a warning.")


def _check_dump_dir(choice: Choice, admin_api_key: str | None) -> None:
    folder = choice.dump_dir
    if folder is None:
        return
    if not os.path.isdir(folder):
        choice.refuse(f"{DUMP_FLAG}: saw {folder}, which is no folder; allowed: one that exists.")
    if not os.access(folder, os.W_OK | os.X_OK):
        choice.refuse(f"{DUMP_FLAG}: saw {folder}, which this user cannot write to; allowed: a folder that can be.")
    if choice.command_line and not admin_api_key:  # an Engine in Python has other ways
        choice.refuse(f"{DUMP_FLAG}: dumps over HTTP need an admin key: add --admin-api-key KEY, or drop it.")
