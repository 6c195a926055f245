"""The third-party representation of `docs/writing-a-representation.md`, installed as a stranger would install it."""

import pathlib
import re
import tomllib
from typing import NamedTuple

from serving import pip_install

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "writing-a-representation.md"
MODULE = "hiqcache_fp8_pow2.py"
PROJECT = "pyproject.toml"
CHECK = "test_promises.py"

_NAMED_BLOCK = re.compile(r"^`([\w.-]+)`\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Installed(NamedTuple):
    """An installed third-party package.

    Attributes:
        site: folder to put on PYTHONPATH.
        name: what `--hicache-representation` takes.
    """

    site: pathlib.Path
    name: str


def files() -> dict[str, str]:
    """The page's files: the code blocks with a file name on the line above."""
    return dict(_NAMED_BLOCK.findall(PAGE.read_text(encoding="utf-8")))


def install_third_party(directory: pathlib.Path) -> Installed:
    """Write the page's package to a folder and install it with pip.

    Args:
        directory: where to install to; made if it is not there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    source = directory.parent / f"{directory.name}-source"
    source.mkdir()
    code = files()
    for name in (PROJECT, MODULE):
        (source / name).write_text(code[name], encoding="utf-8")
    pip_install(source, directory)
    return installed_in(directory)


def installed_in(directory: pathlib.Path) -> Installed:
    """What `install_third_party` put into a folder."""
    (name,) = tomllib.loads(files()[PROJECT])["project"]["entry-points"]["hiqcache.representations"]
    return Installed(directory, name)
