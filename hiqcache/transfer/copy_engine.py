"""Many asynchronous copies between pinned memory and the GPU by few driver calls (`cuMemcpyBatchAsync`).

One call for each copy costs the host 3 microseconds and the copy engine its lead; PyTorch binds no batched copy. A
batch leaves the link idle for 0.4 microseconds after each copy, which a second one beside it fills.
"""

import ctypes
from functools import cache
from typing import Any

import numpy as np
import torch

_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_DEVICE, _HOST = 1, 2  # CU_MEM_LOCATION_TYPE_*


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source", _Location),
        ("destination", _Location),
        ("flags", ctypes.c_uint),
    )


@cache
def _copy_function() -> Any:
    function = getattr(ctypes.CDLL("libcuda.so.1"), "cuMemcpyBatchAsync", None)
    if function is not None:
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        function.argtypes = [pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer]
    return function


@cache
def _attributes(device: int, to_host: bool) -> _Attributes:
    ends = (_Location(_DEVICE, device), _Location(_HOST, 0))
    return _Attributes(_STREAM_ORDER, *(ends if to_host else reversed(ends)), 0)


def available() -> bool:
    """Whether the driver has batched copies (CUDA 12.8 and later)."""
    return _copy_function() is not None


MANY, LONG = 64, 1 << 20
"""Copies that are worth a second stream, which costs the host 25 microseconds, and their size from which it gains
nothing."""


class CopyEngine:
    """One direction's copies: on the caller's stream, and many short ones on one beside it too.

    Args:
        device: the GPU.
        to_host: whether the destinations are the host's side.
    """

    def __init__(self, device: torch.device, to_host: bool):
        index = torch.cuda.current_device() if device.index is None else device.index
        self._attributes = _attributes(index, to_host)
        self._beside = torch.cuda.Stream(device)
        self._begin, self._end = torch.cuda.Event(), torch.cuda.Event()

    def copy(self, copies: np.ndarray, stream: torch.cuda.Stream) -> None:
        """Enqueue copies, in any order among themselves.

        Args:
            copies: `[3, n]` int64: destinations, sources, sizes in bytes; each row contiguous. One side is pinned host
                memory, and each copy stays within one registration of it.
            stream: on the device, not the legacy default one, which the driver refuses. What is enqueued on it later
                waits for all copies.

        Raises:
            RuntimeError: the driver refused.
        """
        count = copies.shape[1]
        if count < MANY or copies[2, 0] >= LONG:
            _copy_batch(copies, stream, self._attributes)
            return
        half = count // 2
        self._begin.record(stream)
        _copy_batch(copies[:, :half], stream, self._attributes)
        self._beside.wait_event(self._begin)
        _copy_batch(copies[:, half:], self._beside, self._attributes)
        self._end.record(self._beside)
        stream.wait_event(self._end)


def _copy_batch(copies: np.ndarray, stream: torch.cuda.Stream, attributes: _Attributes) -> None:
    address, step, count = copies.__array_interface__["data"][0], copies.strides[0], copies.shape[1]
    first, failed = ctypes.c_size_t(), ctypes.c_size_t()
    code = _copy_function()(
        address,
        address + step,
        address + 2 * step,
        count,
        ctypes.addressof(attributes),
        ctypes.addressof(first),
        1,
        ctypes.addressof(failed),
        stream.cuda_stream,
    )
    if code:
        raise RuntimeError(f"cuMemcpyBatchAsync failed with CUDA error {code} at copy {failed.value} of {count}")
