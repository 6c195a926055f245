"""`tools/smoke.py` against a stand-in for SGLang, whose L1 and L2 are known; test_experiment.py has a real one."""

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import smoke
from attrs import define, field
from click.testing import CliRunner, Result
from counters import BACKUP_BYTES, BACKUP_TOKENS, RESTORE_BYTES, RESTORE_TOKENS

L1_TOKENS, BYTES = 1000, 2048


@define
class Stand:
    """What answers: whole prompts in L1 by least recent use, those pushed out in L2.

    Attributes:
        info: `/server_info`; None for something that is not SGLang.
        l2: whether there is one.
        metrics: whether `/metrics` is there.
        key: the key wanted, if any.
        moved_bytes: bytes that a token is said to move.
    """

    info: dict[str, Any] | None
    l2: bool = True
    metrics: bool = True
    key: str | None = None
    moved_bytes: int = BYTES
    held: OrderedDict[tuple[int, ...], None] = field(factory=OrderedDict)
    host: set[tuple[int, ...]] = field(factory=set)
    counts: dict[str, int] = field(factory=lambda: dict.fromkeys((BACKUP_TOKENS, RESTORE_TOKENS), 0))

    def page(self) -> str:
        sizes = {BACKUP_BYTES: BACKUP_TOKENS, RESTORE_BYTES: RESTORE_TOKENS}
        values = self.counts | {name: self.counts[tokens] * self.moved_bytes for name, tokens in sizes.items()}
        return "".join(f'{name}{{pool="kv"}} {value}\n' for name, value in values.items())

    def answer(self, prompt: tuple[int, ...]) -> dict[str, Any]:
        found = {"device": len(prompt) - 1 if prompt in self.held else 0, "host": 0}
        if not found["device"] and prompt in self.host:
            found["host"] = len(prompt) - 1
            self.counts[RESTORE_TOKENS] += len(prompt) - 1
        self.held[prompt] = None
        self.held.move_to_end(prompt)
        while sum(map(len, self.held)) > L1_TOKENS:
            gone, _ = self.held.popitem(last=False)
            if self.l2 and gone not in self.host:
                self.host.add(gone)
                self.counts[BACKUP_TOKENS] += len(gone)
        # SGLang says nothing of the cache where it had nothing.
        return {"meta_info": {"cached_tokens_details": found} if any(found.values()) else {}}


def info(**more: Any) -> dict[str, Any]:
    report = {"representation": "int8", "format_tag": "int8-v1", "bytes_per_token": BYTES, "tokens": 3001}
    return {
        "version": "0.5.23",
        "internal_states": [{}],
        "hiqcache": [report],
        "dp_size": 1,
        "max_total_num_tokens": L1_TOKENS,
        "max_req_input_len": 507,
        "page_size": 16,
        "hicache_write_policy": "write_back",
    } | more


@contextmanager
def standing(stand: Stand) -> Iterator[str]:
    """Its address."""

    class Handler(BaseHTTPRequestHandler):
        def reply(self, status: int, text: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def refused(self) -> bool:
            if stand.key is None or self.headers.get("Authorization") == f"Bearer {stand.key}":
                return False
            self.reply(401, json.dumps({"error": "Unauthorized"}))
            return True

        def do_GET(self) -> None:
            if self.path == "/metrics":
                return self.reply(200, stand.page()) if stand.metrics else self.reply(404, "")
            if self.refused():
                return None
            if self.path == "/server_info" and stand.info:
                return self.reply(200, json.dumps(stand.info))
            return self.reply(404, "<html>")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/generate", "nothing of the operator's is flushed"
            if not self.refused():
                self.reply(200, json.dumps([stand.answer(tuple(prompt)) for prompt in body["input_ids"]]))

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def run(stand: Stand, *options: str) -> Result:
    with standing(stand) as url:
        return CliRunner().invoke(smoke.main, ["--url", url, *options])


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(smoke.time, "sleep", lambda _: None)


def test_pass():
    stand = Stand(info())
    answer = run(stand)
    assert answer.exit_code == 0, answer.output
    said = "SGLang 0.5.23 keeps L2 as int8 (int8-v1): 2,048 bytes per token, 3,001 tokens; L1 holds 1,000"
    assert said in answer.output
    # Probes take an eighth of L1, in pages of 16, and one token.
    assert "PASS: 448 tokens of this tool's prompts came back from L2 as int8" in answer.output
    assert f"restored meanwhile: {stand.counts[RESTORE_TOKENS]:,} tokens, 2,048 bytes per token" in answer.output


def test_without_metrics_it_says_how_to_have_them():
    answer = run(Stand(info(), metrics=False))
    assert answer.exit_code == 0
    assert "start it with --enable-metrics" in answer.output
    assert "PASS" in answer.output


def test_nothing_comes_back():
    answer = run(Stand(info(), l2=False))
    assert answer.exit_code == 1
    assert "FAIL: nothing was restored from L2 (L1 1,000 tokens, L2 3,001, write policy write_back)" in answer.output


def test_other_bytes_move_than_the_representation_has():
    answer = run(Stand(info(), moved_bytes=3072))
    assert answer.exit_code == 1
    assert "bytes backed up for" in answer.output
    assert "int8 has 2,048 bytes per token" in answer.output
    assert "PASS" not in answer.output


def test_a_key():
    assert "wants a key, given with --api-key" in run(Stand(info(), key="secret")).output
    wrong = run(Stand(info(), key="secret"), "--api-key", "guess")
    assert wrong.exit_code == 1
    assert "not the one given with --api-key" in wrong.output
    assert run(Stand(info(), key="secret"), "--api-key", "secret").exit_code == 0


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        (None, "is not SGLang: /server_info has status 404"),
        ({"status": "fine"}, "is not SGLang: /server_info has status 200 and no version, dp_size"),
        ({"version": "1"}, "is not SGLang: /server_info has status 200 and no dp_size"),
        (info(hiqcache=None), "SGLang 0.5.23 at"),
        (info(hiqcache=None), "serves without hiqcache; start it with --enable-hierarchical-cache"),
        (info(dp_size=2), "the server has --dp-size 2; allowed: 1"),
        (info(max_total_num_tokens=200), "L1 holds 200 tokens and a prompt 506, in pages of 16: too few for 4 prompts"),
    ],
)
def test_servers_that_it_cannot_test(seen: dict[str, Any] | None, message: str):
    answer = run(Stand(seen))
    assert answer.exit_code == 1
    assert message in answer.output
    assert "Traceback" not in answer.output


def test_no_server():
    with standing(Stand(info())) as url:
        pass
    answer = CliRunner().invoke(smoke.main, ["--url", url])
    assert answer.exit_code == 1
    assert f"no server answers at {url}" in answer.output
