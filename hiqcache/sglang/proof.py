"""Evidence that an encoded pool is the one in force.

SGLang logs and swallows a plugin's exceptions, so nothing here trusts that a hook ran. Each scheduler looks at the
cache it really built and reports; the launcher refuses to serve unless every scheduler reported what was asked for.
"""

import logging
from typing import Any, NoReturn

import attrs
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from hiqcache import registry
from hiqcache.sglang.choice import Choice, Refused
from hiqcache.sglang.pool import RepresentationHostPool

logger = logging.getLogger(__name__)

KEY = "hiqcache"
"""Field of a scheduler's init info (and of `/server_info`): a list with one report for each scheduler."""


@attrs.frozen(kw_only=True)
class Report:
    """What one scheduler says of its L2.

    Attributes:
        representation: its name.
        format_tag: its byte format.
        bytes_per_token: host bytes of a token on this rank, padding included.
        device_bytes_per_token: the same token's bytes in the device pool.
        tokens: slots of the host pool.
        page_size: tokens in a page.
        layout: `--hicache-mem-layout` in force.
        transfer: class that moves the pages.
        staging_bytes: device memory allocated for it, beyond what SGLang had set aside.
    """

    representation: str
    format_tag: str
    bytes_per_token: int
    device_bytes_per_token: int
    tokens: int
    page_size: int
    layout: str
    transfer: str
    staging_bytes: int

    @classmethod
    def of(cls, pool: RepresentationHostPool) -> "Report":
        """The report of a scheduler with this pool."""
        return cls(
            representation=pool.representation.name,
            format_tag=pool.representation.format_tag,
            bytes_per_token=pool.size_per_token,
            device_bytes_per_token=pool.representation.geometry.device_bytes_per_token,
            tokens=pool.size,
            page_size=pool.page_size,
            layout=pool.layout,
            transfer=type(pool.transfer).__name__,
            staging_bytes=pool.transfer.staging_bytes,
        )

    def __str__(self) -> str:
        host_bytes = self.tokens * self.bytes_per_token
        return (
            f"L2 holds KV as {self.representation}: {self.bytes_per_token:,} bytes per token "
            f"({self.device_bytes_per_token:,} in BF16, {1 - self.bytes_per_token / self.device_bytes_per_token:.2%} "
            f"saved), {self.tokens:,} tokens in {_readable(host_bytes)} where BF16 would hold "
            f"{host_bytes // self.device_bytes_per_token:,} ({self.layout}, pages of {self.page_size}, {self.transfer} "
            f"with {self.staging_bytes / 2**20:.0f} MiB of staging of its own)"
        )


def _readable(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"


_KINDS = {
    "BaseSWAKVPool": "sliding-window layers in a pool of their own; --disable-hybrid-swa-memory gives them none, for "
    "models with equal layers",
    "HybridLinearKVPool": "recurrent or linear-attention layers",
    "MLATokenToKVPool": "multi-head latent attention",
}
"""SGLang's classes of device pools -> what their models have."""


def plain_pool(device_pool: Any) -> None:
    """Refuse other models before host memory is taken for them.

    Args:
        device_pool: the model's KV pool.

    Raises:
        Refused: it is not that of a plain attention model.
    """
    if isinstance(device_pool, MHATokenToKVPool):
        return
    kind = type(device_pool)
    known = next((_KINDS[base.__name__] for base in kind.__mro__ if base.__name__ in _KINDS), "unknown to hiqcache")
    _refuse(f"device pool {kind.__name__} ({known})", f"{MHATokenToKVPool.__name__}, one pool for all layers")


def pool_in_force(tree_cache: Any) -> RepresentationHostPool:
    """The encoded host pool of a radix cache, once nothing else can be holding KV in host memory.

    Args:
        tree_cache: what `build_kv_cache` returned as the scheduler's prefix cache.

    Raises:
        Refused: the cache is not a plain `UnifiedRadixCache`, has no HiCache, keeps pools beside KV, or its KV pool is
            any other class.
    """
    kind = type(tree_cache)
    if kind is not UnifiedRadixCache:
        _refuse(f"prefix cache {kind.__name__}", UnifiedRadixCache.__name__)
    group = tree_cache.host_pool_group
    if group is None or tree_cache.cache_controller is None:
        _refuse("a prefix cache without HiCache", "HiCache attached (--enable-hierarchical-cache)")
    pools = {entry.name.value for entry in group.entries} | {
        spec.pool_name.value for spec in tree_cache.sidecar_pool_specs
    }
    if pools != {"kv"}:
        _refuse(f"host pools {sorted(pools)}", "kv alone, the pool of a plain attention model")
    (entry,) = group.entries
    pool, device_pool = entry.host_pool, entry.device_pool
    if type(pool) is not RepresentationHostPool:
        _refuse(
            f"host pool {type(pool).__name__} over device pool {type(device_pool).__name__}",
            f"{RepresentationHostPool.__name__}, which takes the place of the host pool of MHA and GQA models only",
        )
    if entry.packed_draft_device_pools:
        _refuse("a draft model's layers packed into the KV pool", "none (drop --speculative-algorithm)")
    if device_pool.layer_shard_enabled:
        _refuse("a layer-sharded device pool", "every layer on every rank")
    if device_pool.host_transfer_translate is not None:
        _refuse("a device pool that relocates its rows", "fixed rows (drop --enable-unified-memory)")
    return pool


def _refuse(seen: str, allowed: str) -> NoReturn:
    raise Refused(f"the KV cache in force is not the one asked for: saw {seen}; allowed: {allowed}")


def verify(choice: Choice, infos: list[dict[str, Any]]) -> None:
    """Check the reports of every scheduler this launcher started, and log once what serves.

    Args:
        choice: what was asked for.
        infos: the schedulers' init infos, as SGLang collected them.

    Raises:
        Refused: a scheduler sent no report, or one of another representation or byte format.
    """
    entries: list[dict[str, Any] | None] = [entry for info in infos for entry in info.get(KEY) or [None]]
    reports = [Report(**entry) for entry in entries if entry is not None]
    if not reports or len(reports) < len(entries):
        raise Refused(
            f"{len(reports)} of {len(entries)} schedulers reported what they serve; allowed: all of them. The others' "
            "log says why the hiqcache plugin did not load there."
        )
    expected = (choice.name, registry.get(choice.name).format_tag)
    for report in reports:
        found = (report.representation, report.format_tag)
        if found != expected:
            raise Refused(f"a scheduler serves representation and format {found}; allowed: {expected}")
    logger.info("hiqcache: %s; the same on %d scheduler(s)", min(reports, key=lambda r: r.tokens), len(reports))
