"""Key biases: which channels are found, what a server logs, and what dividing them gains."""

import importlib
import json
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
from hiqcache.backends.int8 import Int8
from hiqcache.exponents import MOST, KeyExponents
from hiqcache.geometry import KVGeometry
from hiqcache.key_biases import PAGE, amplitudes, exponents

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


def test_exponents_bring_a_biased_channel_to_the_size_of_the_others():
    spread = torch.tensor([[1.0, 1.0, 2.0, 0.5, 1.0, 1.0, 0.0, 1.0]])
    amplitude = torch.tensor([[0.0, 3.0, 600.0, 150.0, 12.0, 4.0, 96.0, 2.0**40]])
    # log2 of 0, 1, 100, 100, 4, 4/3, 32 (a spread of 0 counts as the median, 1), and the largest there is.
    assert exponents(amplitude, spread).tolist() == [[0, 0, 7, 7, 2, 0, 5, MOST]]
    assert not exponents(torch.zeros(2, 8), torch.zeros(2, 8)).any()


def test_which_representations_want_them():
    assert [name for name in ("bf16", "int4", "int8", "k6v4") if not registry.get(name).scales_keys] == ["bf16"]
    page, _, anchor = PAGE.partition("#")
    assert re.search(rf"^#+ {anchor.replace('-', ' ')}$", (REPOSITORY / page).read_text(), re.MULTILINE | re.IGNORECASE)


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
        f"K has biases in this model ({seen}). If they are large, a server divides their channels by powers of two for "
        f"int4, int8, k6v4. Figures: {PAGE}"
    )
    assert lines == ([expected] if seen else [])
    assert json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)["key_biases"] == seen


def test_capacity_says_nothing_of_what_is_refused_or_unknown(tmp_path: pathlib.Path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_5_7B))
    one_head = CliRunner().invoke(
        main, ["capacity", "--config", str(tmp_path), "--tp-size", "4", "--hicache-size", "8"]
    )
    assert "powers of two for int4, k6v4." in one_head.stdout, "int8 would save nothing"
    unknown = ["--layers", "28", "--heads", "4", "--head-dim", "128"]
    result = CliRunner().invoke(main, ["capacity", *unknown, "--hicache-size", "8"])
    assert result.exit_code == 0
    assert "biases" not in result.stdout


# -- the figures -----------------------------------------------------------------------------------------------------


def test_no_bias_costs_more_than_half_again_with_exponents():
    for name in ("int8", "k6v4", "int4"):
        for place in ("low", "random"):
            without, *biased = RESULT["errors"][name][place]
            assert max(biased) < 1.6 * without, (name, place)
            assert RESULT["errors"][f"{name} without exponents"][place][-1] > 10 * without


def test_the_page_has_the_results_table():
    table = importlib.import_module("key_biases").markdown(RESULT)
    assert table in (REPOSITORY / "docs/quality.md").read_text(), f"the table should read:\n{table}"


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


def of_rank(layers: int) -> KVGeometry:
    return KVGeometry(layers=layers, heads=HEADS, head_dim=DIM, v_head_dim=DIM, page_size=16)


def test_a_loaded_model(reading: Any):
    model = loaded(reading, {0: {(1, 2): 300.0}, 1: None, 2: {(0, 0): 120.0, (0, 4): -160.0, (2, 1): 30.0}})
    found = reading.exponents_of(model, torch.float32, of_rank(3), 0).values
    expected = torch.zeros(3, HEADS, DIM, dtype=torch.int8)
    expected[0, 1, [2, 6]] = 4  # 300 / 18 is 16.7, for both channels of the RoPE pair
    expected[2, 0, [0, 4]] = 3  # 200 / 18 is 11.1, nearest to 8 by its logarithm
    expected[2, 2, [1, 5]] = 1  # 30 / 18
    assert torch.equal(found, expected)


def test_layers_of_a_pipeline_stage_are_numbered_from_its_first(reading: Any):
    model = loaded(reading, {4: None, 5: {(1, 2): 300.0}})
    assert reading.exponents_of(model, torch.float32, of_rank(2), 4).values[1, 1, 2] == 4


def test_a_qk_norm_makes_the_keys_that_count(reading: Any):
    model = loaded(reading, {0: {(1, 2): 300.0}})

    class Flat(nn.Module):
        def forward(self, k: torch.Tensor) -> torch.Tensor:
            return k * torch.tensor([1.0, 1, 0, 1, 1, 1, 1, 1])

    attention_of(model).k_norm = Flat()
    assert not reading.exponents_of(model, torch.float32, of_rank(1), 0).any


def test_lora_wraps_the_projection(reading: Any):
    model = loaded(reading, {0: {(1, 2): 300.0}})
    wrapper = nn.Module()
    wrapper.base_layer = attention_of(model).qkv_proj
    attention_of(model).qkv_proj = wrapper
    assert reading.exponents_of(model, torch.float32, of_rank(1), 0).any


class Pool:
    """A host pool, as far as exponents go."""

    def __init__(self, name: str = "int8", layers: int = 1):
        self.representation = registry.get(name)(of_rank(layers))
        self.key_exponents = KeyExponents.none(of_rank(layers))

    def scale_keys(self, exponents: KeyExponents) -> None:
        self.key_exponents = exponents


def runner(model: object) -> Any:
    return SimpleNamespace(model=model, dtype=torch.float32, token_to_kv_pool=SimpleNamespace(start_layer=0))


@pytest.fixture
def said(reading: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged; not by `caplog`, for an Engine of this process may have set logging up anew."""
    lines: list[str] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(reading.logger, level, lambda text, *arguments: lines.append(text % arguments))
    return lines


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda reading: loaded(reading, {0: {(0, 0): 300.0}}, norm="odd"), "has none of input_layernorm, ln_1"),
        (lambda reading: nn.Linear(2, 2), "Linear has no attention with a fused QKV projection"),
        (lambda reading: None, "AttributeError"),
    ],
)
def test_a_model_that_cannot_be_read_is_warned_of(make: Any, why: str, reading: Any, said: list[str]):
    pool = Pool()
    reading.scale(runner(make(reading)), pool)
    (line,) = said
    assert why in line
    assert not pool.key_exponents.any


def test_a_representation_that_bears_everything_looks_at_nothing(reading: Any, said: list[str]):
    reading.scale(None, Pool("bf16"))
    assert not said


def test_one_line_for_all_ranks(reading: Any, said: list[str]):
    pool = Pool(layers=2)
    reading.scale(runner(loaded(reading, {0: None, 1: {(1, 2): 300.0, (2, 1): 30.0}})), pool)
    found = reading.findings(pool)
    assert found == [(1, 2, 4)]
    infos: list[dict[str, Any]] = [{reading.KEY: each} for each in (found, [(0, 1, 3)], found)] + [
        {},
        {reading.KEY: []},
    ]
    reading.tell(infos)
    (line,) = said
    assert "in 2 layer(s) channels are divided by powers of two, up to 16" in line
    assert not any(infos), "the launcher's record stays small"
    reading.tell(infos)
    assert len(said) == 1


def test_findings_pass_through_the_data_parallel_controller(reading: Any):
    from hiqcache.sglang import choice, hooks

    asked = SimpleNamespace(**{choice._ATTRIBUTE: choice.Choice("int8", "a test", command_line=False)})
    replicas = [{reading.KEY: [(0, 1, 4)]}, {}, {reading.KEY: [(3, 2, 5)]}]
    controller = SimpleNamespace(server_args=asked, _scheduler_init_infos=replicas)
    info = hooks.after_controller_init_info({}, controller)
    assert info[reading.KEY] == [(0, 1, 4), (3, 2, 5)]
