"""Names of representations.

A class becomes known in one of two ways: the `@register` decorator, once its module is imported, or an entry point in
the group `hiqcache.representations` (`NAME = "package.module:Class"`), which is imported only when its name is asked
for, so that a broken third-party package cannot hurt anybody who does not use it. hiqcache's own representations are
found through entry points like everybody else's.
"""

from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from hiqcache.geometry import HiqcacheError
from hiqcache.representation import HostRepresentation

GROUP = "hiqcache.representations"

Representation = TypeVar("Representation", bound=type[HostRepresentation])

_registered: dict[str, type[HostRepresentation]] = {}


class UnknownRepresentation(HiqcacheError):
    """No representation has the name asked for, or the package that promises it does not deliver it."""


class DuplicateRepresentation(HiqcacheError):
    """Two different classes, or two installed packages, claim one name."""


def register(cls: Representation) -> Representation:
    """Class decorator: make `cls` known under `cls.name`.

    Raises:
        DuplicateRepresentation: another class has the name.
    """
    other = _registered.setdefault(cls.name, cls)
    if other is not cls:
        raise DuplicateRepresentation(
            f"representation {cls.name!r} is claimed by {_where(other)} and {_where(cls)}; registered: {_listed()}"
        )
    return cls


def names() -> list[str]:
    """Every name that `get` can be asked for, sorted; nothing is imported."""
    return sorted(_registered.keys() | {point.name for point in entry_points(group=GROUP)})


def get(name: str) -> type[HostRepresentation]:
    """The representation class called `name`.

    Raises:
        UnknownRepresentation: nothing has the name (the message lists those that do), or its entry point is broken.
        DuplicateRepresentation: several installed packages have it.
    """
    points = list(entry_points(group=GROUP, name=name))
    if len(points) > 1:
        owners = ", ".join(sorted(_owner(point) for point in points))
        raise DuplicateRepresentation(
            f"representation {name!r} is offered by several packages: {owners}; uninstall all but one. "
            f"Registered: {_listed()}"
        )
    if points:
        _load(points[0])
    if name not in _registered:
        raise UnknownRepresentation(f"unknown representation {name!r}; registered: {_listed()}")
    return _registered[name]


def _load(point: EntryPoint) -> None:
    try:
        cls = point.load()
    except (Exception, SystemExit) as error:  # a third party's module may raise anything
        raise UnknownRepresentation(
            f"representation {point.name!r}: cannot load {point.value} of {_owner(point)}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, HostRepresentation)):
        raise UnknownRepresentation(
            f"representation {point.name!r}: {point.value} of {_owner(point)} is not a HostRepresentation subclass"
        )
    missing = {name for name in ("name", "format_tag", "summary") if not hasattr(cls, name)} | cls.__abstractmethods__
    if missing:
        raise UnknownRepresentation(
            f"representation {point.name!r}: {point.value} of {_owner(point)} lacks {', '.join(sorted(missing))}"
        )
    for name in ("name", "format_tag", "summary"):
        if not isinstance(value := getattr(cls, name), str):
            raise UnknownRepresentation(
                f"representation {point.name!r}: {name} of {point.value} of {_owner(point)} is {value!r}, not a string"
            )
    if cls.name != point.name:
        raise UnknownRepresentation(
            f"entry point {point.name!r} of {_owner(point)} leads to a representation called {cls.name!r}; "
            "the two names must be equal"
        )
    register(cls)


def _owner(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.value


def _where(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _listed() -> str:
    return ", ".join(names()) or "none (is hiqcache itself installed?)"
