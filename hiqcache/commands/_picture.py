"""The `--plot FILE` of every command that draws."""

from pathlib import Path

import click


def picture(ctx: click.Context, param: click.Parameter, file: Path | None) -> Path | None:
    """Callback of the option: refuse, before any work, a file name or a machine that no picture can come of."""
    from hiqcache.plotting import FORMATS, require_plotting

    if file is not None:
        if file.suffix not in FORMATS:
            raise click.BadParameter(f"{file.name!r} does not end in {' or '.join(FORMATS)}.")
        if not file.parent.is_dir():
            raise click.BadParameter(f"there is no folder {str(file.parent)!r}.")
        require_plotting()
    return file


def spare(file: Path | None, *others: Path | None) -> None:
    """Refuse a picture that would take the place of one of the command's other files.

    Raises:
        click.BadParameter: it is one of them.
    """
    if file and file.resolve() in {other.resolve() for other in others if other}:
        raise click.BadParameter(f"{str(file)!r} is another file of this command.", param_hint="--plot")
