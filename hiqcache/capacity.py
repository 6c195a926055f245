"""How many tokens a host budget holds: SGLang's own arithmetic, which `HostKVCache.__init__` applies to a host pool."""

from collections.abc import Callable

from attrs import frozen

from hiqcache import registry
from hiqcache.geometry import HiqcacheError, KVGeometry, UnsupportedGeometry


def tokens_of_size(gigabytes: int, bytes_per_token: int, page_size: int) -> int:
    """Tokens in L2 for `--hicache-size`.

    Args:
        gigabytes: `--hicache-size`, in GB of 10**9 bytes for each rank.
        bytes_per_token: host bytes of one token on one rank.
        page_size: tokens in a page.
    """
    return _in_pages(int(gigabytes * 1e9 // bytes_per_token), page_size)


def tokens_of_ratio(ratio: float, device_tokens: int, page_size: int) -> int:
    """Tokens in L2 for `--hicache-ratio`, whatever a token takes.

    Args:
        ratio: `--hicache-ratio`, tokens of L2 for each token of L1.
        device_tokens: tokens in the device pool (L1).
        page_size: tokens in a page.
    """
    return _in_pages(int(device_tokens * ratio), page_size)


def _in_pages(tokens: int, page_size: int) -> int:
    """Whole pages of the tokens asked for, and the one page that SGLang adds for padding."""
    return (tokens // page_size + 1) * page_size


@frozen
class Capacity:
    """What one rank's L2 holds in one representation.

    Attributes:
        bytes_per_token: host bytes of one token: all layers, K and V, padding included.
        bf16_bytes_per_token: the same in BF16.
        tokens: tokens in L2.
    """

    bytes_per_token: int
    bf16_bytes_per_token: int
    tokens: int

    @property
    def host_bytes(self) -> int:
        """Host bytes of the whole pool."""
        return self.tokens * self.bytes_per_token

    @property
    def gain(self) -> float:
        """Tokens held in the bytes that one token takes in BF16."""
        return self.bf16_bytes_per_token / self.bytes_per_token

    @property
    def saving(self) -> float:
        """Part of BF16's bytes that is saved, 0 to 1; negative where more are needed."""
        return 1 - self.bytes_per_token / self.bf16_bytes_per_token


def capacities(geometry: KVGeometry, tokens: Callable[[int], int]) -> dict[str, Capacity | list[str]]:
    """What each representation makes of a budget, or every reason why it cannot hold the model.

    Args:
        geometry: what one rank holds.
        tokens: the budget, as a function: bytes per token -> tokens in L2.
    """
    return {name: _capacity(name, geometry, tokens) for name in registry.names()}


def _capacity(name: str, geometry: KVGeometry, tokens: Callable[[int], int]) -> Capacity | list[str]:
    try:
        bytes_per_token = registry.get(name)(geometry).bytes_per_token()
        return Capacity(bytes_per_token, geometry.device_bytes_per_token, tokens(bytes_per_token))
    except UnsupportedGeometry as error:
        return [str(violation) for violation in error.violations]
    except HiqcacheError as error:
        return [str(error)]
    except Exception as error:  # a third party's class may raise anything
        return [f"{type(error).__name__}: {error}"]
