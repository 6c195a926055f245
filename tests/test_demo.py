"""`hiqcache demo`, with an engine that only pretends except where marked slow."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import tiny_model
from click.testing import CliRunner, Result

from hiqcache import sample_model
from hiqcache.__main__ import main
from hiqcache.commands.demo import prompts
from hiqcache.sglang import demo
from hiqcache.sglang.demo import ANSWER_TOKENS, PHASES, Answer, DemoFailed, Event, Started, serve

TOKENS = [5, 6, 7]


def answers(restored: list[int], host_tokens: int) -> Iterator[Event]:
    """A server's events; the second prompt's restored answer, and the host tokens behind it, are given."""
    yield Started(256, 4000)
    for phase in PHASES:
        for index in range(len(prompts())):
            last = phase == "restored"
            tokens = restored if last and index == 1 else TOKENS
            seconds = {"cold": 2.0, "exact": 0.25, "restored": 0.5}[phase] * (100 if index == 0 else 1)
            yield Answer(phase, index, seconds, tokens, (host_tokens if index == 1 else 90) * last)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`hiqcache demo --model ...` on a server whose events are given for each representation."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def invoke(*arguments: str, **events: Iterator[Event]) -> Result:
        monkeypatch.setattr(demo, "serve", lambda model, name, prompts, log: events[name])
        return CliRunner().invoke(main, ["demo", "--model", str(tmp_path), *arguments])

    return invoke


def test_table(run, tmp_path):
    result = run(bf16=answers(TOKENS, 90), int8=answers([5, 0, 7], 80))
    assert result.exit_code == 0, result.output
    _, _, bf16, int8 = result.stdout.splitlines()
    assert bf16.split() == ["bf16", "256", "4,000", "450", "2.000", "0.500", "15/15", "5/5"]
    assert int8.split() == ["int8", "256", "4,000", "440", "2.000", "0.500", "13/15", "4/5"]  # 5, then 0 for 6
    assert "int8: prompt 2 once evicted: first token after 0.50 s, 80 tokens from L2" in result.stderr
    assert list(tmp_path.iterdir()) == [], "logs are kept on failure only"


def test_json(run):
    result = run("--representation", "int8", "--json", int8=answers(TOKENS, 90))
    (summary,) = json.loads(result.stdout)
    assert summary["representation"] == "int8"
    assert summary["cold_seconds"] == 2.0
    assert summary["agreeing_tokens"] == summary["generated_tokens"] == 15


def test_no_restore(run, tmp_path):
    result = run(bf16=answers(TOKENS, 0))
    assert result.exit_code == 1
    assert "bf16: SGLang restored nothing from L2 for these prompts: debugger" in result.stderr
    (logs,) = tmp_path.iterdir()
    assert f"{logs / 'bf16.log'}" in result.stderr


def test_bf16_must_not_change_an_answer(run):
    result = run(bf16=answers([5, 6, 0], 90))
    assert result.exit_code == 1
    assert "only 14 of 15 tokens after a restore are exact KV's" in result.stderr
    assert not result.stdout


def test_unknown_representation(run):
    result = run("--representation", "int9")
    assert result.exit_code == 1
    assert "int8" in result.stderr


def test_prompts_are_long_and_differ_from_the_start():
    assert len({prompt[:10] for prompt in prompts()}) == len(prompts()) >= 5
    assert all(len(prompt) > 2000 for prompt in prompts())


# the process around SGLang


@pytest.fixture
def interpreter(tmp_path, monkeypatch):
    """Runs a shell script where `serve` would run SGLang."""

    def write(script: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return write


STARTED = """echo '["Started", {"bytes_per_token": 256, "tokens": 4000}]'"""


def test_every_process_is_ended(interpreter, tmp_path):
    interpreter(f"sleep 300 & echo $! > {tmp_path}/pid; {STARTED}; sleep 300")
    with closing(serve(tmp_path, "int8", ["text"], tmp_path / "log")) as events:
        assert next(events) == Started(256, 4000)
        pid = int((tmp_path / "pid").read_text())
        os.kill(pid, 0)
    assert _ends(pid)


def _ends(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().split()[2]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True  # dead, and not yet collected by the parent it fell to
        time.sleep(0.05)
    return False


def test_refusal_is_passed_on(interpreter, tmp_path):
    interpreter("""echo said >&2; echo '["DemoFailed", {"reason": "no such thing"}]'; exit 1""")
    with pytest.raises(DemoFailed, match="no such thing"):
        list(serve(tmp_path, "int8", ["text"], tmp_path / "log"))
    assert (tmp_path / "log").read_text() == "said\n"


@pytest.mark.parametrize("script", [f"{STARTED}; kill -9 $$", "exit 3"])
def test_sudden_end(interpreter, tmp_path, script):
    interpreter(script)
    with pytest.raises(DemoFailed, match=r"SGLang ended with status (-9|3) while serving 'int8'"):
        list(serve(tmp_path, "int8", ["text" * 100_000], tmp_path / "log"))


# SGLang itself


def real_demo(representation: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "hiqcache", "demo", "--representation", representation, "--json", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    (summary,) = json.loads(result.stdout)
    assert summary["representation"] == representation
    assert summary["answers"] == len(prompts())
    return summary


def check_restored(summary: dict[str, Any], model: Path) -> None:
    """All that could come back from L2 did. The last two prompts begin with the same word, which L1 may hold."""
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(model)(prompts())["input_ids"]
    whole = sum(len(prompt) - 1 for prompt in tokens)
    assert whole - 2 <= summary["restored_tokens"] <= whole


@pytest.mark.slow
def test_demo_of_a_tiny_model(tmp_path):
    """With bf16, for which the demo itself demands the answers that L1 gives."""
    model = tiny_model.add_tokenizer(tiny_model.make(tmp_path), prompts())
    bf16 = real_demo("bf16", "--model", str(model))
    assert bf16["bytes_per_token"] == 3 * 64 * 2 * 2 * tiny_model.LAYERS == 3072
    assert bf16["l2_tokens"] == 10**9 // 3072 + 1
    assert bf16["agreeing_tokens"] == bf16["generated_tokens"] == ANSWER_TOKENS * len(prompts())
    check_restored(bf16, model)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.xdist_group("sample model")  # to make it once
def test_demo_of_the_real_model():
    int8 = real_demo("int8")
    assert (int8["bytes_per_token"], int8["l2_tokens"]) == (15_360, 65_105)
    assert int8["agreeing_tokens"] > int8["generated_tokens"] // 2
    check_restored(int8, sample_model.fetch())


@pytest.mark.slow
@pytest.mark.sweep
def test_a_folder_without_a_model(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "hiqcache", "demo", "--model", tmp_path], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "What SGLang printed is in" in result.stderr
