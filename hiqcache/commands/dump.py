"""`hiqcache dump`: have a running server write what its L2 holds to files."""

import http.client
import json
import time
import urllib.error
import urllib.request
from typing import Any

import click

KEY_VARIABLE = "HIQCACHE_ADMIN_KEY"
ROUTE = "/hicache/dump"
POLL_SECONDS = 0.5
PATIENCE_SECONDS = 600
"""A server answers between two steps of its scheduler, and a step may be a long prefill."""


@click.command
@click.argument("name")
@click.option("--url", default="http://127.0.0.1:30000", show_default=True, help="The server's address.")
@click.option("--all", "everything", is_flag=True, help="Every page of L2, also those that hold nothing.")
@click.option("--pages", metavar="RANGES", help="These pages, whatever they hold: 0-99, or 0-9,50-59.")
@click.option(
    "--admin-key",
    envvar=KEY_VARIABLE,
    metavar="KEY",
    help=f"The server's --admin-api-key. Best left to {KEY_VARIABLE}: other users see a command line.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a sentence.")
def command(name: str, url: str, everything: bool, pages: str | None, admin_key: str | None, as_json: bool) -> None:
    """Have a server that runs with `--hicache-dump-dir DIR` write its L2 to DIR/NAME-tpN.safetensors, N the rank.

    It takes the server's admin key (`--admin-api-key`), best from HIQCACHE_ADMIN_KEY.

    The server goes on serving; until the files are written its L2 evicts nothing, and takes new pages only where it has
    room. By default the pages that hold something are written. `hiqcache inspect` shows what is in a file;
    docs/dump-and-inspect.md describes it. Ctrl-C ends this command, and not the dump.

    The exit status is 1 if the server refuses or fails; no file is left then.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    if everything and pages is not None:
        raise click.UsageError("Give --all or --pages, not both.")
    if not url.lower().startswith(("http://", "https://")):
        raise click.BadParameter(f"{url!r} does not start with http:// or https://.", param_hint="--url")
    console = Console(stderr=True)
    columns = TextColumn("writing"), BarColumn(), TextColumn("{task.completed:,} of {task.total:,} pages")
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        wanted = "all" if everything else "occupied" if pages is None else pages
        status = _ask(url, admin_key, {"name": name, "pages": wanted})
        task = progress.add_task("", total=status["pages"])
        while status["state"] == "writing":
            progress.update(task, completed=status["written"])
            time.sleep(POLL_SECONDS)
            status = _ask(url, admin_key, None)
    if status["state"] != "done":
        raise click.ClickException(f"the dump failed, and left no file: {status['error']}")
    if as_json:
        click.echo(json.dumps(status, indent=2))
    else:
        click.echo(f"{status['pages']:,} pages, {status['bytes']:,} bytes, on the server in:")
        for file in status["files"]:
            click.echo(file)


def _ask(url: str, key: str | None, body: dict[str, Any] | None) -> dict[str, Any]:
    """Begin a dump; with no body, ask how far it is.

    Raises:
        click.ClickException: the server refuses, or is none. (`HiqcacheError` would import torch: seconds that a client
            need not wait.)
    """
    if key and not key.isascii():
        raise click.ClickException("the admin key has characters other than ASCII, which HTTP cannot carry")
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url.rstrip("/") + ROUTE, data, headers)
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=PATIENCE_SECONDS) as answer:
            status = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        raise click.ClickException(_refusal(url, error, key)) from error
    except urllib.error.URLError as error:
        raise click.ClickException(f"no answer from {url}: {error.reason}") from error
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        raise click.ClickException(f"no sensible answer from {url}: {error}") from error
    match status:
        case {
            "state": "writing" | "done" | "failed",
            "pages": int(),
            "written": int(),
            "bytes": int(),
            "files": list(),
            "error": str(),
        }:
            return status
    raise click.ClickException(f"{url} answered, but not as a server with hiqcache does")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: followed, it would ask with GET, and take the key to whatever host it names."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:
        return None


def _refusal(url: str, error: urllib.error.HTTPError, key: str | None) -> str:
    if error.code == 401:
        needed = f"give its admin key (--admin-api-key) in {KEY_VARIABLE} or with --admin-key"
        return f"{url} refused {'this key' if key else 'a request with no key'}: {needed}"
    if error.code == 404:
        return (
            f"{url} writes no dumps: start it with --hicache-representation NAME, --hicache-dump-dir DIR and "
            "--admin-api-key KEY"
        )
    if target := error.headers.get("Location"):
        return f"{url} sends on to {target}: give --url the server's own address"
    try:
        return f"{url} refused: {json.loads(error.read())['error']}"
    except (OSError, ValueError, TypeError, KeyError, RecursionError, http.client.HTTPException):
        return f"{url} refused with status {error.code}"
