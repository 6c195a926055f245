"""Replaying one trace, and planning: every representation at every host budget."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from attrs import define, evolve, frozen

from hiqcache.capacity import tokens_of_size
from hiqcache.plan.cache import Limits, PrefixCache
from hiqcache.plan.trace import Request


@define
class Totals:
    """What a replay adds up to.

    Attributes:
        requests: requests replayed.
        refused: requests left out of every other figure, because L1 cannot hold one of them alone.
        prompt_tokens: tokens of all prompts.
        l1_tokens: prompt tokens found in L1.
        l2_tokens: prompt tokens restored from L2.
    """

    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    l1_tokens: int = 0
    l2_tokens: int = 0

    @property
    def saved_tokens(self) -> int:
        """Prompt tokens that needed no prefill, because L1 or L2 served them."""
        return self.l1_tokens + self.l2_tokens

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that needed no prefill, 0 to 1."""
        return self.saved_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def replay(requests: Iterable[Request], limits: Limits) -> Totals:
    """Serve `requests` one after the other from an empty cache."""
    cache, totals = PrefixCache(limits), Totals()
    for request in requests:
        hit = cache.serve(request)
        if hit is None:
            totals.refused += 1
            continue
        totals.requests += 1
        totals.prompt_tokens += request.prompt_tokens
        totals.l1_tokens += hit.l1_tokens
        totals.l2_tokens += hit.l2_tokens
    return totals


@frozen
class Estimate:
    """One representation at one host budget.

    Attributes:
        gigabytes: the budget of one rank, in GB of 10**9 bytes.
        pool_tokens: tokens of the host pool that SGLang makes of it.
        totals: what the replay gave.
    """

    gigabytes: int
    pool_tokens: int
    totals: Totals


@frozen
class Plan:
    """A trace's outcome for several representations.

    Attributes:
        without_l2: the same trace with L1 alone.
        estimates: representation -> one estimate for each budget, in the order given.
    """

    without_l2: Totals
    estimates: Mapping[str, Sequence[Estimate]]


def make_plan(
    trace: Callable[[], Iterable[Request]],
    limits: Limits,
    bytes_per_token: Mapping[str, int],
    budgets: Sequence[int],
) -> Plan:
    """Replay a trace once without L2, then for each representation at each budget.

    Args:
        trace: opens the trace; called for every replay, so that only one replay's cache is ever in memory.
        limits: of the server; `l2_tokens` is replaced.
        bytes_per_token: representation -> host bytes of one token on one rank.
        budgets: host memory for one rank (`--hicache-size`), in GB of 10**9 bytes.
    """
    estimates: dict[str, list[Estimate]] = {name: [] for name in bytes_per_token}
    without_l2 = replay(trace(), evolve(limits, l2_tokens=0))
    for gigabytes in budgets:
        for name, token_bytes in bytes_per_token.items():
            tokens = tokens_of_size(gigabytes, token_bytes, limits.page_size)
            totals = replay(trace(), evolve(limits, l2_tokens=tokens))
            estimates[name].append(Estimate(gigabytes, tokens, totals))
    return Plan(without_l2, estimates)
