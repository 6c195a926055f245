"""Whether hiqcache can keep its promise in this process: the SGLang release, our code for it, our hooks in place.

SGLang logs and swallows whatever goes wrong while it loads plugins, so nothing here trusts that a hook was applied:
each one is looked for in what SGLang's callers would really call. Nothing here differs between SGLang's releases.
"""

import logging
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable
from types import CellType, ModuleType
from typing import Any

from attrs import frozen
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.version import __version__ as sglang_version

from hiqcache.sglang.versions import ALLOW_UNTESTED, TESTED_SGLANG, supported

logger = logging.getLogger(__name__)


@frozen
class Hook:
    """A function of ours on one of SGLang's.

    Attributes:
        target: dotted name of SGLang's function or method.
        function: ours.
        kind: how the registry calls it.
    """

    target: str
    function: Callable[..., Any]
    kind: HookType


_registered: list[Hook] = []
_lacking: str | None = "SGLang has not loaded the plugin"
"""What keeps our hooks from being registered; None once they are."""


def register(hooks: Iterable[Hook]) -> None:
    """Hand hooks to SGLang, which applies them once every plugin is loaded."""
    for hook in hooks:
        _registered.append(hook)
        HookRegistry.register(hook.target, hook.function, hook.kind)


def install(load: Callable[[], Iterable[Hook]]) -> None:
    """Register the hooks that depend on SGLang's release, if this is a release for them.

    Args:
        load: imports the hooks; any exception means that this release lacks something they need.
    """
    global _lacking
    if not supported(sglang_version, _allow_untested()):
        _lacking = f"{ALLOW_UNTESTED} was not set when SGLang loaded its plugins"
        return
    try:
        register(load())
        _lacking = None
    except Exception as error:
        logger.debug("hiqcache: its hooks cannot be loaded", exc_info=True)
        _lacking = f"{type(error).__name__}: {error}"


def untested() -> bool:
    """Whether this release of SGLang is not one of those that hiqcache was tested with."""
    return sglang_version not in TESTED_SGLANG


def problem() -> str | None:
    """Why no server that this process starts can keep KV in a representation; None if one can."""
    if not supported(sglang_version, _allow_untested()):
        return (
            f"SGLang {sglang_version} is not supported; supported: {', '.join(TESTED_SGLANG)}. "
            f"{ALLOW_UNTESTED}=1 tries it all the same."
        )
    if _lacking is not None:
        return (
            f"hiqcache's hooks do not fit SGLang {sglang_version}: {_lacking}. Supported: {', '.join(TESTED_SGLANG)}."
        )
    if missing := missing_hooks():
        return (
            f"SGLang {sglang_version} does not call hiqcache's hooks on {', '.join(missing)}. Its log says why, or "
            "another plugin took their place."
        )
    return None


def warn_if_untested() -> None:
    """Say in the log that this release is tried at the user's own risk."""
    if untested():
        tested = ", ".join(TESTED_SGLANG)
        logger.warning("hiqcache: SGLang %s is untested (tested: %s)", sglang_version, tested)


def missing_hooks() -> list[str]:
    """Targets that SGLang's callers would call without coming by our hook."""
    if not _registered:
        return ["every target, as hiqcache registered none"]
    return [hook.target for hook in _registered if not _in_place(hook)]


def _allow_untested() -> bool:
    return os.environ.get(ALLOW_UNTESTED) == "1"


def _in_place(hook: Hook) -> bool:
    owner, _, name = hook.target.rpartition(".")
    try:
        holder = pkgutil.resolve_name(owner)
    except (ImportError, AttributeError):
        return False
    holders = [holder]
    if isinstance(holder, ModuleType):
        holders += _importers(owner, name)
    return all(_calls(getattr(holder, name, None), hook.function) for holder in holders)


def _importers(module: str, name: str) -> list[ModuleType]:
    """SGLang's modules that hold the function under its own name, by `from module import name`."""
    found = []
    for other, imported in list(sys.modules.items()):
        if other.startswith("sglang.") and isinstance(imported, ModuleType):
            function = vars(imported).get(name)
            if (getattr(function, "__module__", None), getattr(function, "__qualname__", None)) == (module, name):
                found.append(imported)
    return found


def _calls(function: Any, ours: Callable) -> bool:
    """Whether `ours` is among the wrappers around an original, as SGLang's registry nests them."""
    while function is not None:
        if any(_content(cell) is ours for cell in getattr(function, "__closure__", None) or ()):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
