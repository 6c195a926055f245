"""Faults in how `CudaTransfer` orders its streams, to plant: each is one wait that is left out."""

from collections.abc import Callable

from hiqcache.transfer.copy_engine import CopyEngine
from hiqcache.transfer.cuda import CudaTransfer

FAULTS: dict[str, Callable[[CudaTransfer], tuple[object, str]]] = {
    "a backup moves before it has encoded": lambda transfer: (transfer._backup_lane, "_filled"),
    "a backup encodes over what is still to move": lambda transfer: (transfer._backup_lane, "_emptied"),
    "a backup ends before its moves": lambda transfer: (transfer._backup_lane, "_joined"),
    "a restore decodes before it has moved": lambda transfer: (transfer._restore_lane, "_filled"),
    "a restore moves over what is still to decode": lambda transfer: (transfer._restore_lane, "_emptied"),
    "a restore moves before its stream is there": lambda transfer: (transfer._restore_lane, "_forked"),
    "half of a backup's copies come too early": lambda transfer: (_copies(transfer, True), "_begin"),
    "half of a restore's copies come too early": lambda transfer: (_copies(transfer, False), "_begin"),
    "half of a backup's copies are not awaited": lambda transfer: (_copies(transfer, True), "_end"),
    "half of a restore's copies are not awaited": lambda transfer: (_copies(transfer, False), "_end"),
}
"""What goes wrong -> whose event nobody waits for, and the attribute that holds it, or a tuple of them."""


def _copies(transfer: CudaTransfer, to_host: bool) -> CopyEngine:
    copies = (transfer._backup_lane if to_host else transfer._restore_lane).copies
    assert copies is not None
    return copies._engine


def plant(fault: str, transfer: object, unrecorded: Callable[[], object]) -> None:
    """Put a fault into a transfer.

    Args:
        fault: a key of `FAULTS`.
        transfer: a `CudaTransfer`.
        unrecorded: makes an event that is never recorded, so that waiting for it is not waiting.
    """
    assert isinstance(transfer, CudaTransfer)
    owner, name = FAULTS[fault](transfer)
    events = getattr(owner, name)
    setattr(owner, name, tuple(unrecorded() for _ in events) if isinstance(events, tuple) else unrecorded())
