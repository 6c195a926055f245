"""The geometry that a command's options describe."""

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from hiqcache.geometry import KVGeometry


def geometry_of(
    config: str | None,
    layers: int | None,
    heads: int | None,
    head_dim: int | None,
    v_head_dim: int | None,
    tp_size: int,
    page_size: int,
) -> "KVGeometry":
    """One rank's geometry, from a config.json or from explicit numbers.

    Raises:
        click.UsageError: both are given, or neither in full.
        HiqcacheError: the model or the split among ranks is refused.
    """
    match config, layers, heads, head_dim, v_head_dim:
        case str(), None, None, None, None:
            from hiqcache.model_config import geometry_from_config

            return geometry_from_config(config, tp_size=tp_size, page_size=page_size)
        case None, int(), int(), int(), _:
            from hiqcache.geometry import KVGeometry
            from hiqcache.model_config import local_kv_heads

            return KVGeometry(
                layers=layers,
                heads=local_kv_heads(heads, tp_size),
                head_dim=head_dim,
                v_head_dim=v_head_dim or head_dim,
                page_size=page_size,
                tp_size=tp_size,
            )
    numbers = {"--layers": layers, "--heads": heads, "--head-dim": head_dim, "--v-head-dim": v_head_dim}
    given = [option for option, value in {"--config": config, **numbers}.items() if value is not None]
    raise click.UsageError(
        f"Give either --config, or --layers, --heads and --head-dim; given: {', '.join(given) or 'none of them'}."
    )
