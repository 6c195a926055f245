"""What the tools' command lines share: errors as sentences, and result files."""

import json
import os
import pathlib
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import click

from hiqcache.geometry import HiqcacheError


class Commands(click.Group):
    """An error meant for the reader is one message and exit status 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except HiqcacheError as error:
            raise click.ClickException(str(error)) from error


def without_folders(command: Sequence[str]) -> str:
    """A command as result files have it: absolute paths by their last part, no folder of the machine that it ran on."""
    return shlex.join(pathlib.Path(word).name if os.path.isabs(word) else word for word in command)


def command_line() -> str:
    """The command that runs, as result files have it."""
    return without_folders(["python", f"tools/{pathlib.Path(sys.argv[0]).name}", *sys.argv[1:]])


def writable(ctx: click.Context, param: click.Parameter, file: pathlib.Path | None) -> pathlib.Path | None:
    """Callback of `--out FILE`: make its folder, and refuse, before any work, what cannot be written."""
    if file is None:
        return None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.BadParameter(f"{str(file)!r}: cannot make its folder: {error.strerror}.") from error
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise click.BadParameter(f"{str(file)!r} is a folder, or not writable.")
    return file


def read_result(file: pathlib.Path, *parts: str) -> dict[str, Any]:
    """A result with all of these parts.

    Raises:
        click.ClickException: the file is something else.
    """
    try:
        result = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError
        raise click.ClickException(f"cannot read {file}: {error}") from error
    missing = [part for part in parts if not isinstance(result, dict) or part not in result]
    if missing:
        raise click.ClickException(f"{file} is no result of this tool: it has no {', '.join(map(repr, missing))}")
    return result
