"""Ranks of two nodes, one process each, compared through a real process group."""

import contextlib
import multiprocessing
import os
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed
from serving import free_port

pytest.importorskip("sglang", reason="needs the sglang extra")

from hiqcache.sglang import nodes
from hiqcache.sglang.choice import Refused

INT8 = {"representation": "int8", "byte format": "int8-head-v2", "hiqcache": "0.1.0"}
WAIT = 60
"""Seconds for an answer that comes; one that does not is given up after `BRIEF`."""
BRIEF = 3


def asked(**facts: Any) -> Callable[[], None]:
    return lambda: nodes.compare(nodes.ASKED, INT8 | facts)


def built(**facts: Any) -> Callable[[], None]:
    return lambda: nodes.compare(nodes.BUILT, {name.replace("_", " "): value for name, value in facts.items()})


def never_asked() -> None:
    """SGLang goes on, and waits for its peers in a step of its own, as `rank` does at its end."""


def ends() -> None:
    os._exit(1)


def gives_up() -> None:
    nodes.give_up("not enough host memory")


def gives_up_and_ends() -> None:
    gives_up()
    os._exit(1)


def comes_late() -> None:
    time.sleep(1)
    try:
        nodes.compare(nodes.BUILT, INT8)
    except Refused as refused:
        nodes.give_up(str(refused))
        raise


def rank(number: int, port: int, act: Callable[[], None], pipe: Any, wait: int, linger: int) -> None:
    nodes.SECONDS.update({nodes.ASKED: wait, nodes.BUILT: wait})
    nodes.SOON, nodes.LINGER = 1, linger
    init_method = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=init_method, rank=number, world_size=2)
    torch.distributed.barrier()
    began, text = time.monotonic(), ""
    try:
        act()
    except Refused as refused:
        text = str(refused)
    pipe.send((text, time.monotonic() - began))
    pipe.recv()  # until both have answered, as the store goes with the process of rank 0
    os._exit(0)


def together(*acts: Callable[[], None], wait: int = WAIT, linger: int = BRIEF) -> list[tuple[str, float]]:
    """What each rank's refusal says, empty if it has none, and the seconds that it took."""
    context, port = multiprocessing.get_context("fork"), free_port()
    pipes, processes = [], []
    for number, act in enumerate(acts):
        mine, theirs = context.Pipe()
        process = context.Process(target=rank, args=(number, port, act, theirs, wait, linger))
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    answers = []
    for pipe in pipes:
        try:
            answers.append(pipe.recv())
        except EOFError:
            answers.append(("ended", 0.0))
    for pipe, process in zip(pipes, processes, strict=True):
        with contextlib.suppress(BrokenPipeError):
            pipe.send(None)
        process.join()
    return answers


@pytest.mark.parametrize(
    ("acts", "expected"),
    [
        ((asked(), asked()), ("", "")),
        (
            (asked(), asked(representation="bf16")),
            ("representation: rank 1 on .* has 'bf16'; allowed: 'int8', as on rank 0 here", "rank 0 on .* has 'int8'"),
        ),
        (
            (asked(), asked(hiqcache="0.2.0")),
            ("hiqcache: rank 1 on .* has '0.2.0'", "hiqcache: rank 0 on .* has '0.1.0'"),
        ),
        (
            (asked(), asked(**{"byte format": "another"})),
            ("byte format: rank 1 .* has 'another'", "byte format: rank 0 .* has 'int8-head-v2'"),
        ),
        ((built(tokens=897), built(tokens=897)), ("", "")),
        ((built(tokens=897), built(tokens=600)), ("tokens: rank 1 .* has 600; allowed: 897", "rank 0 .* has 897")),
        ((built(bytes_of_stage_0=64), built(bytes_of_stage_1=32)), ("", "")),
        ((asked(), gives_up), ("rank 1 on .* does not serve: not enough host memory", "")),
        ((gives_up, built(tokens=897)), ("", "rank 0 on .* does not serve: not enough host memory")),
    ],
)
def test_two_ranks(acts: tuple[Callable[[], None], ...], expected: tuple[str, str]):
    for (text, seconds), pattern in zip(together(*acts), expected, strict=True):
        assert re.search(pattern, text) if pattern else not text
        assert seconds < WAIT or not text, "an answer that is there is not waited for"


@pytest.mark.parametrize("acts", [(asked(), never_asked), (never_asked, asked())])
def test_a_node_that_was_not_asked(acts: tuple[Callable[[], None], ...]):
    answers = together(*acts, wait=BRIEF)
    silent = acts.index(never_asked)
    assert answers[silent][0] == "", "it is left alone"
    text, seconds = answers[1 - silent]
    assert f"rank {silent} did not say what its L2 holds within {BRIEF} s" in text
    assert "with the same --hicache-representation" in text
    assert seconds > BRIEF - 1


def test_the_process_with_the_store_ends():
    (_, (text, seconds)) = together(ends, asked())
    assert "the process of rank 0 ended while ranks were being compared" in text
    assert seconds < WAIT


def test_rank_0_stays_until_the_others_know_why():
    (_, (text, _)) = together(gives_up_and_ends, comes_late, linger=WAIT)
    assert "does not serve: not enough host memory" in text


def test_a_rank_alone_compares_nothing():
    nodes.compare(nodes.ASKED, INT8)
    nodes.give_up("no reason")
