"""A SGLang plugin for tests: watches a real server's host pool and checks every byte that moves.

At each backup it encodes the device rows with the representation's plain-PyTorch code on the CPU and compares the
arena with that; at each restore it compares the device rows with what that code decodes from the rows that were
backed up into the same slots. Where the pool divides K's channels, so does the probe. Lines of JSON with the TP rank
and the counts go to the file named by HIQCACHE_PROBE.

Beside that, HIQCACHE_PROBE_ROWS names a folder that gets the device rows of each backup, one file after the other, and
HIQCACHE_PROBE_GATE a file that, while it is there, keeps the pages of a dump from being written. HIQCACHE_PROBE_AUDIT
names a file that, while it is there, makes each flush evict everything first and count the host pool's slots.

HIQCACHE_SABOTAGE=1 makes SGLang build another pool instead, whatever the hiqcache plugin says.
"""

import functools
import json
import os
import pathlib
import time

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel

from hiqcache.geometry import Part
from hiqcache.inspect import writer

_POOL = "hiqcache.sglang.pool.RepresentationHostPool."


def register() -> None:
    if os.environ.get("HIQCACHE_SABOTAGE") == "1":
        HookRegistry.register(
            "sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler._mha_host_inputs", _foreign_pool, HookType.AROUND
        )
    if os.environ.get("HIQCACHE_PROBE"):
        HookRegistry.register(_POOL + "backup_from_device_all_layer", _backup, HookType.AROUND)
        HookRegistry.register(_POOL + "load_to_device_per_layer", _restore, HookType.AROUND)
    if os.environ.get("HIQCACHE_PROBE_GATE"):
        writer.CHUNK_BYTES = 1  # page by page
        HookRegistry.register("hiqcache.inspect.writer.SafetensorsWriter.write", _gated_write, HookType.AROUND)
    if os.environ.get("HIQCACHE_PROBE_AUDIT"):
        HookRegistry.register(
            "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.reset", _audited_reset, HookType.AROUND
        )


def _foreign_pool(original, *args, **kwargs):
    from hiqcache.registry import get
    from hiqcache.sglang.pool import RepresentationHostPool

    # SGLang's own pool cannot be built without a GPU; any class that is not ours will do.
    class ForeignHostPool(RepresentationHostPool):
        pass

    _, info, options = original(*args, **kwargs)
    return functools.partial(ForeignHostPool, representation=get("bf16")), info, options


def _write(**event) -> None:
    with open(os.environ["HIQCACHE_PROBE"], "a") as file:
        file.write(json.dumps({"rank": get_parallel().tp_rank, **event}) + "\n")


def _rows(pool, part):
    return pool.device_k_buffers if part is Part.K else pool.device_v_buffers


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _backup(original, pool, device_pool, host_indices, device_indices, io_backend):
    representation, geometry = pool.representation, pool.representation.geometry
    if not hasattr(pool, "probe_shadow"):
        # What a restore of each slot must give: [layers, slots, heads, dim] for each part.
        pool.probe_shadow = {
            part: torch.empty(geometry.layers, pool.size, geometry.heads, geometry.dim(part), dtype=geometry.dtype)
            for part in Part
        }
    _wait()
    host = host_indices.cpu()
    pages = host[:: pool.page_size] // pool.page_size
    encoded = {}
    if folder := os.environ.get("HIQCACHE_PROBE_ROWS"):
        _save_rows(pathlib.Path(folder), pool, pages, device_indices)
    for part in Part:
        for layer, rows in enumerate(_rows(pool, part)):
            values = rows[device_indices].cpu().view(-1, pool.page_size, geometry.heads, geometry.dim(part))
            blocks = torch.empty(len(pages), representation.layouts[part].block_bytes, dtype=torch.uint8)
            exponents = pool.key_exponents.values[layer] * (part is Part.K)
            representation.encode(_scaled(values, -exponents), part, blocks)
            decoded = torch.empty_like(values)
            representation.decode(blocks, part, decoded)
            decoded = _scaled(decoded, exponents)
            pool.probe_shadow[part][layer][host] = decoded.flatten(0, 1)
            encoded[part, layer] = blocks
    original(pool, device_pool, host_indices, device_indices, io_backend)
    _wait()
    wrong = sum(
        int((pool.arena.blocks(part)[layer][pages] != blocks).sum()) for (part, layer), blocks in encoded.items()
    )
    _write(event="backup", tokens=len(host), wrong_bytes=wrong, slots=[int(host.min()), int(host.max())])


def _scaled(values, exponents):
    """BF16 `[..., heads, dim]` times powers of two `[heads, dim]`; by float64, which rounds once."""
    largest = torch.finfo(torch.bfloat16).max
    exact = (values.double() * 2.0 ** exponents.double()).clamp(-largest, largest)
    return torch.where(values.isfinite(), exact.bfloat16(), values)


def _save_rows(folder, pool, pages, device_indices):
    """Ids of the pages, and values `[layers, pages, page_size, heads, dim]` of each part."""
    rows = {part.value: torch.stack([rows[device_indices].cpu() for rows in _rows(pool, part)]) for part in Part}
    saved = {name: values.unflatten(1, (-1, pool.page_size)) for name, values in rows.items()}
    number = len(list(folder.iterdir()))
    torch.save({"pages": pages, **saved}, folder / f"{number:04}.pt")


def _gated_write(original, writer, *arguments):
    while os.path.exists(os.environ["HIQCACHE_PROBE_GATE"]):
        time.sleep(0.02)
    original(writer, *arguments)


def _restore(original, pool, device_pool, host_indices, device_indices, layer_id, io_backend, **options):
    original(pool, device_pool, host_indices, device_indices, layer_id, io_backend, **options)
    _wait()
    host = host_indices.cpu()
    wrong = 0
    for part in Part:
        rows = _rows(pool, part)[layer_id][device_indices].cpu()
        wrong += int((rows.view(torch.int16) != pool.probe_shadow[part][layer_id][host].view(torch.int16)).sum())
    _write(event="restore", layer=layer_id, tokens=len(host), wrong_values=wrong)


def _audited_reset(original, tree):
    """A flush makes the pool's free list anew, so that a slot that was lost before is found only by evicting."""
    if not os.path.exists(os.environ["HIQCACHE_PROBE_AUDIT"]):
        original(tree)
        return
    (entry,) = tree.host_pool_group.entries
    _wait()
    tree.check_hicache_events()
    tree.evict(EvictParams(num_tokens=tree.evictable_size()))
    tree.evict_host(entry.host_pool.size)
    _audit(entry.host_pool, "eviction")
    original(tree)
    _audit(entry.host_pool, "flush")


def _audit(pool, after) -> None:
    free = torch.cat([pool.free_slots, *pool.release_slots])
    distinct = len(free[(free >= 0) & (free < pool.size)].unique())
    used = int(pool.slot_used.sum())
    _write(event="audit", after=after, slots=pool.size, free=len(free), distinct=distinct, used=used)
