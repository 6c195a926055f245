"""The command line: `hiqcache COMMAND`, or `python -m hiqcache COMMAND`.

Each public module of `hiqcache.commands` is a command: the click command that it calls `command`, under the module's
own name. A module is imported when its command is run or described, so it should import what is heavy inside the
function; a module that cannot be imported takes only its own command away.
"""

import importlib
import pkgutil
import sys
from typing import Any

import click

from hiqcache import __version__, commands

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it: 128 + SIGINT."""


class Commands(click.Group):
    """The modules of `hiqcache.commands`, and what their errors look like at a terminal.

    An error meant for the reader (`HiqcacheError`) is one message and exit status 1; Ctrl-C and a closed pipe are
    quiet; anything else is a defect and keeps its traceback.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(m.name for m in pkgutil.iter_modules(commands.__path__) if not m.name.startswith("_"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        try:
            return importlib.import_module(f"{commands.__name__}.{cmd_name}").command
        except Exception as error:  # whatever a module does on import, `hiqcache --help` still lists the others
            return _unavailable(cmd_name, error)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            try:
                return super().invoke(ctx)
            finally:
                if sys.stdout is not None:  # None: started with standard output closed
                    sys.stdout.flush()  # so that click, and not Python's shutdown, meets a closed pipe
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        except ValueError as error:
            from hiqcache.geometry import HiqcacheError  # imports torch: seconds that --help need not wait

            if not isinstance(error, HiqcacheError):
                raise
            raise click.ClickException(str(error)) from error


def _unavailable(name: str, error: Exception) -> click.Command:
    """The command that stands in for one whose module cannot be imported."""
    reason = f"{type(error).__name__}: {error}"

    def fail() -> None:
        raise click.ClickException(f"command {name!r} is unavailable: {reason}") from error

    accept_anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(name, callback=fail, short_help=f"(unavailable: {reason})", context_settings=accept_anything)


@click.group(cls=Commands)
@click.version_option(__version__, prog_name="hiqcache")
def main() -> None:
    """Keep SGLang's host KV cache (HiCache L2) in a smaller representation."""


if __name__ == "__main__":
    main(prog_name="hiqcache")
