"""SGLang's prefix cache with its host tier, as counts of tokens instead of KV.

`PrefixCache` does what `UnifiedRadixCache`, its host pool and the scheduler around them do to one request at a time
(SGLang 0.5.23): which nodes the radix tree has, what each tier holds, who is evicted next. The promises it keeps:

* A prompt is matched in whole pages, and its last token is always computed.
* Eviction takes whole nodes, least recently used first. L1 gives up *leaves of L1*: nodes with no child in L1. L2 gives
  up *leaves of the tree* that are in L2 alone; a copy of what L1 also holds stays, except under `write_back`, which
  gives such copies up first.
* A node that leaves L1 with no copy in L2 is gone.
* What an in-flight request uses is not evicted.

Node sizes matter, since a node is evicted whole, so nodes are made and split exactly where SGLang makes and splits
them: at the end of every prefill chunk, at the end of the prompt, and where two requests part.
"""

import enum
import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from itertools import count

from attrs import Factory, define, field, frozen

from hiqcache.plan.trace import Request, Span

RULES = "SGLang 0.5.23"
"""Whose rules these are."""

CHUNKED_PREFILL_TOKENS = 8192
"""SGLang's default for `--chunked-prefill-size` on GPUs with 60 to 160 GB."""

LOAD_BACK_THRESHOLD = 10
"""SGLang restores no fewer tokens than these; it computes them instead."""


class WritePolicy(enum.Enum):
    """When KV is copied from L1 to L2, by SGLang's names for `--hicache-write-policy`."""

    WRITE_THROUGH = "write_through"
    """As soon as it is inserted into the tree."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """When a second request inserts it while it is still in L1."""
    WRITE_BACK = "write_back"
    """When it is evicted from L1."""


@frozen(kw_only=True)
class Limits:
    """What a server gives its cache.

    Attributes:
        l1_tokens: tokens of L1 (`max_total_num_tokens` in the server's log); only whole pages of them count.
        l2_tokens: tokens of the host pool, in whole pages; 0 for no L2.
        page_size: tokens in a page (`--page-size`).
        policy: when KV is copied to L2.
        chunk_tokens: tokens computed in one prefill step (`--chunked-prefill-size`), in whole pages.
    """

    l1_tokens: int
    l2_tokens: int
    page_size: int
    policy: WritePolicy = WritePolicy.WRITE_THROUGH
    chunk_tokens: int = field(default=Factory(lambda self: _default_chunk(self.page_size), takes_self=True))


@frozen
class Hit:
    """Tokens of one prompt that were not computed.

    Attributes:
        l1_tokens: found in L1.
        l2_tokens: restored from L2.
    """

    l1_tokens: int
    l2_tokens: int


@define(eq=False)
class _Node:
    """A run of pages in the radix tree. `spans` overlap the run: `skip` tokens of the first lie before it."""

    parent: "_Node | None"
    spans: list[Span]
    skip: int
    tokens: int
    used: int
    in_l1: bool
    in_l2: bool = False
    insertions: int = 0
    l1_children: int = 0
    children: dict[tuple[Span, ...], "_Node"] = field(factory=dict)


class _LeafQueue:
    """Leaves of one tier, least recently used first.

    A node has at most one entry, made at the time when it became a leaf. Use since then, or no longer being a leaf, is
    noticed when the entry comes up, so that touching a node costs nothing.
    """

    def __init__(self, is_leaf: Callable[[_Node], bool]):
        self._is_leaf = is_leaf
        self._heap: list[tuple[int, int, _Node]] = []
        self._queued: set[_Node] = set()
        self._serial = count()

    def offer(self, node: _Node) -> None:
        """Queue `node` if it is a leaf."""
        if node not in self._queued and self._is_leaf(node):
            self._queued.add(node)
            heapq.heappush(self._heap, (node.used, next(self._serial), node))

    def pop(self) -> _Node | None:
        """The least recently used leaf, removed; None if there is no leaf."""
        while self._heap:
            used, _, node = heapq.heappop(self._heap)
            self._queued.discard(node)
            if used == node.used and self._is_leaf(node):
                return node
            self.offer(node)
        return None


class PrefixCache:
    """L1 and L2 of one server, empty at first."""

    def __init__(self, limits: Limits):
        self._limits = limits
        self._page = limits.page_size
        self._l1_tokens = self._l1_free = self._floor(limits.l1_tokens)
        self._l2_free = limits.l2_tokens
        self._write_back = limits.policy is WritePolicy.WRITE_BACK
        self._clock = count(1)
        self._root = _Node(None, [], 0, 0, used=0, in_l1=False)
        self._l1_leaves = _LeafQueue(self._is_l1_leaf)
        self._l2_leaves = _LeafQueue(self._is_l2_leaf)
        self._locked: tuple[_Node, ...] = ()
        """Deepest nodes of the paths that the request in flight holds; no other node on them can be a leaf."""
        self._restoring: list[_Node] = []
        """Nodes whose restore is still under way."""
        self._duplicates: dict[_Node, None] = {}
        """Nodes that were in both tiers when last looked at, oldest first; kept under `write_back` only."""

    def serve(self, request: Request) -> Hit | None:
        """Run one request from match to last token.

        Returns:
            What the cache saved it, or None if L1 cannot hold it, in which case the server would never start it.
        """
        if request.prompt_tokens + request.output_tokens + self._page >= self._l1_tokens:
            return None
        hit = self._match(request)
        tip = self._prefill(request, hit.l1_tokens + hit.l2_tokens)
        self._decode(request, tip)
        # SGLang inserts the prompt once more at the end, so that it is more recently used than the answer.
        self._touch_path(tip)
        self._lock()
        return hit

    def _match(self, request: Request) -> Hit:
        """Find the longest cached prefix, restore what of it is in L2 alone, and lock it."""
        limit = self._floor(request.prompt_tokens - 1)
        path = list(self._walk(request, self._root, 0, limit))
        if path:
            self._touch_path(path[-1])
        resident = [node for node in path if node.in_l1]
        self._lock(*resident[-1:], *path[-1:])
        restored = self._restore(path[len(resident) :])
        self._lock(*(path if restored else resident)[-1:])
        return Hit(sum(node.tokens for node in resident), restored)

    def _restore(self, nodes: list[_Node]) -> int:
        """Bring nodes of one path, all in L2 alone, back to L1: all of them or none. Returns their tokens."""
        tokens = sum(node.tokens for node in nodes)
        if tokens < LOAD_BACK_THRESHOLD:
            return 0
        self._make_room(tokens)
        if self._l1_free < tokens:
            return 0
        self._l1_free -= tokens
        for node in nodes:
            self._enter_l1(node)
        self._restoring = nodes
        return tokens

    def _finish_restore(self) -> None:
        restored, self._restoring = self._restoring, []
        for node in reversed(restored):
            self._note_duplicate(node)

    def _prefill(self, request: Request, cached: int) -> _Node:
        """Compute the prompt from its token `cached` on, a chunk at a time. Returns the node in which it ends."""
        tip, inserted = self._root, 0
        computed = owned = cached
        while computed < request.prompt_tokens:
            end = min(request.prompt_tokens, self._floor(computed + self._limits.chunk_tokens))
            spare = self._page if self._page > 1 else 0  # SGLang asks for a page more than it can need
            self._make_room(end - computed + spare)
            self._l1_free -= self._ceil(end) - self._ceil(computed)
            tip = self._insert(request, tip, inserted, end, owned)
            owned = inserted = self._floor(end)
            self._finish_restore()
            computed = end
        return tip

    def _decode(self, request: Request, tip: _Node) -> None:
        """Produce the answer below `tip`, then hand back the page that it has only begun."""
        prompt, total = request.prompt_tokens, request.prompt_tokens + request.output_tokens - 1  # the last has no KV
        needed = self._ceil(total) - self._ceil(prompt)
        while needed:
            self._make_room(self._page)
            taken = min(needed, self._l1_free)
            self._l1_free -= taken
            needed -= taken
        if total > prompt and (total - 1) % self._page:
            self._make_room(self._page)  # a decode step asks for a page even where it starts none
        self._insert(request, tip, self._floor(prompt), total, self._floor(prompt))
        self._l1_free += self._ceil(total) - self._floor(total)

    def _insert(self, request: Request, tip: _Node, inserted: int, length: int, owned: int) -> _Node:
        """Put the whole pages of the request's first `length` tokens into the tree, and lock them.

        Args:
            request: the request in flight.
            tip: the node that holds the last of the tokens inserted before, or the root.
            inserted: tokens that this request has inserted before, in whole pages.
            length: tokens computed so far.
            owned: tokens up to which the request's pages are the tree's already.

        Returns:
            The new tip.
        """
        limit = self._floor(length)
        end = inserted
        for node in self._walk(request, tip, inserted, limit):
            tip, start, end = node, end, end + node.tokens
            node.used = next(self._clock)
            if node.in_l1:
                self._l1_free += max(0, end - max(start, owned))  # the request computed pages that the tree has
            else:
                self._enter_l1(node)
                self._note_duplicate(node)
            self._count_insertion(node)
        if end < limit:
            tip = self._add_leaf(tip, request, end, limit)
            self._count_insertion(tip)
        self._lock(tip)
        return tip

    # The tree.

    def _walk(self, request: Request, node: _Node, position: int, limit: int) -> Iterator[_Node]:
        """Nodes below `node` that hold the request's tokens from `position` to `limit`; the last is split to fit."""
        while position < limit:
            index, skip = _locate(request, position)
            child = node.children.get(self._first_page(request.spans, index, skip))
            if child is None:
                return
            shared = self._floor(min(limit, position + child.tokens, _agree(child, request, index))) - position
            node = child if shared == child.tokens else self._split(child, shared)
            position += shared
            yield node

    def _touch_path(self, node: _Node) -> None:
        """Make `node` and what is above it the most recently used."""
        path: _Node | None = node
        while path is not None:
            path.used = next(self._clock)
            path = path.parent

    def _first_page(self, spans: list[Span], index: int, skip: int) -> tuple[Span, ...]:
        """What tells apart the children of a node: the spans of the page that starts `skip` tokens into one of them."""
        stop, tokens = index, -skip
        while tokens < self._page:
            tokens += spans[stop][1]
            stop += 1
        return tuple(spans[index:stop])

    def _split(self, node: _Node, at: int) -> _Node:
        """Give the first `at` tokens of `node` a node of their own, which is returned."""
        assert node.parent is not None
        index, start = 0, -node.skip
        while start + node.spans[index][1] <= at:
            start += node.spans[index][1]
            index += 1
        upper = _Node(
            node.parent,
            node.spans[: index + (start < at)],
            node.skip,
            at,
            used=next(self._clock),
            in_l1=node.in_l1,
            in_l2=node.in_l2,
            insertions=node.insertions,
            l1_children=int(node.in_l1),
        )
        node.parent.children[self._first_page(node.spans, 0, node.skip)] = upper
        node.parent, node.spans, node.skip, node.tokens = upper, node.spans[index:], at - start, node.tokens - at
        node.used = next(self._clock)  # SGLang refreshes the rest too, although nobody asked for it
        upper.children[self._first_page(node.spans, 0, node.skip)] = node
        self._note_duplicate(upper)
        return upper

    def _add_leaf(self, parent: _Node, request: Request, start: int, end: int) -> _Node:
        index, skip = _locate(request, start)
        spans = request.spans[index : bisect_left(request.ends, end) + 1]
        leaf = _Node(parent, spans, skip, end - start, used=next(self._clock), in_l1=True)
        parent.children[self._first_page(spans, 0, skip)] = leaf
        parent.l1_children += 1
        return leaf

    def _remove(self, node: _Node) -> None:
        """Take a node that neither tier holds out of the tree."""
        assert node.parent is not None
        del node.parent.children[self._first_page(node.spans, 0, node.skip)]
        self._duplicates.pop(node, None)
        self._l2_leaves.offer(node.parent)

    # The tiers.

    def _lock(self, *nodes: _Node) -> None:
        """Hold the paths to `nodes` instead of those held so far."""
        released, self._locked = self._locked, nodes
        for node in released:
            self._l1_leaves.offer(node)
            self._l2_leaves.offer(node)

    def _is_l1_leaf(self, node: _Node) -> bool:
        return node.in_l1 and not node.l1_children and node not in self._locked

    def _is_l2_leaf(self, node: _Node) -> bool:
        return node.in_l2 and not node.in_l1 and not node.children and node not in self._locked

    def _enter_l1(self, node: _Node) -> None:
        assert node.parent is not None
        node.in_l1 = True
        node.parent.l1_children += 1

    def _make_room(self, tokens: int) -> None:
        """Evict from L1 until `tokens` are free or nothing is left to evict."""
        while self._l1_free < tokens and (leaf := self._l1_leaves.pop()):
            self._evict_from_l1(leaf)

    def _evict_from_l1(self, node: _Node) -> None:
        assert node.parent is not None
        if self._write_back and not node.in_l2 and not self._back_up(node):
            self._drop_descendants(node)  # they are in L2 alone, and useless without it
        node.in_l1 = False
        self._l1_free += node.tokens
        node.parent.l1_children -= 1
        self._l1_leaves.offer(node.parent)
        if node.in_l2:
            self._l2_leaves.offer(node)
        else:
            self._remove(node)

    def _drop_descendants(self, node: _Node) -> None:
        below = list(node.children.values())
        node.children.clear()
        while below:
            dropped = below.pop()
            below.extend(dropped.children.values())
            dropped.in_l2 = False
            self._l2_free += dropped.tokens
            self._duplicates.pop(dropped, None)

    def _count_insertion(self, node: _Node) -> None:
        """Note that one more request inserted a node, and copy it to L2 if the write policy says so."""
        node.insertions += 1
        needed = 2 if self._limits.policy is WritePolicy.WRITE_THROUGH_SELECTIVE else 1
        if self._write_back or node.in_l2 or node.insertions < needed:
            return
        unsaved: list[_Node] = []
        above: _Node | None = node
        while above is not None and above is not self._root and not above.in_l2:
            unsaved.append(above)
            above = above.parent
        for each in reversed(unsaved):  # from the root, so that what is in L2 always has its prefix there
            if not self._back_up(each):
                return

    def _back_up(self, node: _Node) -> bool:
        """Copy a node to L2, evicting there; False if L2 could not make room."""
        needed = node.tokens - self._l2_free
        if needed > 0 and self._evict_from_l2(needed) < needed:
            return False
        self._l2_free -= node.tokens
        node.in_l2 = True
        self._note_duplicate(node)
        return True

    def _evict_from_l2(self, needed: int) -> int:
        """Free `needed` tokens of L2 if there are so many to evict. Returns the tokens freed."""
        freed = self._give_up_duplicates(needed)
        while freed < needed and (leaf := self._l2_leaves.pop()):
            freed += leaf.tokens
            self._l2_free += leaf.tokens
            leaf.in_l2 = False
            self._remove(leaf)
        return freed

    def _note_duplicate(self, node: _Node) -> None:
        if not self._write_back:
            return
        if node.in_l1 and node.in_l2 and node not in self._restoring:
            self._duplicates.setdefault(node)
        else:
            self._duplicates.pop(node, None)

    def _give_up_duplicates(self, needed: int) -> int:
        """Free L2 copies of what L1 holds, sparing at first those that L1 is about to give up. Returns their tokens."""
        freed, done = 0, []
        for spare_l1_leaves in (True, False):
            for node in self._duplicates:
                if freed >= needed:
                    break
                if not (node.in_l1 and node.in_l2):
                    done.append(node)
                elif node not in self._restoring and not (spare_l1_leaves and self._is_l1_leaf(node)):
                    node.in_l2 = False
                    self._l2_free += node.tokens
                    freed += node.tokens
                    done.append(node)
        for node in done:
            self._duplicates.pop(node, None)
        return freed

    def _floor(self, tokens: int) -> int:
        return tokens // self._page * self._page

    def _ceil(self, tokens: int) -> int:
        return -(-tokens // self._page) * self._page


def _default_chunk(page_size: int) -> int:
    return max(CHUNKED_PREFILL_TOKENS // page_size, 1) * page_size


def _locate(request: Request, position: int) -> tuple[int, int]:
    """The span in which a token lies, and the tokens of the span before it."""
    index = bisect_right(request.ends, position)
    return index, position - (request.ends[index - 1] if index else 0)


def _agree(node: _Node, request: Request, index: int) -> int:
    """The token of the request up to which its spans from `index` on are those of `node`; at least one is."""
    window = request.spans[index : index + len(node.spans)]
    equal = len(window)
    if window != node.spans:
        pairs = enumerate(zip(window, node.spans, strict=False))
        equal = next((at for at, (ours, theirs) in pairs if ours != theirs), equal)
    return request.ends[index + equal - 1]
