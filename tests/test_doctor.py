"""The doctor: facts as any machine might have them, and this machine as it is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attrs import evolve
from click.testing import CliRunner, Result

from hiqcache.__main__ import main
from hiqcache.capacity import Capacity
from hiqcache.doctor import facts as facts_module
from hiqcache.doctor.checks import Finding, Request, Status, diagnose, ready
from hiqcache.doctor.facts import Facts, Gpu, SGLang, ask_sglang, observe

GIB = 1 << 30
H200 = Gpu("NVIDIA H200", (9, 0), 150_000_000_000)
COMPILERS = ("c++", "/usr/local/cuda/bin/nvcc")
SERVER = Facts(
    sglang_version="0.5.23",
    sglang=SGLang(
        missing_hooks=(),
        machine_bytes=200 * 10**9,
        reserve_bytes=10 * GIB,
        compilers=COMPILERS,
    ),
    torch_build="CUDA 13.0",
    gpus=(H200,) * 4,
    driver="580.95.05",
    driver_gpus=4,
    batched_copies=True,
    found={name: f"/usr/bin/{name}" for name in ("C compiler", "Python.h", "ninja", *COMPILERS)},
)
"""A machine on which everything is as it should be."""
assert SERVER.sglang is not None
LAPTOP = evolve(SERVER, gpus=(), driver=None, driver_gpus=0, found={}, sglang=evolve(SERVER.sglang, compilers=()))


def with_sglang(**changes: object) -> Facts:
    assert SERVER.sglang is not None
    return evolve(SERVER, sglang=evolve(SERVER.sglang, **changes))


def finding(check: str, facts: Facts, **request: object) -> Finding:
    (found,) = [found for found in diagnose(facts, Request(**request)) if found.check == check]  # type: ignore[arg-type]
    return found


def test_a_good_machine_is_ready():
    findings = diagnose(SERVER, Request(size=40, tp_size=4))
    assert {found.status for found in findings} == {Status.OK}
    assert ready(findings)
    assert len(findings) == 9
    assert not any(found.advice for found in findings)


def test_a_machine_with_no_gpu_is_told_what_works():
    findings = diagnose(LAPTOP, Request())
    assert ready(findings)
    (warning,) = [found for found in findings if found.status is not Status.OK]
    assert (warning.check, warning.status) == ("GPU", Status.WARNING)
    assert "only the CPU engine works here" in warning.seen
    assert "hiqcache.sglang.cpu" in warning.advice


def test_a_machine_with_nothing():
    findings = diagnose(Facts(plugins=0), Request(size=8))
    assert {found.check: found.status for found in findings} == {
        "SGLang": Status.FAILED,
        "plugin": Status.FAILED,
        "GPU": Status.WARNING,
        "pinned memory": Status.OK,
    }


@pytest.mark.parametrize(
    ("check", "facts", "request_", "status", "seen", "advice"),
    [
        ("SGLang", evolve(SERVER, sglang_version="0.6.0"), {}, "failed", "0.6.0; tested: 0.5.23", "sglang==0.5.23"),
        ("SGLang", evolve(SERVER, sglang_version="0.6.0", allow_untested=True), {}, "warning", "0.6.0, untested", "=="),
        ("SGLang", evolve(SERVER, sglang_version=None), {}, "failed", "not installed", "pip install"),
        ("plugin", evolve(SERVER, plugins=0), {}, "failed", "no entry point", "pip install hiqcache"),
        ("plugin", evolve(SERVER, plugin_filter="a, b"), {}, "failed", "SGLANG_PLUGINS=a, b leaves it out", "unset"),
        ("plugin", evolve(SERVER, plugin_filter="a, hiqcache"), {}, "ok", "SGLang finds it", ""),
        ("plugin", evolve(SERVER, plugin_filter=","), {}, "ok", "SGLang finds it", ""),  # SGLang then filters none
        ("hooks", with_sglang(missing_hooks=["a.b"], log=["no b"]), {}, "failed", "cannot hook a.b (no b)", "0.5.23"),
        ("hooks", with_sglang(log=["other: broken"]), {}, "warning", "other: broken", ""),
        ("hooks", with_sglang(missing_hooks=None, error="OSError: x"), {}, "failed", "OSError: x", "repair"),
        ("half", evolve(SERVER, broken={"half": "no luck"}), {}, "warning", "no luck", "uninstall"),
        ("GPU", SERVER, {}, "ok", "4 x NVIDIA H200, 150 GB, compute capability 9.0", ""),
        ("GPU", SERVER, {"tp_size": 8}, "warning", "4 x NVIDIA H200", "--tp-size 8 needs more GPUs"),
        ("GPU", evolve(SERVER, gpus=(H200, Gpu("Tesla T4", (7, 5), GIB))), {}, "failed", "Tesla T4", "8.0"),
        ("GPU", evolve(SERVER, torch_build="ROCm 6.4"), {}, "failed", "ROCm 6.4", "only NVIDIA"),
        ("GPU", evolve(SERVER, gpus=()), {}, "failed", "lists 4, PyTorch (built for CUDA 13.0) can use none", "driver"),
        ("driver", SERVER, {}, "ok", "580.95.05", ""),
        ("driver", evolve(SERVER, driver=None), {}, "ok", "nvidia-smi does not answer", ""),
        ("driver", evolve(SERVER, batched_copies=False), {}, "warning", "580.95.05", "CUDA 12.8"),
        ("Triton's compiler", evolve(SERVER, found={}), {}, "failed", "C compiler, Python.h", "gcc"),
        ("SGLang's compilers", evolve(SERVER, found={}), {}, "failed", "c++, /usr/local/cuda/bin/nvcc, ninja", "PATH"),
        # 200 GB less 10 GiB are 189.26 GB.
        ("host memory", SERVER, {}, "ok", "room for 189 GB on each of 1 rank(s)", ""),
        ("host memory", with_sglang(cgroup_bytes=10**12), {}, "ok", "200.0 GB free on the machine", ""),
        ("host memory", SERVER, {"size": 47, "tp_size": 4}, "ok", "200.0 GB free on the machine", ""),
        ("host memory", SERVER, {"size": 48, "tp_size": 4}, "failed", "wanted: 48 GB each", "--hicache-size 47"),
        ("host memory", with_sglang(cgroup_bytes=12 * GIB), {"size": 3}, "failed", "within the container", "size 2"),
        ("host memory", with_sglang(cgroup_bytes=GIB), {}, "failed", "room for 0 GB", "raise the container's"),
        ("host memory", with_sglang(machine_bytes=GIB), {"size": 1}, "failed", "wanted: 1 GB", "container's"),
        ("host memory", with_sglang(cgroup_error="no file"), {}, "warning", "unknown (no file)", "give --hicache-size"),
        ("host memory", with_sglang(machine_bytes=None, error="E: e"), {}, "warning", "E: e", "repair"),
        ("pinned memory", evolve(SERVER, memlock_bytes=8 << 20), {"size": 40}, "ok", "8.4 MB; CUDA pinned 268 MB", ""),
        ("pinned memory", evolve(SERVER, memlock_bytes=GIB), {"size": 40}, "warning", "less than the 40", "memlock=-1"),
        ("pinned memory", evolve(SERVER, memlock_bytes=GIB), {"size": 1}, "ok", "1,073.7 MB", ""),
        ("pinned memory", evolve(SERVER, pinning_error="error 2"), {}, "failed", "error 2", "ulimit -l unlimited"),
        ("pinned memory", LAPTOP, {}, "ok", "the CPU engine pins none", ""),
        ("model", SERVER, {"model_error": "model refused: x"}, "failed", "model refused: x", "no representation"),
        ("int8", SERVER, {"verdicts": {"int8": ["too few heads"]}}, "failed", "too few heads", "no representation"),
    ],
)  # fmt: skip
def test_each_check(check: str, facts: Facts, request_: dict, status: str, seen: str, advice: str):
    found = finding(check, facts, **request_)
    assert found.status.value == status
    assert seen in found.seen
    assert advice in found.advice
    assert bool(found.advice) == bool(advice)


def test_one_representation_is_enough():
    verdicts = {"int8": ["too few heads"], "bf16": Capacity(100, 100, 7)}
    findings = diagnose(SERVER, Request(verdicts=verdicts))
    assert ready(findings)
    assert [(found.check, found.status) for found in findings[-2:]] == [("int8", Status.WARNING), ("bf16", Status.OK)]


def test_every_check_is_on_the_page():
    page = (Path(__file__).parents[1] / "docs/doctor.md").read_text(encoding="utf-8")
    findings = diagnose(SERVER, Request(model_error="x", verdicts={"int8": ["x"]}))
    assert not [found.check for found in findings if f"`{found.check}`" not in page]


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Makes the command find these facts."""

    def be(facts: Facts) -> None:
        monkeypatch.setattr(facts_module, "observe", lambda: facts)

    return be


def doctor(*args: str) -> Result:
    result = CliRunner().invoke(main, ["doctor", *args], prog_name="hiqcache")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def config(folder: Path, **changes: object) -> str:
    """Qwen3-8B's shape."""
    fields = {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    file = folder / "config.json"
    file.write_text(json.dumps({**fields, "dtype": "bfloat16", **changes}))
    return str(file)


def test_the_table(machine, tmp_path):
    machine(SERVER)
    result = doctor("--model", config(tmp_path), "--hicache-size", "8")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["check", "status", "found", "what", "to", "do"]
    assert lines[-1] == "Ready."
    (int8,) = [line for line in lines if line.startswith("int8")]
    assert int8.split()[1] == "ok"
    assert "82,944 bytes per token, 1.78x BF16's tokens, 96,451 tokens in 8 GB" in int8


def test_what_fails_sets_the_exit_status(machine):
    machine(evolve(SERVER, sglang_version="0.6.0"))
    result = doctor()
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "Not ready."


def test_json(machine, tmp_path):
    machine(SERVER)
    result = doctor("--json", "--model", config(tmp_path), "--tp", "8", "--hicache-size", "40")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["ready"] is False
    checks = {entry.pop("check"): entry for entry in document["checks"]}
    assert checks["SGLang"] == {"status": "ok", "found": "0.5.23, tested", "what_to_do": ""}
    assert checks["host memory"]["status"] == "failed"  # 8 x 40 GB
    assert checks["int8"]["status"] == "warning"
    assert "saw 256 (1 local KV heads x 128 at TP=8, page size 1, padded)" in checks["int8"]["found"]
    assert checks["bf16"]["status"] == "ok"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/no/such/file", "No such file"),
        ("{tmp}/bad.json", "is not JSON"),
        ("{tmp}/mla.json", "multi-head latent attention"),
    ],
)
def test_a_model_that_cannot_be_served_is_a_finding(machine, tmp_path, path, words):
    machine(SERVER)
    (tmp_path / "bad.json").write_bytes(b"\xff\x00{")
    Path(config(tmp_path, kv_lora_rank=512)).rename(tmp_path / "mla.json")
    result = doctor("--json", "--model", path.format(tmp=tmp_path))
    assert result.exit_code == 1
    last = json.loads(result.stdout)["checks"][-1]
    assert (last["check"], last["status"]) == ("model", "failed")
    assert words in last["found"]


def test_usage(machine):
    machine(SERVER)
    assert doctor("--hicache-size", "0").exit_code == 2
    assert doctor("--tp-size", "x").exit_code == 2
    assert "exit status" in doctor("--help").stdout


# -- observing -------------------------------------------------------------------------------------------------------


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_whatever_happens_to_the_child_there_is_an_answer(monkeypatch: pytest.MonkeyPatch):
    dead = ask_sglang(python("import os, sys; print('last words', file=sys.stderr, flush=True); os.abort()"))
    assert dead.error == "importing SGLang ended its process with status -6: last words"
    foreign = ask_sglang(python("import sys; sys.stderr.buffer.write(b'caf\\xe9'); sys.exit(3)"))
    assert foreign.error == "importing SGLang ended its process with status 3: caf\ufffd"
    garbled = ask_sglang(python("print('{')"))
    assert garbled.error == "importing SGLang ended its process with status 0: it said nothing"
    monkeypatch.setattr(facts_module, "ASK_SECONDS", 0.2)
    slow = ask_sglang(python("import time; time.sleep(60)"))
    assert slow.error is not None
    assert "more than 0.2 seconds" in slow.error


def test_the_child_is_asked_without_the_filter(monkeypatch: pytest.MonkeyPatch):
    echo = python("import json, os; print(json.dumps({'error': os.environ.get('SGLANG_PLUGINS')}))")
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    assert ask_sglang(echo).error == "other,hiqcache"
    monkeypatch.delenv("SGLANG_PLUGINS")
    assert ask_sglang(echo).error is None


def test_an_sglang_that_cannot_be_imported(tmp_path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang/__init__.py").write_text("print('chatter')\nraise OSError('no such chip')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = ask_sglang([sys.executable, "-m", "hiqcache.sglang.doctor"])
    assert found == SGLang(error="OSError: no such chip")


def test_a_bare_machine(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """No SGLang, no nvidia-smi, no compiler; nothing raises."""
    monkeypatch.setattr(facts_module, "_version", lambda package: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    found = observe()
    assert (found.sglang_version, found.sglang, found.driver, found.driver_gpus) == (None, None, None, 0)
    assert found.found["C compiler"] is None
    assert found.found["ninja"] is None
    assert found.plugins >= 1
    assert found.broken == {}
    assert len(found.gpus) == torch.cuda.device_count()


def test_what_nvidia_smi_says(tmp_path, monkeypatch: pytest.MonkeyPatch):
    smi = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for script, expected in (
        ("echo 580.95.05; echo 580.95.05", ["580.95.05"] * 2),
        ("echo 'NVIDIA-SMI has failed'; exit 9", []),
        (r"printf '\377\376'", []),
    ):
        smi.write_text(f"#!/bin/sh\n{script}\n")
        smi.chmod(0o755)
        assert facts_module._driver_versions() == expected


@pytest.mark.slow
def test_the_installed_sglang():
    """The real one, asked as the command asks it; and the plugin has not imported Prometheus' client.

    Imported before SGLang has set PROMETHEUS_MULTIPROC_DIR, the client would keep values in each process.
    """
    pytest.importorskip("sglang", reason="needs the sglang extra")
    code = "import sys\nfrom hiqcache.sglang import doctor\ndoctor.main()\nsys.exit('prometheus_client' in sys.modules)"
    child = subprocess.run(python(code), capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-2000:]
    found = SGLang(**json.loads(child.stdout))
    assert (found.error, found.missing_hooks, found.log) == (None, (), ())
    assert found.machine_bytes is not None
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < found.machine_bytes <= total
    assert found.reserve_bytes == (10 * GIB if torch.cuda.is_available() else min(10 * GIB, total // 4))
    assert bool(found.compilers) == torch.cuda.is_available()


@pytest.mark.gpu
def test_a_gpu():
    found = facts_module._gpus()
    assert len(found) == torch.cuda.device_count()
    assert found[0].name == torch.cuda.get_device_name(0)
    assert facts_module._pinning_error() is None
    assert facts_module._driver_versions()
