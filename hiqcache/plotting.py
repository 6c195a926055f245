"""What every picture needs: matplotlib, a file name that says the format, and files that do not change for nothing."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from hiqcache.geometry import HiqcacheError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg")
"""Ends of file names that `save` takes."""


class CannotPlot(HiqcacheError):
    """matplotlib is not installed, or the file cannot be written."""


def require_plotting() -> None:
    """Check for matplotlib before long work.

    Raises:
        CannotPlot: it is not installed.
    """
    if find_spec("matplotlib") is None:
        raise CannotPlot("a plot needs matplotlib: pip install 'hiqcache[plot]'")


def save(figure: "Figure", file: Path) -> None:
    """Write a figure to `file`, whose name ends in one of `FORMATS`.

    Raises:
        CannotPlot: the file cannot be written.
    """
    import matplotlib

    try:
        # No date and no random ids: the same figure gives the same SVG.
        with matplotlib.rc_context({"svg.hashsalt": "hiqcache"}):
            figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    except OSError as error:
        raise CannotPlot(f"{file}: {error.strerror}") from error
