"""What a transfer promises to the pool that owns it."""

import abc
from collections.abc import Sequence

import torch
from attrs import field, frozen

from hiqcache.exponents import KeyExponents
from hiqcache.geometry import Part
from hiqcache.transfer.clock import make_clock


@frozen
class DeviceRows:
    """The device pool (L1): for each layer, one row of values for each slot.

    Attributes:
        k: per layer `[slots, heads, head_dim]`, contiguous.
        v: per layer `[slots, heads, v_head_dim]`, contiguous.
    """

    k: tuple[torch.Tensor, ...] = field(converter=tuple)
    v: tuple[torch.Tensor, ...] = field(converter=tuple)

    def of(self, part: Part) -> Sequence[torch.Tensor]:
        """The rows of one part, by layer."""
        return self.k if part is Part.K else self.v

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.k[0].device


class Transfer(abc.ABC):
    """Moves whole pages between device rows and an arena.

    Both methods take slots as SGLang hands them over: contiguous int64, one entry a token, whole pages, the tokens of a
    page in order, the pages in any order and none twice; host and device slots pair up. Host slot `h` is token
    `h % page_size` of page `h // page_size`. Device slots are on the rows' device; host slots may be on the CPU or
    there, best on `host_indices_device`. What can be seen of that without reading a slot is checked once a transfer,
    before anything moves.

    Both enqueue their work on the current stream, decoding included, and return without waiting for it: they read no
    device tensor on the host and synchronise nothing. Rows and blocks that the indices do not name stay untouched. A
    backup and a restore may be under way at once, on two streams; two backups or two restores may not.

    Args:
        device: where the rows are.
        page_size: tokens in a page.

    Attributes:
        encode_clock: what encoding costs, gathering included where one kernel does both.
        decode_clock: what decoding costs, scattering included where one kernel does both.
    """

    def __init__(self, device: torch.device, page_size: int):
        self._device, self._page_size = device, page_size
        self._host_places, self._device_places = (torch.device("cpu"), device), (device,)
        self.encode_clock, self.decode_clock = make_clock(device), make_clock(device)

    @abc.abstractmethod
    def scale_keys(self, exponents: KeyExponents) -> None:
        """Divide K's channels by powers of two before they are encoded, and multiply them after decoding.

        Called before the first transfer, once at most.
        """

    @property
    @abc.abstractmethod
    def host_indices_device(self) -> torch.device:
        """Where host slots are read without being copied first."""

    @property
    @abc.abstractmethod
    def staging_bytes(self) -> int:
        """Device memory that this transfer allocated."""

    def backup(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        """Encode the rows `device_indices` of every layer into the blocks of `host_indices`.

        Raises:
            ValueError: the slots are not what the class asks for; nothing has moved.
        """
        self._check_slots(host_indices, device_indices)
        self._backup(host_indices, device_indices)

    def restore(self, layer: int, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        """Decode the blocks of `host_indices` in one layer into the rows `device_indices`.

        Called for each layer, 0 first, in order and with the same slots. What the call for a layer has enqueued when
        it returns puts the rows of that layer in place, and perhaps those of later ones.

        Raises:
            ValueError: in layer 0, the slots are not what the class asks for; nothing has moved.
        """
        if layer == 0:
            self._check_slots(host_indices, device_indices)
        self._restore(layer, host_indices, device_indices)

    @abc.abstractmethod
    def _backup(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        """`backup`, of slots that were checked."""

    @abc.abstractmethod
    def _restore(self, layer: int, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        """`restore`, of slots that were checked."""

    def _check_slots(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        """Kernels and copies read slots through bare addresses: others than these would move wrong pages silently."""
        if (
            not _readable(host_indices, self._host_places)
            or not _readable(device_indices, self._device_places)
            or host_indices.numel() != device_indices.numel()
            or host_indices.numel() % self._page_size
        ):
            places = " or ".join(dict.fromkeys(map(str, self._host_places)))
            raise ValueError(
                f"slots of a transfer: host {_seen(host_indices)}, device {_seen(device_indices)}; needed: both "
                f"contiguous torch.int64 of one dimension and the same length, a multiple of the page size "
                f"{self._page_size}; host slots on {places}, device slots on {self._device}"
            )


def _readable(slots: torch.Tensor, places: tuple[torch.device, ...]) -> bool:
    return slots.dtype is torch.int64 and slots.dim() == 1 and slots.is_contiguous() and slots.device in places


def _seen(slots: torch.Tensor) -> str:
    return f"{slots.dtype} {tuple(slots.shape)} with strides {slots.stride()} on {slots.device}"
