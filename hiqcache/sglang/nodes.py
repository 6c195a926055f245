"""Ranks compared over all nodes: none serves beside one whose L2 is something else.

A node that was not asked for a representation runs SGLang's own code alone, so it takes part in nothing here, and a
collective would wait for it for ever. Each rank that was asked writes a statement into the key-value store of the
process group instead, and waits for those of the others for a limited time.
"""

import json
import logging
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed

from hiqcache.sglang.choice import FLAG, Refused

ASKED, BUILT = "asked", "built"
"""What statements are about: before and after a rank builds its host pool."""
SECONDS = {ASKED: 300, BUILT: 1800}
"""How long a rank waits. The last step that all ranks take together is just before `ASKED`; allocating and pinning
terabytes, before `BUILT`, takes minutes."""
SOON = 15
"""Seconds after which the log says who is waited for."""

LINGER = 5
"""Seconds for which rank 0 outlives its refusal."""

_HOST, _REFUSED, _OVER = "host", "refused", "over"

logger = logging.getLogger(__name__)


def compare(stage: str, mine: Mapping[str, Any]) -> None:
    """Agree with every rank of the default process group; does nothing for a rank alone.

    Args:
        stage: `ASKED` or `BUILT`.
        mine: facts of this rank, of JSON's types; those that another rank states too must be equal.

    Raises:
        Refused: a rank states something else, refuses, or states nothing in time.
    """
    distributed = torch.distributed
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    _state(stage, mine)
    for other in range(ranks):
        if other != rank:
            _check(rank, mine, other, _statement(stage, other))


def give_up(reason: str) -> None:
    """Tell the other ranks that this one will not serve, so that they need not wait until their time is up."""
    distributed = torch.distributed
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return
    try:
        for stage in (ASKED, BUILT):
            _state(stage, {_REFUSED: reason})
        _state(_OVER, {})
        if distributed.get_rank() == 0:  # the store goes with this process, and the others are to read it
            others = [_key(_OVER, rank) for rank in range(1, distributed.get_world_size())]
            _store().wait(others, timedelta(seconds=LINGER))
    except RuntimeError:
        logger.debug("hiqcache: not every rank has heard why this one stops", exc_info=True)


def _store() -> Any:
    return torch.distributed.distributed_c10d._get_default_store()


def _key(stage: str, rank: int) -> str:
    return f"hiqcache/{stage}/{rank}"


def _state(stage: str, facts: Mapping[str, Any]) -> None:
    statement = {_HOST: socket.gethostname(), **facts}
    _store().set(_key(stage, torch.distributed.get_rank()), json.dumps(statement))


def _statement(stage: str, rank: int) -> dict[str, Any]:
    """What a rank states.

    Raises:
        Refused: it does not within the time.
    """
    store, key, seconds = _store(), _key(stage, rank), SECONDS[stage]
    soon = min(SOON, seconds)
    try:
        try:
            store.wait([key], timedelta(seconds=soon))
        except torch.distributed.DistStoreError:
            logger.warning("hiqcache: waiting for rank %d to say what its L2 holds, up to %d s", rank, seconds)
            store.wait([key], timedelta(seconds=seconds - soon))
        return json.loads(store.get(key))
    except torch.distributed.DistStoreError as error:
        raise Refused(
            f"rank {rank} did not say what its L2 holds within {seconds} s. Start every node with the same {FLAG} and "
            "the same version of hiqcache."
        ) from error
    except torch.distributed.DistNetworkError as error:
        raise Refused(
            "the process of rank 0 ended while ranks were being compared; its log says why, if it was started with "
            f"{FLAG}."
        ) from error


def _check(rank: int, mine: Mapping[str, Any], other: int, theirs: Mapping[str, Any]) -> None:
    where = f"rank {other} on {theirs[_HOST]}"
    if _REFUSED in theirs:
        raise Refused(f"{where} does not serve: {theirs[_REFUSED]}")
    for fact in filter(theirs.__contains__, mine):
        if mine[fact] != theirs[fact]:
            raise Refused(
                f"{fact}: {where} has {theirs[fact]!r}; allowed: {mine[fact]!r}, as on rank {rank} here. Start every "
                "node with the same settings and the same packages."
            )
