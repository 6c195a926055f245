"""`hiqcache doctor`: is this machine ready?"""

import json
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from hiqcache.doctor.checks import Finding, Request

_COUNT = click.IntRange(1, 65_536)


@click.command
@click.option(
    "--model", metavar="PATH", help="Check this model too: its Hugging Face config.json, or the folder that holds it."
)
@click.option("--hicache-size", type=_COUNT, metavar="GB", help="Host budget of each rank, in whole GB of 10**9 bytes.")
@click.option("--tp-size", "--tp", type=_COUNT, default=1, show_default=True, help="Ranks on this machine.")
@click.option("--page-size", type=_COUNT, default=1, show_default=True, help="Tokens in a page.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.pass_context
def command(
    ctx: click.Context, model: str | None, hicache_size: int | None, tp_size: int, page_size: int, as_json: bool
) -> None:
    """Check whether this machine is ready to serve with hiqcache.

    SGLang and its hooks, GPU, driver, compilers, host memory and, with --model, what each representation makes of that
    model. SGLang is imported for it, which takes up to a minute; no server is started.

    The exit status is 0 if nothing failed, 1 if something did. Warnings do not change it.
    """
    from rich.console import Console

    from hiqcache.doctor.checks import diagnose, ready
    from hiqcache.doctor.facts import observe

    request = _request(model, hicache_size, tp_size, page_size)
    with Console(stderr=True).status("Asking SGLang, which takes up to a minute"):  # shown on terminals only
        facts = observe()
    findings = diagnose(facts, request)
    show = _print_json if as_json else _print_table
    show(findings)
    if not ready(findings):
        ctx.exit(1)


def _request(model: str | None, size: int | None, tp_size: int, page_size: int) -> "Request":
    from hiqcache.capacity import capacities, tokens_of_size
    from hiqcache.doctor.checks import Request
    from hiqcache.geometry import HiqcacheError
    from hiqcache.model_config import geometry_from_config

    if model is None:
        return Request(size=size, tp_size=tp_size)
    try:
        geometry = geometry_from_config(model, tp_size=tp_size, page_size=page_size)
    except HiqcacheError as error:
        return Request(size=size, tp_size=tp_size, model_error=str(error))
    verdicts = capacities(geometry, lambda bytes_per_token: tokens_of_size(size or 0, bytes_per_token, page_size))
    return Request(size=size, tp_size=tp_size, verdicts=verdicts)


def _print_table(findings: "list[Finding]") -> None:
    from rich.table import Column

    from hiqcache.commands._table import print_table
    from hiqcache.doctor.checks import ready

    rows = [(f.check, f.status.value, *(" ".join(text.split()) for text in (f.seen, f.advice))) for f in findings]
    print_table([Column("check", no_wrap=True), Column("status", no_wrap=True), "found", "what to do"], rows)
    click.echo("Ready." if ready(findings) else "Not ready.")


def _print_json(findings: "list[Finding]") -> None:
    from hiqcache.doctor.checks import ready

    checks = [{"check": f.check, "status": f.status.value, "found": f.seen, "what_to_do": f.advice} for f in findings]
    click.echo(json.dumps({"ready": ready(findings), "checks": checks}, indent=2))
