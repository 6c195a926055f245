"""Reading the result files that the tools write."""

import json
import pathlib
from typing import Any

import click


def read_result(file: pathlib.Path, *parts: str) -> dict[str, Any]:
    """A result with all of these parts.

    Raises:
        click.ClickException: the file is something else.
    """
    try:
        result = json.loads(file.read_text())
    except (OSError, ValueError) as error:  # a UnicodeDecodeError is a ValueError
        raise click.ClickException(f"cannot read {file}: {error}") from error
    missing = [part for part in parts if not isinstance(result, dict) or part not in result]
    if missing:
        raise click.ClickException(f"{file} is no result of this tool: it has no {', '.join(map(repr, missing))}")
    return result
