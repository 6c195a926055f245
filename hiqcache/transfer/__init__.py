"""Moving blocks between device rows and the arena."""

import logging
from collections.abc import Sequence

import torch

from hiqcache.arena import HostArena
from hiqcache.representation import HostRepresentation
from hiqcache.transfer.base import DeviceRows, Transfer
from hiqcache.transfer.eager import EagerTransfer

__all__ = ["DeviceRows", "EagerTransfer", "Transfer", "make_transfer"]

logger = logging.getLogger(__name__)


def make_transfer(
    representation: HostRepresentation, arena: HostArena, rows: DeviceRows, staging: Sequence[torch.Tensor] = ()
) -> Transfer:
    """The fastest transfer for a device and a representation.

    Args:
        representation: encodes and decodes.
        arena: where blocks lie; its buffer is CPU memory, pinned if the rows are on a GPU.
        rows: the device pool.
        staging: device tensors that nobody else uses, for `CudaTransfer`.
    """
    if rows.device.type != "cuda":
        return EagerTransfer(representation, arena, rows)
    from hiqcache.transfer.cuda import CudaTransfer, obstacle

    if reason := obstacle(representation):
        logger.warning("host representation %r takes the slow PyTorch transfer: %s", representation.name, reason)
        return EagerTransfer(representation, arena, rows)
    return CudaTransfer(representation, arena, rows, staging)
