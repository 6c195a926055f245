"""How a transfer is cut: groups of layers for a restore, slices of pages for both directions. Arithmetic alone.

What begins small begins early: the link under a backup, SGLang's first layer under a restore. Few large pieces behind
it cost the host few calls, while SGLang's scheduler waits for them to be enqueued.
"""

from collections.abc import Iterator
from itertools import accumulate

FIRST_GROUP = 6 << 20
"""Encoded bytes of a restore's first group of layers, or one layer if that is more."""
SHORT, LONG = 64 << 20, 512 << 20
"""Encoded bytes of the layers after the first group: up to `SHORT` they are one group, from `LONG` on many."""
LATER_GROUPS, LONG_GROUPS = (0.7, 0.3), (0.14, 0.36, 0.36, 0.14)
"""Shares of them that each group takes, between `SHORT` and `LONG` and beyond. Each group costs the host a copy a page.
In a long restore SGLang computes faster than layers arrive, so the first of them has to come soon, and few may be left
to compute when the last ones have arrived."""
FIRST_CHUNK = 16 << 20
"""Encoded bytes that a backup begins with, or one page if that is more."""
GROWTH = 4
"""How many times larger each chunk of a backup is than the one before it."""


def layer_groups(layers: int, layer_bytes: int, fewest: int, most: int) -> list[range]:
    """The layers that a restore moves at a time, first ones first.

    Args:
        layers: that there are.
        layer_bytes: encoded bytes of one layer of all pages.
        fewest: layers that the first group has at least.
        most: layers that any group has at most.
    """
    first = min(layers, max(fewest, ceil_div(FIRST_GROUP, layer_bytes)))
    rest = layers - first
    later_bytes = rest * layer_bytes
    shares = (1.0,) if later_bytes <= SHORT else LATER_GROUPS if later_bytes < LONG else LONG_GROUPS
    ends = [first + round(rest * share) for share in accumulate(shares, initial=0.0)]
    groups, start = [], 0
    for end in ends:
        while start < end:
            groups.append(range(start, min(end, start + most)))
            start = groups[-1].stop
    return groups


def even_spans(pages: int, page_bytes: int, limit: int) -> Iterator[slice]:
    """Slices of `pages` of nearly one length that take `limit` bytes at most, or are one page."""
    count = ceil_div(pages, max(1, limit // page_bytes))
    for number in range(count):
        yield slice(pages * number // count, pages * (number + 1) // count)


def growing_spans(pages: int, page_bytes: int, limit: int) -> Iterator[slice]:
    """Slices of `pages`, the first of about `FIRST_CHUNK`, each `GROWTH` times the last; `limit` as above."""
    start, size = 0, max(1, FIRST_CHUNK // page_bytes)
    while start < pages:
        size = min(size, max(1, limit // page_bytes))
        yield slice(start, min(pages, start + size))
        start, size = start + size, size * GROWTH


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
