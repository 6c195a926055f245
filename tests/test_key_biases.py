"""Key biases: which heads are found, what a server logs, and the figures behind the limit."""

import importlib
import json
import logging
import math
import pathlib
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from hiqcache import registry
from hiqcache.__main__ import main
from hiqcache.backends.bf16 import Bf16
from hiqcache.backends.int8 import Int8
from hiqcache.geometry import KVGeometry
from hiqcache.key_biases import PAGE, BiasedHead, amplitudes, biased_heads, warning
from hiqcache.representation import HostRepresentation

REPOSITORY = pathlib.Path(__file__).parents[1]
RESULT = json.loads((REPOSITORY / "docs/results/key-biases.json").read_text())


# -- the criterion ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rotary_dim", "interleaved", "expected"),
    [
        (6, False, [5, 13, 1, 5, 13, 1]),  # pairs (0, 3), (1, 4), (2, 5)
        (6, True, [math.hypot(3, 5)] * 2 + [math.hypot(1, 4)] * 2 + [12, 12]),
        (4, False, [math.hypot(3, 1), math.hypot(5, 4)] * 2 + [12, 0]),
        (0, False, [3, 5, 1, 4, 12, 0]),
    ],
)
def test_amplitudes_are_those_of_rope_pairs(rotary_dim: int, interleaved: bool, expected: list[float]):
    biases = torch.tensor([3.0, -5.0, 1.0, 4.0, 12.0, 0.0])
    torch.testing.assert_close(amplitudes(biases, rotary_dim, interleaved), torch.tensor(expected).float())


def test_rope_turns_a_bias_into_its_amplitude():
    """SGLang's convention, by hand: over all angles, the largest value of either channel."""
    first, second = 3.0, -4.0
    angles = torch.linspace(0, 2 * math.pi, 1000)
    largest = (first * angles.cos() - second * angles.sin()).max()
    torch.testing.assert_close(amplitudes(torch.tensor([first, second]), 2, False)[0], largest, atol=1e-3, rtol=0)


def test_heads_beyond_the_limit_are_found():
    amplitude, spread = torch.zeros(3, 8), torch.full((3, 8), 2.0)
    amplitude[0, 3] = 20.0  # exactly the limit
    amplitude[1, 5] = 20.5
    amplitude[2, 0], spread[2, 0] = 30.0, 1000.0  # the biased channel's own spread does not count
    assert list(biased_heads(7, 4, amplitude, spread, limit=10)) == [
        BiasedHead(7, 5, 20.5, 2.0),
        BiasedHead(7, 6, 30.0, 2.0),
    ]


def test_a_head_without_weights():
    zeros = torch.zeros(1, 4)
    assert not list(biased_heads(0, 0, zeros, zeros, limit=10))
    (found,) = biased_heads(0, 0, zeros + 1, zeros, limit=10)
    assert found.multiple == math.inf


def test_the_warning_counts_and_names_the_worst():
    heads = [BiasedHead(0, 0, 100, 2), BiasedHead(0, 1, 90, 2), BiasedHead(27, 3, 612, 1.5)]
    text = warning("int8", 14.0, heads)
    assert "that int8 does not bear: in 2 layer(s), 3 KV head(s)" in text
    assert "more than 14 standard deviations" in text
    assert "The worst is layer 27, head 3: 612 against 1.5, 408 times" in text
    assert "--hicache-representation bf16" in text
    assert "--kv-cache-dtype fp8_e4m3 without hiqcache" in text
    page, _, anchor = PAGE.partition("#")
    assert re.search(rf"^#+ {anchor.replace('-', ' ')}$", (REPOSITORY / page).read_text(), re.MULTILINE | re.IGNORECASE)


def test_what_a_representation_bears():
    assert Bf16.key_bias_limit == math.inf
    assert Int8.key_bias_limit == HostRepresentation.key_bias_limit, "who states nothing is taken for one of its kind"


QWEN2_5_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({}, "model_type = qwen2"),
        ({"model_type": "qwen2_moe"}, "model_type = qwen2_moe"),
        ({"model_type": "qwen2_moe", "qkv_bias": False}, None),
        ({"model_type": "qwen3"}, None),
        ({"model_type": "qwen3", "attention_bias": False}, None),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias = true"),
        ({"model_type": "chatglm", "add_qkv_bias": True}, "add_qkv_bias = true"),
        ({"model_type": "qwen2_5_vl", "text_config": {"head_dim": 128, **QWEN2_5_7B}}, "model_type = qwen2"),
        (
            {
                "model_type": "qwen2_audio",
                "text_config": {n: v for n, v in QWEN2_5_7B.items() if n != "model_type"} | {"head_dim": 128},
            },
            "model_type = qwen2_audio",
        ),
    ],
)
def test_capacity_says_what_the_config_does(fields: dict[str, Any], seen: str | None, tmp_path: pathlib.Path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_5_7B | fields))
    arguments = ["capacity", "--config", str(tmp_path), "--hicache-size", "8"]
    result = CliRunner().invoke(main, arguments)
    lines = [line for line in result.stdout.splitlines() if "biases" in line]
    expected = (
        f"K has biases in this model ({seen}), which may make int8 inaccurate. A server warns of it when it starts."
    )
    assert lines == ([f"{expected} Figures: {PAGE}"] if seen else [])
    assert json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)["key_biases"] == seen


def test_capacity_says_nothing_of_what_is_refused_or_unknown(tmp_path: pathlib.Path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_5_7B))
    refused = ["--config", str(tmp_path), "--tp-size", "4"]  # one head on each rank: int8 would save nothing
    unknown = ["--layers", "28", "--heads", "4", "--head-dim", "128"]
    for arguments in (refused, unknown):
        result = CliRunner().invoke(main, ["capacity", *arguments, "--hicache-size", "8"])
        assert result.exit_code == 0
        assert "biases" not in result.stdout


# -- the figures -----------------------------------------------------------------------------------------------------


def test_the_limit_is_where_int8_gets_worse_than_fp8():
    biases, errors = RESULT["biases"], RESULT["errors"]
    assert Int8.key_bias_limit in biases
    for place in ("low", "random"):
        for bias, int8, fp8 in zip(biases, errors["int8"][place], errors["fp8_e4m3"][place], strict=True):
            assert (int8 <= fp8) == (bias <= Int8.key_bias_limit), (place, bias)


def test_the_page_has_the_results_table():
    table = importlib.import_module("key_biases").markdown(RESULT)
    assert table in (REPOSITORY / "docs/quality.md").read_text(), f"the table should read:\n{table}"


def percent(bias: int, name: str, digits: int = 0) -> list[str]:
    return [f"{RESULT['errors'][name][place][RESULT['biases'].index(bias)]:.{digits}%}" for place in ("low", "random")]


def test_figures_in_sentences():
    readme = " ".join((REPOSITORY / "README.md").read_text().split())
    low, high = sorted(percent(60, "int8"))
    assert f"{low} to {high} at a bias of 60 standard deviations" in readme
    assert "more than half at 151" in readme
    assert f"without a bias it is off by {percent(0, 'int8', 1)[0]}" in readme
    assert "FP8 KV is off by about 6% in all three" in readme
    assert {figure for bias in (0, 60, 151) for figure in percent(bias, "fp8_e4m3")} == {"6%"}
    assert min(float(value.rstrip("%")) for value in percent(151, "int8")) > 50
    doc = " ".join((importlib.import_module("hiqcache.key_biases").__doc__ or "").split())
    assert f"a plain FP8 cast makes, {percent(14, 'fp8_e4m3', 1)[1]}; at 60 it is {high}" in doc


def test_the_study_by_theory(monkeypatch: pytest.MonkeyPatch):
    """A step of A / 127, uniform noise of step / sqrt(12), against channels of standard deviation 1."""
    study = importlib.import_module("key_biases")
    monkeypatch.setattr(study, "HEADS", 4)
    int8 = study.through(Int8(KVGeometry(layers=1, heads=4, head_dim=128, v_head_dim=128, page_size=64)))
    values = torch.zeros(1024, 4, 128, dtype=torch.bfloat16).normal_(generator=torch.Generator().manual_seed(1))
    values[..., 0] = 127.0
    noise = (int8(values, study.Part.K) - values).float()[..., 1:].std()
    assert float(noise) == pytest.approx(1 / math.sqrt(12), rel=0.02)
    small, large = (study.Sample.draw(bias, "low", 0).error(int8) for bias in (0, 151))
    assert small < 0.03 < 0.3 < large
    assert study.Sample.draw(0, "low", 0).error(lambda values, part: values) == 0


# -- a loaded model --------------------------------------------------------------------------------------------------


HIDDEN, HEADS, DIM = 64, 3, 8
Biases = Mapping[tuple[int, int], float]
"""(head, channel) -> bias of K."""


class Norm(nn.Module):
    """RMS norm with weights of 3."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * x * x.square().mean(-1, keepdim=True).rsqrt()


class Rope(nn.Module):
    rotary_dim, is_neox_style = DIM, True


@pytest.fixture
def reading() -> Any:
    pytest.importorskip("sglang", reason="the extra `sglang` is not installed")
    return importlib.import_module("hiqcache.sglang.key_biases")


def loaded(reading: Any, biases: Mapping[int, Biases | None], norm: str = "input_layernorm") -> nn.Module:
    """A model whose K has a standard deviation of 6: layer -> (head, channel) -> bias."""

    class Projection(reading.QKVParallelLinear):
        def __init__(self, channels: Biases | None):
            nn.Module.__init__(self)
            self.hidden_size, self.head_size, self.num_kv_heads = HIDDEN, DIM, HEADS
            self.q_proj_shard_size, self.kv_proj_shard_size = 2 * HEADS * DIM, HEADS * DIM
            self.kv_tp_group, self.num_kv_head_replicas = None, 1
            rows = 4 * HEADS * DIM
            weight = torch.zeros(rows, HIDDEN)
            weight[torch.arange(rows), torch.arange(rows) % HIDDEN] = 2.0
            weight[: self.q_proj_shard_size] = 1e6  # Q and V count for nothing
            weight[-self.kv_proj_shard_size :] = 1e6
            self.weight, self.bias = nn.Parameter(weight), None
            if channels is not None:
                self.bias = nn.Parameter(torch.zeros(rows))
                for (head, channel), value in channels.items():
                    self.bias.data[self.q_proj_shard_size + head * DIM + channel] = value

        def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
            return input_ @ self.weight.T + (0 if self.bias is None else self.bias), None

    class Attention(reading.RadixAttention):
        def __init__(self, layer_id: int):
            nn.Module.__init__(self)
            self.layer_id = layer_id

    layers = nn.ModuleList()
    for number, channels in biases.items():
        attention = nn.Module()
        attention.qkv_proj, attention.attn = Projection(channels), Attention(number)
        attention.rotary_emb = Rope()
        layer = nn.Module()
        layer.self_attn = attention
        layer.add_module(norm, Norm())
        layers.append(layer)
    return layers


def attention_of(model: nn.Module) -> Any:
    (layer,) = model.children()
    return layer.self_attn


def test_a_loaded_model(reading: Any):
    model = loaded(reading, {0: {(1, 2): 300.0}, 1: None, 5: {(0, 0): 120.0, (0, 4): -160.0, (2, 1): 30.0}})
    first, second = reading.heads_of(model, torch.float32, limit=14.0)
    assert (first.layer, first.head, second.layer, second.head) == (0, 1, 5, 0)
    assert (first.bias, second.bias) == pytest.approx((300, 200), abs=2)
    assert (first.spread, second.spread) == pytest.approx((6, 6), rel=0.15)
    assert not reading.heads_of(model, torch.float32, limit=60.0)


def test_a_qk_norm_makes_the_keys_that_count(reading: Any):
    model = loaded(reading, {0: {(1, 2): 300.0}})

    class Flat(nn.Module):
        def forward(self, k: torch.Tensor) -> torch.Tensor:
            return k * torch.tensor([1.0, 1, 0, 1, 1, 1, 1, 1])

    attention_of(model).k_norm = Flat()
    assert not reading.heads_of(model, torch.float32, limit=14.0)


def test_heads_are_those_of_the_whole_model(reading: Any):
    model = loaded(reading, {0: {(1, 2): 300.0}})
    projection = attention_of(model).qkv_proj
    projection.kv_tp_group = SimpleNamespace(rank_in_group=5, world_size=8)
    (found,) = reading.heads_of(model, torch.float32, limit=14.0)
    assert found.head == 5 * HEADS + 1
    projection.num_kv_head_replicas = 2
    (found,) = reading.heads_of(model, torch.float32, limit=14.0)
    assert found.head == 2 * HEADS + 1


def test_lora_wraps_the_projection(reading: Any):
    model = loaded(reading, {0: {(1, 2): 300.0}})
    wrapper = nn.Module()
    wrapper.base_layer = attention_of(model).qkv_proj
    attention_of(model).qkv_proj = wrapper
    assert len(reading.heads_of(model, torch.float32, limit=14.0)) == 1


def scheduler(model: object) -> Any:
    runner = SimpleNamespace(model=model, dtype=torch.float32)
    return SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda reading: loaded(reading, {0: {(0, 0): 300.0}}, norm="odd"), "has none of input_layernorm, ln_1"),
        (lambda reading: nn.Linear(2, 2), "Linear has no attention with a fused QKV projection"),
        (lambda reading: None, "AttributeError"),
    ],
)
def test_a_model_that_cannot_be_read_is_said_at_debug(make: Any, why: str, reading: Any, caplog: Any):
    with caplog.at_level(logging.DEBUG, logger=reading.__name__):
        assert reading.findings(scheduler(make(reading)), SimpleNamespace(key_bias_limit=14.0)) == []
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    assert why in record.getMessage()


def test_a_representation_that_bears_everything_looks_at_nothing(reading: Any, caplog: Any):
    with caplog.at_level(logging.DEBUG, logger=reading.__name__):
        assert reading.findings(None, SimpleNamespace(key_bias_limit=math.inf)) == []
    assert not caplog.records


def test_one_warning_for_all_ranks(reading: Any, monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []  # not `caplog`: an Engine of this process may have set logging up anew
    monkeypatch.setattr(reading.logger, "warning", lambda text, *arguments: said.append(text % arguments))
    heads = reading.findings(scheduler(loaded(reading, {3: {(1, 2): 300.0}})), registry.get("int8"))
    others = [(3, 4, 250.0, 6.0)]
    infos: list[dict[str, Any]] = [{reading.KEY: found} for found in (heads, others, heads)] + [{}, {reading.KEY: []}]
    reading.warn("int8", infos)
    (warning,) = said
    assert "in 1 layer(s), 2 KV head(s)" in warning
    assert not any(infos), "the launcher's record stays small"
    reading.warn("int8", infos)
    assert len(said) == 1


def test_findings_pass_through_the_data_parallel_controller(reading: Any):
    from hiqcache.sglang import choice, hooks

    asked = SimpleNamespace(**{choice._ATTRIBUTE: choice.Choice("int8", "a test", command_line=False)})
    replicas = [{reading.KEY: [(0, 1, 300.0, 6.0)]}, {}, {reading.KEY: [(0, 2, 200.0, 6.0)]}]
    controller = SimpleNamespace(server_args=asked, _scheduler_init_infos=replicas)
    info = hooks.after_controller_init_info({}, controller)
    assert info[reading.KEY] == [(0, 1, 300.0, 6.0), (0, 2, 200.0, 6.0)]


@pytest.mark.slow
def test_a_served_qwen2(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture):
    """Biases of 200 in 4 channels of one head in two of four layers, of 5 elsewhere: those two heads are warned of."""
    pytest.importorskip("sglang", reason="the extra `sglang` is not installed")
    import tiny_qwen2
    from serving import engine

    channels = (10, 20, 30, 60)
    biases = {(layer, 0, channel): 5.0 for layer in range(4) for channel in channels}
    biases |= {(layer, 2, channel): 200.0 for layer in (1, 3) for channel in channels}
    model = tiny_qwen2.make(tmp_path / "model", biases)
    with engine(
        model_path=str(model),
        skip_tokenizer_init=True,
        enable_hierarchical_cache=True,
        hicache_representation="int8",
        hicache_ratio=2,
        max_total_tokens=448,
        context_length=256,
        log_level="warning",
    ) as server:
        assert "hiqcache_key_biases" not in server.info()
    log = "".join(capfd.readouterr())
    assert log.count("this model has key biases") == 1
    said = re.search(
        r"in (\d+) layer\(s\), (\d+) KV head\(s\).* The worst is layer (\d), head (\d): (\S+) against", log
    )
    assert said is not None
    layers, heads, layer, head, bias = said.groups()
    assert (layers, heads, head) == ("2", "2", "2")
    assert layer in "13"
    assert float(bias) == pytest.approx(200, rel=0.02)
