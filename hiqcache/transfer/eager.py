"""The plain-PyTorch transfer: every representation, every device, no code from the representation's author."""

import torch

from hiqcache.arena import HostArena
from hiqcache.exponents import KeyExponents, divide, multiply
from hiqcache.geometry import Part
from hiqcache.representation import HostRepresentation
from hiqcache.transfer.base import DeviceRows, Transfer

CHUNK_TOKENS = 2048
"""Tokens encoded or decoded at once: bounds the memory of one call, whatever the transfer's size."""


class EagerTransfer(Transfer):
    """Gathers rows, encodes, scatters blocks; and back.

    On a GPU it indexes the pinned arena through its alias in the device's address space, so no index ever has to
    come back to the host.

    Args:
        representation: encodes and decodes.
        arena: where blocks lie; its buffer is CPU memory, pinned if the rows are on a GPU.
        rows: the device pool.
    """

    def __init__(self, representation: HostRepresentation, arena: HostArena, rows: DeviceRows):
        super().__init__(rows.device, representation.geometry.page_size)
        self._representation = representation
        self._rows = rows
        self._factors: torch.Tensor | None = None
        self._chunk = max(1, CHUNK_TOKENS // self._page_size)
        self._share = 1 / (len(Part) * representation.geometry.layers)
        """What one part and layer is of a token."""
        reachable = HostArena(arena.shape, device_alias(arena.buffer, rows.device))
        self._blocks = {part: reachable.blocks(part) for part in Part}
        # One pair of buffers for each direction: SGLang runs the two on different streams.
        self._backup_staging = {part: self._staging(part) for part in Part}
        self._restore_staging = {part: self._staging(part) for part in Part}

    def _staging(self, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for one chunk: values `[pages, page_size, heads, dim]` and blocks `[pages, block_bytes]`."""
        geometry, device = self._representation.geometry, self._rows.device
        values = (self._chunk, self._page_size, geometry.heads, geometry.dim(part))
        block_bytes = self._representation.layouts[part].block_bytes
        return (
            torch.empty(values, dtype=geometry.dtype, device=device),
            torch.empty((self._chunk, block_bytes), dtype=torch.uint8, device=device),
        )

    def scale_keys(self, exponents: KeyExponents) -> None:
        self._factors = exponents.factors(self._rows.device) if exponents.any else None

    @property
    def host_indices_device(self) -> torch.device:
        return self._rows.device

    @property
    def staging_bytes(self) -> int:
        staging = (*self._backup_staging.values(), *self._restore_staging.values())
        return sum(buffer.nbytes for pair in staging for buffer in pair)

    def _backup(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        for pages, slots in self._chunks(host_indices, device_indices):
            for part in Part:
                values, blocks = (buffer[: len(pages)] for buffer in self._backup_staging[part])
                for layer, rows in enumerate(self._rows.of(part)):
                    torch.index_select(rows, 0, slots, out=values.view(-1, *values.shape[2:]))
                    self.encode_clock.start()
                    if part is Part.K and self._factors is not None:
                        divide(values, self._factors[layer])
                    self._representation.encode(values, part, blocks)
                    self.encode_clock.stop(len(slots) * self._share)
                    self._blocks[part][layer].index_copy_(0, pages, blocks)

    def _restore(self, layer: int, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        for pages, slots in self._chunks(host_indices, device_indices):
            for part in Part:
                values, blocks = (buffer[: len(pages)] for buffer in self._restore_staging[part])
                torch.index_select(self._blocks[part][layer], 0, pages, out=blocks)
                self.decode_clock.start()
                self._representation.decode(blocks, part, values)
                if part is Part.K and self._factors is not None:
                    multiply(values, self._factors[layer])
                self.decode_clock.stop(len(slots) * self._share)
                self._rows.of(part)[layer].index_copy_(0, slots, values.view(-1, *values.shape[2:]))

    def _chunks(self, host_indices: torch.Tensor, device_indices: torch.Tensor):
        pages = host_indices.to(self._rows.device, non_blocking=True)[:: self._page_size] // self._page_size
        yield from zip(pages.split(self._chunk), device_indices.split(self._chunk * self._page_size), strict=True)


class _CudaAlias:
    """Host memory described to PyTorch as memory that the GPU reaches (CUDA array interface, version 3)."""

    def __init__(self, buffer: torch.Tensor):
        self.buffer = buffer
        self.__cuda_array_interface__ = {
            "shape": tuple(buffer.shape),
            "typestr": "|u1",
            "data": (buffer.data_ptr(), False),
            "version": 3,
        }


def device_alias(buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`buffer` as a tensor of `device` that shares its memory.

    Unified addressing gives pinned host memory the same address on the GPU, so its kernels can index it in place.

    Args:
        buffer: uint8 CPU memory; registered with CUDA if `device` is a GPU.
        device: where the tensor should appear to be.
    """
    return buffer if device.type == "cpu" else torch.as_tensor(_CudaAlias(buffer), device=device)
