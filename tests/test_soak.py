"""`tools/soak.py`: what makes it fail, what its clients hold against a server, and the whole tool on real servers.

`python tests/test_soak.py` prints the table of figures for `docs/reliability.md`.
"""

import importlib
import json
import pathlib
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import soak
import torch
from attrs import evolve
from click.testing import CliRunner
from pools import buffer_info, host_pool
from serving import PROBE
from soak import Clients, Found, Gate, Known, Variant, judge

DOCS = pathlib.Path(__file__).parents[1] / "docs"
VARIANT = Variant("write_back", 16, "page_first", 2, retract_interval=7)
AUDIT = {"after": "eviction", "slots": 2064, "free": 2064, "distinct": 2064, "used": 0}


def right() -> Found:
    """Nothing is wrong with it."""
    counts = {"sent": 3000, "answered": 2980, "aborted": 12, "disconnected": 8, "restored_tokens": 4000}
    found = Found(VARIANT, seconds=450, memory=[1000.0 + 0.1 * n for n in range(400)], audits=[AUDIT, AUDIT])
    found.count(**counts)
    return found


# -- what makes it fail ------------------------------------------------------------------------------------------------


def test_nothing_is_wrong():
    assert judge(right()) == []


@pytest.mark.parametrize(
    ("audit", "said"),
    [
        (
            {"free": 2048, "distinct": 2048, "used": 16},
            "2,064 slots, 2,048 in the free list, 2,048 of them distinct, 16",
        ),
        ({"free": 2048, "distinct": 2048}, "2,048 in the free list"),
        ({"distinct": 2063}, "2,064 in the free list, 2,063 of them distinct"),
        ({"free": 2080}, "2,080 in the free list"),
        ({"used": 1}, "1 in use"),
    ],
    ids=["leak", "lost", "duplicate", "freed twice", "in use"],
)
def test_a_slot_that_is_not_free_once(audit: dict[str, int], said: str):
    found = right()
    found.audits.append(AUDIT | {"after": "flush"} | audit)
    (reason,) = judge(found)
    assert reason.startswith("host pool after flush: 2,064 slots, ")
    assert said in reason


def test_slots_that_were_never_counted():
    found = right()
    found.audits = []
    assert judge(found) == ["the host pool's slots were never counted"]


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ({"sent": 1}, "1 of 3,001 requests ended in no answer, and in no abort that was asked for"),
        ({"wrong_bytes": 3}, "3 bytes were backed up wrong"),
        ({"wrong_values": 1}, "1 values were restored wrong"),
        ({"restored_tokens": -4000}, "nothing was restored from L2, so nothing was tested (3,000 requests)"),
    ],
)
def test_counts_that_are_wrong(counts: dict[str, int], said: str):
    found = right()
    found.count(**counts)
    assert judge(found) == [said]


def test_a_process_that_is_left():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        found = right()
        found.left = soak.end_left([psutil.Process(process.pid)], seconds=0.1)
        assert process.wait(10) == -9, "it is ended"
    (reason,) = judge(found)
    assert reason.startswith("processes left after the server's end: ")
    assert f"({process.pid})" in reason
    assert soak.end_left([], seconds=0.1) == []


def test_problems_are_counted_and_one_of_each_kind_is_shown():
    found = right()
    for number in range(3):
        found.problem("a request without an answer", f"timeout {number}")
    assert judge(found) == ["a request without an answer: 3, the first: timeout 0"]


@pytest.mark.parametrize(
    ("requests", "growth", "allowed"), [(2000, 63, True), (2000, 66, False), (1999, 190, True), (1999, 194, False)]
)
def test_memory_that_grows(requests: int, growth: float, allowed: bool):
    """By so much from the second quarter to the last, whatever happened in the first and single samples say."""
    found = right()
    found.count(sent=requests - 3000, answered=requests - 3000)
    found.memory = [500.0] * 10 + [1000.0] * 10 + [1000.0 + growth / 2] * 10 + [1000.0 + growth] * 10
    found.memory[12] = found.memory[38] = 9000
    assert (judge(found) == []) is allowed
    assert allowed or f"grew from 1,000 to {1000 + growth:,} MiB" in judge(found)[0]


def test_exceptions_in_a_log():
    log = "[1] fine\nTraceback (most recent call last):\n  File 1\n    raise\nValueError: leak\n[2] fine\n"
    assert soak.exceptions(log + log.replace("leak", "again")) == ["ValueError: leak", "ValueError: again"]
    assert soak.exceptions("[1] fine\n") == []


def test_hardly_any_samples_say_nothing():
    found = right()
    found.memory = [1000, 2000, 3000]
    assert judge(found) == []
    assert found.result()["scheduler_mib"] is None


# -- what the cache may know -------------------------------------------------------------------------------------------


def test_only_what_a_namespace_sent_explains_cached_tokens():
    known, prompt = Known(), list(range(100))
    known.add("one", prompt)
    assert known.explained("one", prompt, own=1) == 0, "a request does not explain itself"
    assert known.explained("one", prompt, own=0) == 100
    assert known.explained("two", prompt, own=0) == 0
    known.add("one", prompt[:40] + [7777] * 20)
    assert known.explained("one", prompt, own=1) == 40
    known.add("one", prompt)
    assert known.explained("one", prompt, own=1) == 100
    known.clear()
    assert known.explained("one", prompt, own=0) == 0


def test_the_answer_to_a_shorter_prompt_may_be_cached_behind_it():
    known, prompt = Known(), list(range(100))
    known.add("one", prompt[:50])
    known.add("one", prompt)
    assert known.explained("one", prompt, own=1) == 50 + soak.NEW_TOKENS


# -- clients -----------------------------------------------------------------------------------------------------------


def test_the_gate():
    gate, running, served = Gate(), [], []
    gate.limit(3)

    def client() -> None:
        while gate.enter():
            running.append(None)
            served.append(len(running))
            time.sleep(0.001)
            running.pop()
            gate.leave()

    def serve(requests: int) -> None:
        wanted, deadline = len(served) + requests, time.monotonic() + 60
        while len(served) < wanted:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    threads = [threading.Thread(target=client) for _ in range(8)]
    for thread in threads:
        thread.start()
    serve(50)
    assert max(served) <= 3
    for _ in range(3):
        with gate.closed():
            so_far = len(served)
            assert not running
            time.sleep(0.02)
            assert len(served) == so_far
        serve(10)
    gate.end()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not gate.enter()


@contextmanager
def clients(answer: Callable[[dict[str, Any]], tuple[int, Any]]) -> Iterator[Clients]:
    """Clients of a stand-in for SGLang; a text as its answer is sent as it is."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, reply = answer(body) if self.path == "/generate" else (200, "")
            self.send_response(status)
            self.end_headers()
            self.wfile.write((reply if isinstance(reply, str) else json.dumps(reply)).encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield Clients(f"http://127.0.0.1:{server.server_port}", Found(VARIANT), random.Random(0))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def reply(body: dict[str, Any], *, cached: int = 0, host: int = 0, reason: str = "length", less: int = 0) -> dict:
    tokens = [1] * (body["sampling_params"]["max_new_tokens"] - less)
    details = {"device": cached - host, "host": host}
    meta = {"finish_reason": {"type": reason}, "cached_tokens": cached, "cached_tokens_details": details}
    return {"output_ids": tokens, "meta_info": meta}


PROMPT = list(range(100, 150))


def test_an_answer():
    with clients(lambda body: (200, reply(body))) as asking:
        assert asking.ask("one", PROMPT, 8) == soak.Answer((1,) * 8, 0, 0)
    assert asking.found.counts["sent"] == asking.found.counts["answered"] == 1
    assert not asking.found.problems


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (lambda body: (500, "broken"), "a request without an answer"),
        (lambda body: (200, "{"), "a request without an answer"),
        (lambda body: (200, {}), "a request without an answer"),
        (lambda body: (200, reply(body, less=1)), "an answer of the wrong length"),
        (lambda body: (200, reply(body, reason="abort")), "an abort that nobody asked for"),
    ],
    ids=["status", "no JSON", "no answer", "short", "abort"],
)
def test_answers_that_are_none(answer: Callable[[dict[str, Any]], tuple[int, Any]], problem: str):
    with clients(answer) as asking:
        assert asking.ask("one", PROMPT, 8) is None
    assert list(asking.found.problems) == [problem]
    assert "1 of 1 requests ended in no answer" in " ".join(judge(asking.found))


def test_a_stream_that_breaks_off():
    with clients(lambda body: (200, f"data: {json.dumps(reply(body))}\n\n")) as asking:
        assert asking.ask("one", PROMPT, 8, stream=True) is None
    assert list(asking.found.problems) == ["a request without an answer"]
    with clients(lambda body: (200, f"data: {json.dumps(reply(body))}\n\ndata: [DONE]\n\n")) as asking:
        assert asking.ask("one", PROMPT, 8, stream=True) is not None
    assert not asking.found.problems


def test_aborts_that_were_asked_for():
    def late(body: dict[str, Any]) -> tuple[int, Any]:
        time.sleep(0.2)
        return 200, reply(body, reason="abort")

    with clients(late) as asking:
        assert asking.ask("one", PROMPT, 8, abort_after=0.01) is None
        thread = threading.Thread(target=lambda: asking.ask("one", PROMPT, 8))
        thread.start()
        time.sleep(0.1)
        asking.abort_everything()
        thread.join()
        assert (asking.found.counts["aborted"], asking.found.counts["sent"]) == (2, 2)
        assert not asking.found.problems
        asking.ask("one", PROMPT, 8)
    assert list(asking.found.problems) == ["an abort that nobody asked for"], "that one was before"


def test_tokens_of_another_namespace():
    seen: dict[tuple[int, ...], None] = {}

    def careless(body: dict[str, Any]) -> tuple[int, Any]:
        """A cache that does not look at the namespace."""
        prompt = tuple(body["input_ids"])
        cached = len(prompt) - 1 if prompt in seen else 0
        seen[prompt] = None
        return 200, reply(body, cached=cached)

    with clients(careless) as asking:
        for namespace in ("one", "one"):
            asking.ask(namespace, PROMPT, 8)
        assert not asking.found.problems
        assert asking.found.counts["foreign"] == 0
        asking.ask("two", PROMPT, 8)
    assert list(asking.found.problems) == ["tokens from the cache that this namespace had not put there"]
    assert asking.found.examples.popitem()[1] == "49 of 50; the namespace had sent 0, the other one 50"
    assert asking.found.counts["foreign"] == 1


@pytest.mark.parametrize("wrong", [False, True])
def test_a_restored_answer_that_is_another(wrong: bool):
    """The first time all whole pages come from L2, the second time from L1."""
    asked = []

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        asked.append(body)
        answered = reply(body, cached=48, host=48 if len(asked) == 1 else 0)
        if wrong and len(asked) == 1:
            answered["output_ids"][-1] = 2
        return 200, answered

    with clients(answer) as asking:
        asking.known.add("one", PROMPT)
        asking.recent.append(("one", PROMPT))
        asking.compare(page_size=16)
    assert asking.found.counts["compared"] == 1
    assert list(asking.found.problems) == (["another answer from L2 than from L1"] if wrong else [])


# -- the probe's count of slots ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [None, "leak", "twice"])
def test_the_count_of_slots(fault: str | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """A slot that no page of the tree has is found by evicting; a flush would hide it."""
    monkeypatch.syspath_prepend(str(PROBE))
    probe = importlib.import_module("hiqcache_probe")
    monkeypatch.setattr(probe, "get_parallel", lambda: SimpleNamespace(tp_rank=0))
    monkeypatch.setenv("HIQCACHE_PROBE", str(tmp_path / "events"))
    monkeypatch.setenv("HIQCACHE_PROBE_AUDIT", str(tmp_path / "audit"))
    monkeypatch.setattr("sglang.srt.mem_cache.pool_host.base.HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)  # servers may run
    pool = host_pool(buffer_info())

    def evict_host(tokens: int) -> None:
        pool.free(torch.arange(4 if fault == "leak" else 0, 40))
        if fault == "twice":
            pool.release_slots.append(torch.tensor([5, 6, 7, 8]))

    tree = SimpleNamespace(
        host_pool_group=SimpleNamespace(entries=[SimpleNamespace(host_pool=pool)]),
        check_hicache_events=lambda: None,
        evict=lambda params: None,
        evictable_size=lambda: 0,
        evict_host=evict_host,
    )
    pool.alloc(40)
    probe._audited_reset(lambda tree: pool.clear(), tree)
    assert not (tmp_path / "events").exists(), "nothing is evicted unless asked"
    pool.alloc(40)
    (tmp_path / "audit").touch()
    probe._audited_reset(lambda tree: pool.clear(), tree)
    after_eviction, after_flush = soak.events(tmp_path / "events")
    expected = {None: (132, 132, 0), "leak": (128, 128, 4), "twice": (136, 132, 0)}[fault]
    assert tuple(after_eviction[name] for name in ("free", "distinct", "used")) == expected
    assert (after_flush["free"], after_flush["distinct"], after_flush["used"]) == (132, 132, 0)
    found = right()
    found.audits = [after_eviction, after_flush]
    assert bool(judge(found)) is (fault is not None)


# -- docs/reliability.md ----------------------------------------------------------------------------------------------


def figures() -> str:
    """The table of `docs/results/soak.json`, as the page shows it."""
    result = json.loads((DOCS / "results" / "soak.json").read_text())
    lines = [
        "| write policy, page size, slots of L2 | requests | tokens backed up | restored | wrong bytes, values "
        "| retractions | dumps | counts | scheduler, MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for server in result["servers"]:
        counts = Counter(server["counts"])
        cells = [
            f"`{server['write_policy']}`, {server['page_size']}, {server['host_slots']:,}",
            *(f"{counts[name]:,}" for name in ("sent", "backed_up_tokens", "restored_tokens")),
            f"{counts['wrong_bytes']}, {counts['wrong_values']}",
            *(f"{counts[name]:,}" for name in ("retracted", "dumps")),
            f"{server['audits']:,}",
            " to ".join(f"{value:,.0f}" for value in server["scheduler_mib"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    minutes, hardware = result["minutes"], result["hardware"]
    said = f"{minutes:g} minutes of traffic, {hardware}; {'nothing was wrong' if result['passed'] else 'IT FAILED'}:"
    return "\n".join([said, "", *lines])


def test_the_figures_on_the_page_are_those_of_the_file():
    page = (DOCS / "reliability.md").read_text(encoding="utf-8")
    assert figures() in page, f"the page should read:\n{figures()}"
    for said in (f"at most {soak.ALLOWED_GROWTH_MIB} MiB more", f"1 to {soak.CLIENTS} clients", "four servers"):
        assert said in " ".join(page.split())
    assert len(soak.VARIANTS) == 4


# -- real servers ------------------------------------------------------------------------------------------------------


def run(tmp_path: pathlib.Path, *options: str) -> dict[str, Any]:
    file = tmp_path / "soak.json"
    answer = CliRunner().invoke(soak.main, [*options, "--out", str(file)])
    assert answer.exit_code == 0, answer.output
    assert "PASS: " in answer.output
    result = json.loads(file.read_text())
    assert result["passed"]
    assert not any(server["reasons"] for server in result["servers"])
    return result


@pytest.mark.slow
def test_a_short_soak(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(soak, "VARIANTS", (evolve(VARIANT, retract_interval=3),))
    (server,) = run(tmp_path, "--minutes", "0.5", "--seed", "1")["servers"]
    counts = server["counts"]
    assert counts["sent"] == counts["answered"] + counts["aborted"] + counts["disconnected"]
    assert server["audits"] == 2 * counts["rests"] > 0
    assert counts["restored_tokens"] > 0
    assert counts["backed_up_tokens"] > 0
    assert counts["retracted"] > 0


@pytest.mark.slow
@pytest.mark.sweep
def test_a_soak_of_every_server(tmp_path: pathlib.Path):
    servers = run(tmp_path, "--minutes", "2")["servers"]
    assert [server["write_policy"] for server in servers] == [variant.write_policy for variant in soak.VARIANTS]
    assert sum(server["counts"].get("dumps", 0) for server in servers) > 0
    assert sum(server["counts"].get("foreign", 0) for server in servers) > 0


if __name__ == "__main__":
    sys.stdout.write(figures() + "\n")
