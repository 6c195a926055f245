"""Real SGLang, the real radix tree: encoded pools seen serving, every byte that moves checked.

Each server below takes another value of every axis, so that each value is seen at least once: Engine and HTTP; page
sizes 1, 16 and 64; both host layouts; the three write policies; bf16, int8 and a third party's representation. Most
serve the tiny model, which moves the same bytes as a real one in a tenth of the time. The sweep has more combinations,
and a real model.
"""

import pathlib
import pydoc_data.topics
import subprocess
import sys

import pytest
import smoke
import tiny_model
import torch
from click.testing import CliRunner
from scenario import FIRST, Case, ask, check, check_bytes, check_restored, fill
from serving import (
    ADMIN_KEY,
    HttpServer,
    carry,
    device_settings,
    engine,
    environment,
    events,
    free_port,
    http,
)
from test_metrics import dashboard_metrics
from third_party import Installed

from hiqcache import sample_model
from hiqcache.sglang import cpu

pytestmark = pytest.mark.slow

HTTP = Case("int8", 16, "page_first", "write_through_selective")
ENGINE = Case("bf16", 64, "layer_first", "write_through")


def prose(model: pathlib.Path, case: Case) -> list[list[int]]:
    """Pieces of Python's language reference (PSF licence) in a model's tokens, no two with a common prefix."""
    from transformers import AutoTokenizer

    topics = pydoc_data.topics.topics
    tokens = AutoTokenizer.from_pretrained(model)(" ".join(topics[name] for name in sorted(topics)))["input_ids"]
    pieces: dict[int, list[int]] = {}
    for start in range(0, len(tokens) - case.prompt_tokens, case.prompt_tokens):
        pieces.setdefault(tokens[start], tokens[start : start + case.prompt_tokens])
    return list(pieces.values())[:FIRST]


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

    absent = dashboard_metrics() - {sample.name for sample in samples}
    # SGLang times transfers with GPU events.
    timed = {"sglang:hicache_backup_duration_seconds_sum", "sglang:load_back_duration_seconds_sum"}
    assert absent == (set() if torch.cuda.is_available() else timed)


def check_smoke(server: HttpServer, case: Case) -> None:
    """`tools/smoke.py` finds out by itself what is said here of the server."""
    answer = CliRunner().invoke(smoke.main, ["--url", server.url, "--api-key", ADMIN_KEY])
    assert answer.exit_code == 0, answer.output
    assert f"keeps L2 as int8 (int8-head-v2): 1,600 bytes per token, {case.l2_tokens:,} tokens" in answer.output
    for operation in ("backed up", "restored"):
        (line,) = (line for line in answer.output.splitlines() if f"{operation} meanwhile: " in line)
        assert line.endswith(" tokens, 1,600 bytes per token")
    assert "PASS: " in answer.output


def test_http_int8(tiny: pathlib.Path, probing: pathlib.Path, tmp_path: pathlib.Path):
    """`sglang serve`, asked through a YAML file."""
    case = HTTP
    settings = case.settings(tiny, port=free_port(), admin_api_key=ADMIN_KEY, enable_metrics=True)
    config, log = tmp_path / "config.yaml", tmp_path / "log"
    config.write_text(f"hicache-representation: {settings.pop('hicache_representation')}\n")
    command = [str(pathlib.Path(sys.executable).parent / "sglang"), "serve", "--config", str(config)]
    words = cpu.words(device_settings() | settings)
    with http([*command, *words], log, settings["port"], environment()) as server:
        check(server, case)
        check_metrics(server)
        (report,) = server.info()["hiqcache"]
        # 16 tokens x (3 heads x 64 INT8 + 3 scales) = 3,168 bytes, padded to 3,200; K and V.
        assert report["bytes_per_token"] == 200 * 2 * tiny_model.LAYERS == 1600
        assert (report["representation"], report["layout"]) == ("int8", "page_first")
        assert report["tokens"] == case.l2_tokens
        attached = server.put("/hicache/storage-backend", {"hicache_storage_backend": "file"})
        assert "hiqcache: L2 holds 'int8' pages" in attached
        check_smoke(server, case)
    assert log.read_text().count("hiqcache: L2 holds KV as int8: 1,600 bytes per token") == 1
    check_bytes(probing, case)


def test_engine_bf16(tiny: pathlib.Path, probing: pathlib.Path):
    case = ENGINE
    with engine(**case.settings(tiny)) as server:
        (report,) = server.info()["hiqcache"]
        assert report["bytes_per_token"] == 3 * 64 * 2 * 2 * tiny_model.LAYERS
        assert report["tokens"] == case.l2_tokens
        check(server, case)
    check_bytes(probing, case)


def test_http_third_party(
    tiny: pathlib.Path,
    installed: Installed,
    probing: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """The documentation's own example, installed as a stranger's package, through `python -m sglang.launch_server`."""
    monkeypatch.setenv("PYTHONPATH", f"{environment()['PYTHONPATH']}:{installed.site}")
    case = Case(installed.name, 1, "page_first", "write_back")
    settings = device_settings() | case.settings(tiny, port=free_port())
    command = [sys.executable, "-m", "sglang.launch_server", *cpu.words(settings)]
    with http(command, tmp_path / "log", settings["port"], environment()) as server:
        assert server.info()["hiqcache"][0]["representation"] == installed.name
        check(server, case)
    check_bytes(probing, case)


def test_a_foreign_pool_stops_the_server(tiny: pathlib.Path, probe_site: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """Whatever puts another host pool in force, the server that asked for int8 does not come up."""
    carry(probe_site, monkeypatch)
    case = Case("int8", 1, "page_first", "write_through")
    settings = device_settings() | case.settings(tiny, port=free_port())
    finished = subprocess.run(
        [sys.executable, "-m", "sglang.launch_server", *cpu.words(settings)],
        env=environment(HIQCACHE_SABOTAGE=1),
        capture_output=True,
        text=True,
    )
    output = finished.stdout + finished.stderr
    assert finished.returncode == 1
    assert "saw host pool ForeignHostPool over device pool MHATokenToKVPool" in output
    assert "Traceback" not in output
    assert "ready to roll" not in output


# -- the sweep -------------------------------------------------------------------------------------------------------

SWEEP = [
    Case("int8", 1, "page_first", "write_back"),
    Case("bf16", 1, "layer_first", "write_through_selective"),
    Case("bf16", 16, "layer_first", "write_back"),
    Case("int8", 32, "layer_first", "write_back"),
    Case("bf16", 32, "page_first", "write_through_selective"),
    Case("int8", 64, "page_first", "write_back"),
    Case("bf16", 128, "layer_first", "write_through_selective"),
    Case("int8", 128, "page_first", "write_through"),
]
"""With HTTP and ENGINE, every pair of representation, layout and page size, and of each policy with the first two."""


@pytest.mark.sweep
@pytest.mark.parametrize("case", SWEEP[1:], ids=str)
def test_engines(case: Case, tiny: pathlib.Path, probing: pathlib.Path):
    with engine(**case.settings(tiny)) as server:
        check(server, case)
    check_bytes(probing, case)


@pytest.mark.sweep
def test_int8_then_none(tiny: pathlib.Path, probing: pathlib.Path):
    """A later Engine of the same process that asks for nothing gets nothing."""
    case = SWEEP[0]
    settings = case.settings(tiny)
    with engine(**settings) as server:
        check(server, case)
    check_bytes(probing, case)

    del settings["hicache_representation"]
    settings["enable_hierarchical_cache"] = torch.cuda.is_available()  # SGLang's own host pool needs a GPU
    with engine(**settings) as server:
        assert "hiqcache" not in server.info()
        ask(server, case.prompts()[0], device=0, host=0)


@pytest.mark.sweep
@pytest.mark.xdist_group("sample model")  # to make it once
def test_a_real_model(probing: pathlib.Path):
    """SmolLM2-135M on real text, in its own BF16."""
    model = sample_model.fetch()
    case = Case("bf16", 1, "page_first", "write_through")
    prompts = prose(model, case)
    with engine(**case.settings(model)) as server:
        (report,) = server.info()["hiqcache"]
        assert report["bytes_per_token"] == 3 * 64 * 2 * 2 * 30
        exact = fill(server, case, prompts)
        for number in (0, 1):
            check_restored(server, case, prompts[number], exact[number])
    seen = events(probing)
    assert sum(event["tokens"] for event in seen if event["event"] == "restore") == 2 * case.whole * 30
    assert not any(event.get("wrong_bytes") or event.get("wrong_values") for event in seen)
