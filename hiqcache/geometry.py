"""The shape of the KV cache that one rank holds, and the error for a shape that cannot be held."""

import enum
from collections.abc import Iterable

import torch
from attrs import field, frozen, validators


class Part(enum.Enum):
    """Which half of a token's KV a block belongs to."""

    K = "k"
    V = "v"


_positive = [validators.instance_of(int), validators.gt(0)]


@frozen(kw_only=True)
class KVGeometry:
    """What one tensor-parallel rank holds of a model's KV cache.

    Attributes:
        layers: layers with KV on this rank.
        heads: *local* KV heads, after tensor parallelism has divided them.
        head_dim: values a K head holds for one token.
        v_head_dim: values a V head holds for one token.
        page_size: tokens in a page (`--page-size`).
        dtype: element type of the device pool (L1).
        tp_size: ranks that the KV heads were divided among; only messages use it.
    """

    layers: int = field(validator=_positive)
    heads: int = field(validator=_positive)
    head_dim: int = field(validator=_positive)
    v_head_dim: int = field(validator=_positive)
    page_size: int = field(validator=_positive)
    dtype: torch.dtype = field(default=torch.bfloat16, validator=validators.instance_of(torch.dtype))
    tp_size: int = field(default=1, validator=_positive)

    def dim(self, part: Part) -> int:
        """Values one head of `part` holds for one token."""
        return self.head_dim if part is Part.K else self.v_head_dim

    def row_bytes(self, part: Part) -> int:
        """Bytes of one token's row of `part` in one layer of the device pool."""
        return self.heads * self.dim(part) * self.dtype.itemsize

    @property
    def device_bytes_per_token(self) -> int:
        """Bytes of one token's KV in the device pool, all layers, K and V."""
        return self.layers * sum(self.row_bytes(part) for part in Part)


@frozen(kw_only=True)
class Violation:
    """One rule that a geometry or a configuration breaks.

    Attributes:
        rule: what is restricted.
        seen: the value found.
        allowed: the values that would do.
        flag: the command-line flag (or the fact about the model) that changes the value.
    """

    rule: str
    seen: object
    allowed: str
    flag: str

    def __str__(self) -> str:
        return f"{self.rule}: saw {self.seen}; allowed: {self.allowed}; changed by {self.flag}"


class HiqcacheError(ValueError):
    """An error whose text is meant for the person at the terminal: one sentence or a short list."""


class UnsupportedGeometry(HiqcacheError):
    """A representation was asked to hold something that it cannot hold.

    Attributes:
        representation: name of the representation that refused.
        violations: every rule broken, not only the first.
    """

    def __init__(self, representation: str, violations: Iterable[Violation]):
        self.representation = representation
        self.violations = tuple(violations)
        count = len(self.violations)
        lines = [f"host representation {representation!r} refused ({count} rule{'s' * (count != 1)} broken):"]
        super().__init__("\n  - ".join([*lines, *map(str, self.violations)]))

    def __reduce__(self):
        return type(self), (self.representation, self.violations)
