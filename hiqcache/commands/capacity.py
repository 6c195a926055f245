"""`hiqcache capacity`: how many tokens a host budget holds in each representation, before anything is served."""

import json
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import click

from hiqcache.commands._geometry import geometry_of

if TYPE_CHECKING:
    from hiqcache.capacity import Capacity
    from hiqcache.geometry import KVGeometry

    Results = Mapping[str, Capacity | list[str]]
    """Name of a representation -> what it holds, or every reason why it holds nothing."""

_COUNT = click.IntRange(1, 65_536)


def _no_nan(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    if value is not None and math.isnan(value):  # NaN is outside no range of click's
        raise click.BadParameter("NaN is not a ratio.")
    return value


@click.command
@click.option("--config", metavar="PATH", help="The model's Hugging Face config.json, or the folder that holds it.")
@click.option("--layers", type=_COUNT, help="Layers with KV; instead of --config.")
@click.option("--heads", type=_COUNT, help="KV heads of the whole model; instead of --config.")
@click.option("--head-dim", type=_COUNT, help="Values of a K head for one token; instead of --config.")
@click.option("--v-head-dim", type=_COUNT, help="Values of a V head, where it differs from K's.")
@click.option("--tp-size", type=_COUNT, default=1, show_default=True, help="Ranks that the heads are divided among.")
@click.option("--page-size", type=_COUNT, default=1, show_default=True, help="Tokens in a page.")
@click.option("--hicache-size", type=_COUNT, metavar="GB", help="Host budget of each rank, in whole GB of 10**9 bytes.")
@click.option(
    "--hicache-ratio", type=click.FloatRange(0, 65_536, min_open=True), callback=_no_nan, help="L2 tokens per L1 token."
)
@click.option("--device-tokens", type=click.IntRange(1, 10**12), help="L1 tokens, for --hicache-ratio.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.pass_context
def command(
    ctx: click.Context,
    config: str | None,
    layers: int | None,
    heads: int | None,
    head_dim: int | None,
    v_head_dim: int | None,
    tp_size: int,
    page_size: int,
    hicache_size: int | None,
    hicache_ratio: float | None,
    device_tokens: int | None,
    as_json: bool,
) -> None:
    """Show what a host budget holds in each representation.

    The model is given by --config, or by --layers, --heads and --head-dim; the budget by --hicache-size, or by
    --hicache-ratio and --device-tokens. Figures are for one rank and rounded as SGLang rounds them.

    The exit status is 1 if no representation can hold the model.
    """
    tokens = _budget(hicache_size, hicache_ratio, device_tokens, page_size)
    geometry = geometry_of(config, layers, heads, head_dim, v_head_dim, tp_size, page_size)

    from hiqcache.capacity import capacities
    from hiqcache.model_config import key_biases

    results = capacities(geometry, tokens)
    show = _print_json if as_json else _print_table
    show(geometry, results, key_biases(config) if config else None)
    if all(isinstance(result, list) for result in results.values()):
        ctx.exit(1)


def _budget(size: int | None, ratio: float | None, device_tokens: int | None, page_size: int) -> Callable[[int], int]:
    """The budget as a function: bytes per token -> tokens in L2."""
    from hiqcache.capacity import tokens_of_ratio, tokens_of_size

    match size, ratio, device_tokens:
        case int(), None, None:
            return lambda bytes_per_token: tokens_of_size(size, bytes_per_token, page_size)
        case None, float(), int():
            return lambda _: tokens_of_ratio(ratio, device_tokens, page_size)
    raise click.UsageError("Give either --hicache-size, or --hicache-ratio together with --device-tokens.")


def _print_table(geometry: "KVGeometry", results: "Results", biased: str | None) -> None:
    from rich.table import Column

    from hiqcache import registry
    from hiqcache.commands._table import print_table
    from hiqcache.key_biases import PAGE

    widths = " and ".join(str(dim) for dim in dict.fromkeys((geometry.head_dim, geometry.v_head_dim)))
    click.echo(
        f"One rank at TP={geometry.tp_size}: layers {geometry.layers}, KV heads {geometry.heads} x {widths}, "
        f"page size {geometry.page_size}"
    )
    numbers = ("bytes/token", "L2 tokens", "host bytes")
    rows = []
    for name, result in results.items():
        if isinstance(result, list):
            rows.append([name, *"-" * len(numbers), f"refused: {'; '.join(result)}"])
        else:
            counts = (result.bytes_per_token, result.tokens, result.host_bytes)
            rows.append([name, *map("{:,}".format, counts), f"{result.gain:.2f}x, {result.saving:.1%} saved"])
    columns = [Column("name", no_wrap=True), *(Column(n, no_wrap=True, justify="right") for n in numbers)]
    print_table([*columns, "against BF16"], rows)
    held = [name for name, result in results.items() if not isinstance(result, list)]
    minding = [name for name in held if registry.get(name).scales_keys]
    if biased and minding:
        click.echo(
            f"K has biases in this model ({biased}). If they are large, a server divides their channels by powers of "
            f"two for {', '.join(minding)}. Figures: {PAGE}"
        )


def _print_json(geometry: "KVGeometry", results: "Results", biased: str | None) -> None:
    from attrs import asdict

    def fields(result: "Capacity | list[str]") -> dict:
        if isinstance(result, list):
            return {"refused": result}
        return {**asdict(result), "host_bytes": result.host_bytes, "gain": result.gain, "saving": result.saving}

    document = {
        "geometry": {**asdict(geometry), "dtype": str(geometry.dtype).removeprefix("torch.")},
        "key_biases": biased,
        "representations": {name: fields(result) for name, result in results.items()},
    }
    click.echo(json.dumps(document, indent=2))
