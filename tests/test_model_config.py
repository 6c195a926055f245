"""Geometry from a config.json, as SGLang would derive it; models without a plain MHA pool are refused."""

import ast
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from hiqcache.geometry import HiqcacheError, KVGeometry
from hiqcache.model_config import _NESTED_DEFAULTS, HYBRID_SWA, UnsupportedModel, geometry_from_config, local_kv_heads

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
}
GEMMA3_27B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 5376,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
    },
    "vision_config": {"num_hidden_layers": 27, "num_attention_heads": 16, "hidden_size": 1152},
}


@pytest.fixture
def geometry_of(tmp_path):
    """A config's fields -> the geometry of one rank."""

    def write_and_read(config: object, tp_size: int = 1, page_size: int = 1) -> KVGeometry:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return geometry_from_config(tmp_path, tp_size=tp_size, page_size=page_size)

    return write_and_read


def without(config: dict, *names: str) -> dict:
    return {name: value for name, value in config.items() if name not in names}


def test_a_file_or_its_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    expected = KVGeometry(layers=36, heads=4, head_dim=128, v_head_dim=128, page_size=16, tp_size=2)
    for path in (tmp_path, str(tmp_path), tmp_path / "config.json"):
        assert geometry_from_config(path, tp_size=2, page_size=16) == expected


@pytest.mark.parametrize(
    ("config", "layers", "heads", "head_dim"),
    [
        (QWEN3_8B, 36, 8, 128),
        (MISTRAL_7B, 32, 8, 128),  # 4096 / 32: no head_dim stated
        ({**MISTRAL_7B, "head_dim": None}, 32, 8, 128),
        ({**MISTRAL_7B, "hidden_size": 5120, "head_dim": 128}, 32, 8, 128),
        (without(MISTRAL_7B, "num_key_value_heads"), 32, 32, 128),  # Llama 1: as many KV heads as attention heads
        ({**MISTRAL_7B, "num_key_value_heads": None}, 32, 32, 128),
        (GEMMA3_27B, 62, 16, 128),
        ({**GEMMA3_27B, "thinker_config": {"text_config": QWEN3_8B}}, 36, 8, 128),
        ({"thinker_config": QWEN3_8B}, 36, 8, 128),
        ({"llm_config": QWEN3_8B}, 36, 8, 128),
        ({**MISTRAL_7B, "num_kv_heads": 4}, 32, 4, 128),  # Falcon's name comes before Llama's
        ({**MISTRAL_7B, "multi_query": True}, 32, 1, 128),
        ({**MISTRAL_7B, "multi_query": True, "model_type": "falcon", "new_decoder_architecture": True}, 32, 8, 128),
        ({**MISTRAL_7B, "num_loops": 2}, 64, 8, 128),
    ],
)
def test_the_fields_that_sglang_reads(geometry_of, config, layers, heads, head_dim):
    geometry = geometry_of(config)
    assert (geometry.layers, geometry.heads, geometry.head_dim) == (layers, heads, head_dim)
    assert geometry.v_head_dim == head_dim


@pytest.mark.parametrize(("v_head_dim", "expected"), [(64, 64), (0, 128), (None, 128)])
def test_v_may_be_narrower(geometry_of, v_head_dim, expected):
    assert geometry_of({**QWEN3_8B, "v_head_dim": v_head_dim}).v_head_dim == expected


@pytest.mark.parametrize(("tp_size", "heads"), [(1, 8), (2, 4), (4, 2), (8, 1), (16, 1), (32, 1)])
def test_heads_are_divided_or_repeated(geometry_of, tp_size, heads):
    geometry = geometry_of(QWEN3_8B, tp_size)
    assert (geometry.heads, geometry.tp_size) == (heads, tp_size)
    assert local_kv_heads(8, tp_size) == heads


def test_indivisible_heads_are_refused(geometry_of):
    with pytest.raises(UnsupportedModel, match=r"32 among 3; allowed: a divisor of 32.*--tp-size"):
        geometry_of(QWEN3_8B, tp_size=3)
    for tp_size in (3, 5, 12):
        with pytest.raises(UnsupportedModel, match=rf"8 among {tp_size}; allowed: a divisor or a multiple of 8"):
            local_kv_heads(8, tp_size)
    with pytest.raises(UnsupportedModel, match="KV heads divided among ranks: saw 6 among 4"):
        geometry_of({**QWEN3_8B, "num_key_value_heads": 6}, tp_size=4)


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "float16"}, torch.float16),
        ({"dtype": "float32"}, torch.float16),
        ({}, torch.float16),
        ({"model_type": "gemma", "dtype": "float32"}, torch.bfloat16),
        ({"quantization_config": {"quant_method": "awq"}, "dtype": "bfloat16"}, torch.bfloat16),
        ({"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}}, torch.float8_e4m3fn),
        (
            {"quantization_config": {"quant_method": "modelopt", "kv_cache_scheme": {"type": "float", "num_bits": 8}}},
            torch.float8_e4m3fn,
        ),
    ],
)
def test_the_element_type_is_what_auto_makes_of_it(geometry_of, fields, dtype):
    assert geometry_of({**without(QWEN3_8B, "torch_dtype"), **fields}).dtype == dtype


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"kv_lora_rank": 512}, "multi-head latent attention (MLA): saw kv_lora_rank = 512"),
        ({"text_config": {**QWEN3_8B, "kv_lora_rank": 512}}, "multi-head latent attention (MLA)"),
        ({"index_topk": 2048}, "compressed or sparse attention"),
        (
            {"layer_types": ["full_attention", "linear_attention"]},
            "recurrent or linear-attention layers: saw linear_attention",
        ),
        ({"full_attention_interval": 4}, "recurrent or linear-attention layers"),
        ({"hybrid_override_pattern": "M-M*"}, "recurrent or linear-attention layers"),
        ({"architectures": ["MambaForCausalLM"], "state_size": 16}, "recurrent or linear-attention layers"),
        ({"is_encoder_decoder": True}, "an encoder beside the decoder"),
        (
            {"architectures": ["GptOssForCausalLM"]},
            "sliding-window layers in a pool of their own: saw GptOssForCausalLM",
        ),
        ({"architectures": ["Gemma4ForCausalLM"]}, "sliding-window layers in a pool of their own"),
        ({"hybrid_layer_pattern": [0, 1]}, "sliding-window layers in a pool of their own"),
        ({"block_configs": [{}]}, "layers that differ in KV heads"),
    ],
)
def test_models_without_a_plain_pool_are_refused(geometry_of, fields, kind):
    with pytest.raises(UnsupportedModel, match="model refused") as caught:
        geometry_of({**QWEN3_8B, **fields})
    (violation,) = caught.value.violations
    assert f"a model with {kind}" in str(violation)
    assert str(violation) in str(caught.value)


def test_every_reason_is_given_even_where_no_head_count_is(geometry_of):
    config = {"architectures": ["GptOssForCausalLM"], "kv_lora_rank": 512, "state_size": 16}
    with pytest.raises(UnsupportedModel) as caught:
        geometry_of(config)
    assert len(caught.value.violations) == 3


@pytest.mark.parametrize(
    "fields",
    [
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4096},
        {"layer_types": ["attention"], "mamba_d_state": 128},  # Granite 4.0 without its Mamba layers
        {"kv_lora_rank": None, "is_encoder_decoder": False, "linear_attn_config": None},
    ],
)
def test_fields_that_change_nothing(geometry_of, fields):
    assert geometry_of({**QWEN3_8B, **fields}) == geometry_of(QWEN3_8B)


def test_the_sliding_window_models_are_sglangs():
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        pytest.skip("sglang is not installed")
    tree = ast.parse((Path(spec.origin).parent / "srt/configs/model_config.py").read_text())
    names, scope = ("MIMO_V2_MODEL_ARCHS", "SWA_SINK_ARCHS", "hybrid_swa_archs"), {"frozenset": frozenset}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in names:
            exec(ast.unparse(node), scope)
    assert scope["hybrid_swa_archs"] == HYBRID_SWA


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
@pytest.mark.parametrize("value", ["absent", None, 0, -8, 8.0, "8", True, [8]])
def test_what_is_not_stated_is_not_guessed(geometry_of, name, value):
    config = without(MISTRAL_7B, name) if value == "absent" else {**MISTRAL_7B, name: value}
    with pytest.raises(HiqcacheError, match=f"{name} is .*give --layers, --heads and --head-dim instead"):
        geometry_of(config)


@pytest.mark.parametrize("name", ["head_dim", "num_key_value_heads"])
def test_a_nested_model_may_leave_out_what_only_transformers_knows(geometry_of, name):
    text = without(GEMMA3_27B["text_config"], name) | {"model_type": "another_text"}
    with pytest.raises(HiqcacheError, match=f"{name} of the nested language model is not stated"):
        geometry_of({**GEMMA3_27B, "text_config": text})


@pytest.mark.parametrize(
    ("stated", "layers", "heads"),
    [  # what google/gemma-3-4b-it and google/gemma-3-12b-it state of their language models
        ({"hidden_size": 2560, "num_hidden_layers": 34}, 34, 4),
        ({"hidden_size": 3840, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8}, 48, 8),
    ],
)
def test_gemma_3_leaves_out_what_its_class_defaults_to(geometry_of, stated, layers, heads):
    """As for the width of a head: 3840 / 16 = 240 would be wrong."""
    text = {"model_type": "gemma3_text", "sliding_window": 1024, **stated}
    geometry = geometry_of({**GEMMA3_27B, "text_config": text})
    assert (geometry.layers, geometry.heads, geometry.head_dim) == (layers, heads, 256)


def test_the_defaults_are_those_of_transformers():
    auto = pytest.importorskip("transformers", reason="needs the sglang extra").CONFIG_MAPPING
    for model_type, defaults in _NESTED_DEFAULTS.items():
        config = auto[model_type]()
        assert {name: getattr(config, name) for name in defaults} == defaults


GEMMA2_9B = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "cache_implementation": "hybrid",
    "hidden_size": 3584,
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "sliding_window": 4096,
    "torch_dtype": "float32",
}


def test_gemma_2(geometry_of):
    expected = KVGeometry(
        layers=42, heads=8, head_dim=256, v_head_dim=256, page_size=1, dtype=torch.bfloat16, tp_size=1
    )
    assert geometry_of(GEMMA2_9B) == expected


@pytest.mark.parametrize("content", ["", "{", "[1]", "7", '"text"', "null", "\x00", "[" * 100_000])
def test_a_file_that_is_no_config(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(HiqcacheError, match=r"config\.json is not (JSON|a Hugging Face config)"):
        geometry_from_config(tmp_path, tp_size=1, page_size=1)


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{\x80")
    with pytest.raises(HiqcacheError, match="is not JSON"):
        geometry_from_config(tmp_path, tp_size=1, page_size=1)


@pytest.mark.parametrize("path", ["nowhere", ".", "x" * 1000], ids=["absent", "empty folder", "too long"])
def test_a_path_that_cannot_be_read(tmp_path, path):
    with pytest.raises(HiqcacheError, match=r"No such file|too long"):
        geometry_from_config(tmp_path / path, tp_size=1, page_size=1)


def test_heads_without_width(tmp_path):
    """hidden_size // heads would be 0."""
    (tmp_path / "config.json").write_text('{"num_attention_heads": 64, "hidden_size": 32, "num_hidden_layers": 1}')
    with pytest.raises(HiqcacheError, match="hidden_size 32 is less than num_attention_heads 64; give --layers"):
        geometry_from_config(tmp_path, tp_size=1, page_size=1)


def test_a_nested_config_that_is_none(tmp_path):
    (tmp_path / "config.json").write_text('{"thinker_config": {"text_config": [1]}}')
    with pytest.raises(HiqcacheError, match="num_attention_heads is not stated"):
        geometry_from_config(tmp_path, tp_size=1, page_size=1)
