"""Moving blocks between device rows and the arena."""

from hiqcache.transfer.base import DeviceRows, Transfer
from hiqcache.transfer.eager import EagerTransfer

__all__ = ["DeviceRows", "EagerTransfer", "Transfer"]
