"""Real SGLang, the real radix tree: encoded pools seen serving, every byte that moves checked.

Each server below takes a different value of every axis, so that each value is seen at least once: Engine and HTTP;
page sizes 1 and 16; both host layouts; the three write policies; bf16, int8 and a third party's representation. One
serves a real model; the others a small one of random weights, which moves the same bytes in a tenth of the time.
"""

import pathlib
import pydoc_data.topics
import random
import subprocess
import sys
from typing import Any

import pytest
import tiny_model
import torch
from serving import (
    ADMIN_KEY,
    PROBE,
    HttpServer,
    Output,
    Server,
    carry,
    device_settings,
    engine,
    environment,
    events,
    free_port,
    http,
    pip_install,
)
from test_metrics import dashboard_metrics
from third_party import install_third_party

from hiqcache import sample_model
from hiqcache.sglang import cpu

pytestmark = pytest.mark.slow

L1_TOKENS = 448
L2_RATIO = 2
PROMPT_TOKENS = 99
HALF = 48


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny_model.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """For the small model: random tokens, no two prompts with a common prefix, nor with a health check's token 0."""
    rng = random.Random(0)
    return [[first, *rng.choices(range(tiny_model.VOCABULARY), k=PROMPT_TOKENS - 1)] for first in range(10, 25)]


def prose(model: pathlib.Path) -> list[list[int]]:
    """Pieces of Python's language reference (PSF licence) in a model's tokens, no two with a common prefix."""
    from transformers import AutoTokenizer

    topics = pydoc_data.topics.topics
    tokens = AutoTokenizer.from_pretrained(model)(" ".join(topics[name] for name in sorted(topics)))["input_ids"]
    pieces: dict[int, list[int]] = {}
    for start in range(0, len(tokens) - PROMPT_TOKENS, PROMPT_TOKENS):
        pieces.setdefault(tokens[start], tokens[start : start + PROMPT_TOKENS])
    return list(pieces.values())[:15]


@pytest.fixture(scope="module")
def probe_path(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return pip_install(PROBE, tmp_path_factory.mktemp("probe"))


def settings(model: pathlib.Path, **more: Any) -> dict[str, Any]:
    return {
        "model_path": str(model),
        "enable_hierarchical_cache": True,
        "hicache_ratio": L2_RATIO,
        "max_total_tokens": L1_TOKENS,
        "context_length": 256,
        "skip_server_warmup": True,
    } | more


def small(model: pathlib.Path, **more: Any) -> dict[str, Any]:
    return settings(model, skip_tokenizer_init=True, **more)


def one(server: Server, prompt: list[int]) -> Output:
    (answer,) = server.generate([prompt])
    return answer


def fill_and_restore(
    server: Server, prompts: list[list[int]], page_size: int, *, insertions: int, lossless: bool
) -> list[Output]:
    """Ask for five prompts, more than L1 holds, then for the first two again; the first answers to all.

    `insertions` is how often a prompt must be seen in L1 before the write policy backs it up.
    """
    cold = []
    for prompt in prompts[:5]:
        answers = [one(server, prompt) for _ in range(insertions)]
        cold.append(answers[0])
        assert answers[0].from_device == answers[0].from_host == 0
    for number in (0, 1):  # longest unused: gone from L1, whole in L2
        restored = one(server, prompts[number])
        assert (restored.from_device, restored.from_host) == (0, whole_pages(page_size))
        if lossless:
            assert restored.tokens == cold[number].tokens
    return cold


def whole_pages(page_size: int) -> int:
    """Tokens of a prompt that can come from a cache; the last one is always computed."""
    return (PROMPT_TOKENS - 1) // page_size * page_size


def check(server: Server, prompts: list[list[int]], page_size: int, *, insertions: int, lossless: bool) -> None:
    """The life of an L2: filled, restored from, half used, used by several, overflowing, flushed, used again."""
    first, rest, whole = prompts[:5], prompts[5:15], whole_pages(page_size)
    assert len(rest) == 10
    cold = fill_and_restore(server, prompts, page_size, insertions=insertions, lossless=lossless)

    head = HALF // page_size * page_size
    assert one(server, [*first[2][:HALF], first[3][0]]).from_host == head
    halves = one(server, first[2])
    assert (halves.from_device, halves.from_host) == (head, whole - head)
    if lossless:
        assert halves.tokens == cold[2].tokens

    together = server.generate([first[3], first[4], first[0]])
    assert sum(answer.from_host for answer in together) >= whole
    assert all(len(answer.tokens) == 8 for answer in together)

    for prompt in rest:
        for _ in range(insertions):
            one(server, prompt)
    forgotten = one(server, first[1])
    assert forgotten.from_host == 0, "L2 was to overflow"

    server.flush()
    assert one(server, rest[-1]).from_host == 0
    for prompt in [rest[-1], *first[:4]]:
        for _ in range(insertions):
            one(server, prompt)
    after = one(server, rest[-1])
    assert (after.from_device, after.from_host) == (0, whole)


def check_bytes(path: pathlib.Path, layers: int = tiny_model.LAYERS) -> None:
    """Everything that the probe saw move was right, and enough moved to mean something."""
    seen = events(path)
    backups = [event for event in seen if event["event"] == "backup"]
    restores = [event for event in seen if event["event"] == "restore"]
    assert not any(event["wrong_bytes"] for event in backups)
    assert not any(event["wrong_values"] for event in restores)
    assert {event["layer"] for event in restores} == set(range(layers))
    assert sum(event["tokens"] for event in restores) >= 5 * (PROMPT_TOKENS - 16) * layers
    assert sum(event["tokens"] for event in backups) > L1_TOKENS * L2_RATIO + 100, "slots of L2 were to be used again"


def check_metrics(server: HttpServer) -> None:
    """The metrics page says what L2 holds and what the codec took, and has all that the dashboard asks for."""
    samples = server.metrics()
    (report,) = server.info()["hiqcache"]

    def values(name: str, **labels: str) -> list[float]:
        return [s.value for s in samples if s.name == name and s.labels.items() >= labels.items()]

    rank = {"tp_rank": "0", "engine_type": "unified"}
    assert values("hiqcache:representation_info", representation="int8", format_tag="int8-head-v2", **rank) == [1]
    # Pages of 16 tokens x (3 heads x 64 INT8 + 3 scales) = 3,168 bytes, padded to 3,200; K and V.
    assert values("hiqcache:bytes_per_token", **rank) == [200 * 2 * tiny_model.LAYERS]
    assert values("hiqcache:bf16_bytes_per_token", **rank) == [3 * 64 * 2 * 2 * tiny_model.LAYERS]
    assert values("hiqcache:host_tokens", **rank) == values("sglang:hicache_host_total_tokens", **rank)
    assert values("hiqcache:staging_bytes", **rank) == [report["staging_bytes"]]
    for operation, counted in (
        ("encode", "sglang:hicache_backup_tokens_total"),
        ("decode", "sglang:load_back_tokens_total"),
    ):
        (seconds,) = values("hiqcache:sampled_codec_seconds_total", operation=operation, **rank)
        (tokens,) = values("hiqcache:sampled_codec_tokens_total", operation=operation, **rank)
        (moved,) = values(counted, pool="kv")
        if torch.cuda.is_available():  # a sample, perhaps none of so few
            assert 0 <= tokens < moved
        else:  # all of it
            assert tokens == pytest.approx(moved)
        assert bool(seconds) == bool(tokens)
        assert seconds < 60

    absent = dashboard_metrics() - {sample.name for sample in samples}
    # SGLang times transfers with GPU events.
    timed = {"sglang:hicache_backup_duration_seconds_sum", "sglang:load_back_duration_seconds_sum"}
    assert absent == (set() if torch.cuda.is_available() else timed)


@pytest.fixture
def probing(probe_path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Processes started meanwhile carry the probe; its file."""
    carry(probe_path, monkeypatch)
    file = tmp_path / "probe.jsonl"
    monkeypatch.setenv("HIQCACHE_PROBE", str(file))
    return file


def test_engine_int8_then_none(tiny: pathlib.Path, prompts: list[list[int]], probing: pathlib.Path):
    options = small(tiny, page_size=1, hicache_mem_layout="page_first", hicache_write_policy="write_through")
    with engine(**options, hicache_representation="int8") as server:
        (report,) = server.info()["hiqcache"]
        # 3 heads x 64 INT8 + 3 scales, padded to 256 bytes; K and V.
        assert report["representation"] == "int8"
        assert report["bytes_per_token"] == 256 * 2 * tiny_model.LAYERS
        assert report["tokens"] == L1_TOKENS * L2_RATIO + 1
        check(server, prompts, 1, insertions=1, lossless=False)
    check_bytes(probing)

    # A later Engine of the same process that asks for nothing gets nothing. (SGLang's own host pool needs a GPU.)
    with engine(**options | {"enable_hierarchical_cache": torch.cuda.is_available()}) as server:
        assert "hiqcache" not in server.info()
        assert len(one(server, prompts[0]).tokens) == 8


def test_engine_bf16(tiny: pathlib.Path, prompts: list[list[int]], probing: pathlib.Path):
    options = small(tiny, page_size=16, hicache_mem_layout="layer_first", hicache_write_policy="write_back")
    with engine(**options, hicache_representation="bf16") as server:
        (report,) = server.info()["hiqcache"]
        assert report["bytes_per_token"] == 3 * 64 * 2 * 2 * tiny_model.LAYERS
        check(server, prompts, 16, insertions=1, lossless=True)
    check_bytes(probing)


@pytest.mark.xdist_group("sample model")  # to make it once
def test_a_real_model(probing: pathlib.Path):
    """SmolLM2-135M on real text: bf16 restores generate the very tokens that the cold run did."""
    model = sample_model.fetch()
    with engine(**settings(model, page_size=1), hicache_representation="bf16") as server:
        (report,) = server.info()["hiqcache"]
        assert report["bytes_per_token"] == 3 * 64 * 2 * 2 * 30
        fill_and_restore(server, prose(model), 1, insertions=1, lossless=True)
    seen = events(probing)
    restored = sum(event["tokens"] for event in seen if event["event"] == "restore")
    assert restored == 2 * whole_pages(1) * 30
    assert not any(event.get("wrong_bytes") or event.get("wrong_values") for event in seen)


def test_http_int8(tiny: pathlib.Path, prompts: list[list[int]], probing: pathlib.Path, tmp_path: pathlib.Path):
    """`sglang serve`, asked through a YAML file."""
    port = free_port()
    options = small(tiny, page_size=16, hicache_mem_layout="page_first", hicache_write_policy="write_through_selective")
    config = tmp_path / "config.yaml"
    config.write_text("hicache-representation: int8\n")
    command = [str(pathlib.Path(sys.executable).parent / "sglang"), "serve", "--config", str(config)]
    words = cpu.words(device_settings() | options | {"port": port, "admin_api_key": ADMIN_KEY, "enable_metrics": True})
    log = tmp_path / "log"
    with http([*command, *words], log, port, environment()) as server:
        check(server, prompts, 16, insertions=2, lossless=False)
        check_metrics(server)
        (report,) = server.info()["hiqcache"]
        assert (report["representation"], report["layout"]) == ("int8", "page_first")
        attached = server.put("/hicache/storage-backend", {"hicache_storage_backend": "file"})
        assert "hiqcache: L2 holds 'int8' pages" in attached
        one(server, prompts[0])
    assert log.read_text().count("hiqcache: L2 holds KV as int8: 1,600 bytes per token") == 1
    check_bytes(probing)


def test_http_third_party(
    tiny: pathlib.Path,
    prompts: list[list[int]],
    probing: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """The documentation's own example, installed as a stranger's package, through `python -m sglang.launch_server`."""
    site, name = install_third_party(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", f"{environment()['PYTHONPATH']}:{site}")
    port = free_port()
    options = small(tiny, page_size=1, hicache_mem_layout="layer_first", hicache_write_policy="write_back")
    words = cpu.words(device_settings() | options | {"port": port, "hicache_representation": name})
    log = tmp_path / "log"
    with http([sys.executable, "-m", "sglang.launch_server", *words], log, port, environment()) as server:
        assert server.info()["hiqcache"][0]["representation"] == name
        check(server, prompts, 1, insertions=1, lossless=False)
    check_bytes(probing)


def test_a_foreign_pool_stops_the_server(tiny: pathlib.Path, probe_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """Whatever puts another host pool in force, the server that asked for int8 does not come up."""
    monkeypatch.setenv("PYTHONPATH", f"{environment()['PYTHONPATH']}:{probe_path}")
    options = device_settings() | small(tiny) | {"port": free_port(), "hicache_representation": "int8"}
    finished = subprocess.run(
        [sys.executable, "-m", "sglang.launch_server", *cpu.words(options)],
        env=environment(HIQCACHE_SABOTAGE=1),
        capture_output=True,
        text=True,
        timeout=300,
    )
    output = finished.stdout + finished.stderr
    assert finished.returncode == 1
    assert "saw host pool ForeignHostPool over device pool MHATokenToKVPool" in output
    assert "Traceback" not in output
    assert "ready to roll" not in output
