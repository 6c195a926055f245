"""The host pool: SGLang's slots, allocator and locks over an arena of encoded blocks."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, MHABufferInfo
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.runtime_context import get_parallel

from hiqcache.arena import LAYOUTS, ArenaShape, HostArena
from hiqcache.exponents import KeyExponents
from hiqcache.geometry import KVGeometry, UnsupportedGeometry, Violation
from hiqcache.representation import HostRepresentation
from hiqcache.transfer import DeviceRows, make_transfer

if TYPE_CHECKING:
    from hiqcache.sglang.dump import LiveDump

DEVICES = ("cuda", "cpu")


def geometry_of(info: MHABufferInfo, page_size: int) -> KVGeometry:
    """The geometry of a rank's device pool."""
    return KVGeometry(
        layers=len(info.buffers.k),
        heads=info.head_num,
        head_dim=info.head_dim,
        v_head_dim=info.v_head_dim,
        page_size=page_size,
        dtype=info.dtype,
        tp_size=get_parallel().attn_tp_size,
    )


class RepresentationHostPool(MHATokenToKVPoolHost):
    """SGLang's MHA host pool with the bytes of a slot replaced.

    Slots, free lists, locks, sizing and pinning are SGLang's own; what a slot holds, and how it moves, is hiqcache's.
    `kv_buffer` is the very tensor that SGLang's allocator returned, one run of bytes, because the ranges that it
    registered with CUDA hang on that object.

    Args:
        buffer_info: SGLang's description of the device pool.
        *sizing: `host_to_device_ratio`, `host_size` (GB) and what follows, as SGLang's pool takes them.
        representation: the class to store blocks in.

    Raises:
        UnsupportedGeometry: every rule that the device pool, the host layout or the geometry breaks.
    """

    def __init__(
        self,
        buffer_info: MHABufferInfo,
        host_to_device_ratio: float,
        host_size: int,
        page_size: int,
        layout: str,
        *,
        representation: type[HostRepresentation],
        **options: Any,
    ):
        geometry = geometry_of(buffer_info, page_size)
        violations = [
            *_pool_violations(buffer_info, layout, options),
            *representation.requirements(geometry),
        ]
        if violations:
            raise UnsupportedGeometry(representation.name, violations)
        self.representation = representation(geometry)
        self.storage_format_tag = representation.format_tag
        options["pin_memory"] = buffer_info.device.type != "cpu"
        super().__init__(buffer_info, host_to_device_ratio, host_size, page_size, layout, **options)

    # -- what SGLang's constructor asks for ---------------------------------------------------------------------

    def get_size_per_token(self) -> int:
        return self.representation.bytes_per_token()

    def init_kv_buffer(self) -> torch.Tensor:
        shape = ArenaShape.of(self.representation, self.page_num, self.layout)
        buffer = ALLOC_MEMORY_FUNCS[self._transfer_device.type](
            (shape.total_bytes,),
            dtype=torch.uint8,
            device=self.device,
            pin_memory=self.pin_memory,
            allocator=self.allocator,  # type: ignore[arg-type]  # SGLang's table mixes two signatures
            # Large buffers are registered in pieces, and one copy must not span two.
            registration_granularity_bytes=shape.page_stride,
        )
        self.arena = HostArena(shape, buffer)
        return buffer

    def _initialize_transfer_views(
        self, buffer_info: MHABufferInfo, write_back_staging: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        rows = DeviceRows(self.device_k_buffers, self.device_v_buffers)
        # SGLang allocated its BF16 staging before it sized the KV pool, and nothing else uses it: no memory is taken
        # from anybody by using it as bytes.
        self.transfer = make_transfer(self.representation, self.arena, rows, write_back_staging or ())
        self.key_exponents = KeyExponents.none(self.representation.geometry)

    def scale_keys(self, exponents: KeyExponents) -> None:
        """Divide K's channels before they are encoded, and multiply them after decoding.

        Called before the first transfer, once at most.
        """
        self.key_exponents = exponents
        self.transfer.scale_keys(exponents)

    # -- holding pages still, for a dump --------------------------------------------------------------------------

    dump: "LiveDump | None" = None
    """The latest one asked for."""
    _held: torch.Tensor | None = None
    """For each slot, whether its page is held; None while none is.

    A held slot that is free is unused in `slot_used`, and in none of SGLang's lists of free slots. The scheduler waits
    for all of this, so it is a few passes over flags of the pool.
    """

    def occupied_pages(self) -> torch.Tensor:
        """Which pages are handed out, `[page_num]` bool."""
        with self.lock:
            return self.slot_used[:: self.page_size].clone()

    @property
    def holding(self) -> bool:
        """Whether pages are held."""
        return self._held is not None

    def hold(self, pages: torch.Tensor) -> None:
        """Withhold pages from allocation, both free ones and those freed from now on, until `release`.

        Args:
            pages: which ones, `[page_num]` bool.
        """
        with self.lock:
            self._held = pages[:, None].expand(-1, self.page_size).reshape(-1)
            self._withhold(self._held)

    def release(self) -> None:
        """End `hold`: the held pages that are free can be allocated from now on."""
        with self.lock:
            if self._held is not None:
                self._add_free(_numbers(self._held & ~self.slot_used))
                self._held = None

    def _withhold(self, held: torch.Tensor) -> None:
        """Take the held slots out of SGLang's lists of free ones."""
        free = ~self.slot_used
        if bool((free & held).any()):
            self.free_slots = _numbers(free & ~held)
            self.release_slots, self.num_release_slots = [], 0

    def _add_free(self, slots: torch.Tensor) -> None:
        if len(slots):
            self.release_slots.append(slots)
            self.num_release_slots += len(slots)

    def free(self, indices: torch.Tensor) -> int:
        with self.lock:
            count = super().free(indices)
            if self._held is not None and count:
                slots = self.release_slots.pop()
                self.num_release_slots -= len(slots)
                self._add_free(slots[~self._held[slots]])
            return count

    def clear(self) -> None:
        with self.lock:
            super().clear()
            if self._held is not None:
                self._withhold(self._held)

    # -- moving pages -------------------------------------------------------------------------------------------

    def backup_from_device_all_layer(self, device_pool, host_indices, device_indices, io_backend) -> None:
        _require_kernel(io_backend)
        self.transfer.backup(host_indices, device_indices)

    def load_to_device_per_layer(
        self, device_pool, host_indices, device_indices, layer_id, io_backend, *, is_draft: bool = False
    ) -> None:
        _require_kernel(io_backend)
        if is_draft:
            raise NotImplementedError("hiqcache: a draft model's layers are not part of this pool")
        # SGLang's transfer engine calls this for every layer in order, as `Transfer.restore` wants it.
        if 0 <= layer_id < self.layer_num:
            self.transfer.restore(layer_id, host_indices, device_indices)

    def destroy(self) -> None:
        super().destroy()
        # Their views would keep the unregistered buffer alive.
        vars(self).pop("transfer", None)
        vars(self).pop("arena", None)

    # -- what reads raw BF16 pages, and is refused before it gets here -------------------------------------------

    def _no_raw_pages(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"hiqcache: pages of this host pool are encoded as {self.representation.name!r}; storage backends (L3) "
            "and raw page access need BF16 pages"
        )

    get_data_page = _no_raw_pages
    get_dummy_flat_data_page = _no_raw_pages
    set_from_flat_data_page = _no_raw_pages
    get_page_buffer_meta = _no_raw_pages
    get_split_heads_page_buffer_meta = _no_raw_pages
    get_hybrid_pool_buffer = _no_raw_pages
    get_ksize_per_token = _no_raw_pages
    k_buffer = v_buffer = host_kv_data_refs = property(_no_raw_pages)  # type: ignore[assignment]


def _numbers(flags: torch.Tensor) -> torch.Tensor:
    """Where flags are set, int64; NumPy finds them several times faster than `nonzero`."""
    return torch.from_numpy(np.flatnonzero(flags.numpy()))


def _require_kernel(io_backend: str) -> None:
    if io_backend != "kernel":
        raise NotImplementedError(f"hiqcache: saw --hicache-io-backend {io_backend}; allowed: kernel")


def _pool_violations(info: MHABufferInfo, layout: str, options: dict[str, Any]) -> Iterator[Violation]:
    """What SGLang's own description of the pool rules out, whatever the representation."""
    if layout not in LAYOUTS:
        yield Violation(
            rule="host memory layout", seen=layout, allowed=" or ".join(LAYOUTS), flag="--hicache-mem-layout"
        )
    if info.device.type not in DEVICES:
        yield Violation(
            rule="device of the KV cache", seen=info.device.type, allowed=" or ".join(DEVICES), flag="--device"
        )
    elif info.device.type == "cuda" and torch.version.hip:
        yield Violation(
            rule="GPU runtime", seen=f"ROCm {torch.version.hip}", allowed="CUDA", flag="PyTorch (one built for CUDA)"
        )
    if info.buffers.layout is not KVBufferLayout.NHD:
        yield Violation(
            rule="layout of the device KV cache",
            seen=info.buffers.layout.value,
            allowed="nhd",
            flag="SGLANG_USE_HND_KVCACHE and SGLANG_AITER_KV_CACHE_LAYOUT (unset both)",
        )
    elif not all(rows.ndim == 3 and rows.is_contiguous() for rows in (*info.buffers.k, *info.buffers.v)):
        yield Violation(
            rule="rows of the device KV cache",
            seen="strided rows",
            allowed="contiguous rows [slots, heads, dim]",
            flag="--enable-unified-memory (drop it)",
        )
    if info.scales is not None:
        yield Violation(
            rule="quantised device KV cache",
            seen=f"{info.scales.layout.value} scales",
            allowed="none",
            flag="--kv-cache-dtype bf16",
        )
    if info.transfer_buffers is not None:
        yield Violation(rule="relocatable device pool", seen="yes", allowed="no", flag="--enable-unified-memory")
    if drafts := len(options.get("draft_buffer_infos", ())):
        yield Violation(
            rule="KV pool of a draft model",
            seen=f"{drafts} packed draft layers",
            allowed="none",
            flag="--speculative-algorithm (drop it)",
        )
    if (label := options.get("pool_label", "kv")) != "kv":
        yield Violation(rule="pool beside the KV pool", seen=repr(label), allowed="'kv'", flag="the model")
    allocator = options.get("allocator_type", "default")
    if allocator != "default":
        yield Violation(
            rule="host allocator of a storage backend (L3)",
            seen=allocator,
            allowed="default",
            flag="--hicache-storage-backend (drop it)",
        )
    if options.get("dcp_size", 1) != 1:
        yield Violation(rule="decode context parallelism", seen=options["dcp_size"], allowed="1", flag="--dcp-size")
    if options.get("head_group_num", 1) != 1:
        yield Violation(
            rule="head groups of a unified page", seen=options["head_group_num"], allowed="1", flag="the model"
        )
