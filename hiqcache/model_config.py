"""The KV geometry of a model, from its Hugging Face config.json alone, as SGLang's `ModelConfig` derives it.

transformers is not imported, so a value that a config.json leaves to a default of transformers' is unknown here, unless
`_NESTED_DEFAULTS` has it, and reported as such. Models whose KV SGLang does not keep in one plain MHA pool are refused:
their figures would be wrong. SGLang itself tells some of these by its configuration classes, hiqcache by the fields
that such models state; whatever escapes both lists is still caught when it is served, by the check for the pool in
force.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hiqcache.geometry import HiqcacheError, KVGeometry, Violation

Fields = Mapping[str, Any]

_TEXT_CONFIGS = ("thinker_config", "llm_config", "language_config", "text_config")
"""Where multimodal models nest their language model; the first one present counts."""
_KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
"""Names for the number of KV heads, in the order in which SGLang tries them."""
_LOOPS = ("loop_num", "num_loops")
"""Names for how often the layers run in turn, each time with KV of its own."""
_KEY_BIASES = ("attention_bias", "qkv_bias", "add_qkv_bias", "use_qkv_bias", "use_bias", "bias")
"""Names for a switch that gives K, among others, a bias."""
_ALWAYS_BIASED = ("gpt2", "gpt_bigcode", "phi", "qwen", "qwen2")
"""Kinds of models with key biases and no switch; kinds named after one (`qwen2_5_vl`) follow it."""
_FALCON = ("falcon", "RefinedWeb", "RefinedWebModel")
_DTYPES = {"half": torch.float16, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""What `--dtype auto` makes of a config's dtype; float32 or none at all becomes float16, for Gemma bfloat16."""
_NESTED_DEFAULTS = {
    "gemma3_text": {
        "hidden_size": 2304,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
    },
}
"""transformers' defaults of nested language models; a model's config.json leaves out fields that equal them."""
_EXPLICIT = "give --layers, --heads and --head-dim instead of --config"

_PLAIN = "one K and one V for each head and token, in every layer alike"
_OTHER_KINDS = {
    "multi-head latent attention (MLA)": ("kv_lora_rank",),
    "compressed or sparse attention": ("compress_ratios", "index_topk", "sparse_attention_config"),
    "an encoder beside the decoder": ("is_encoder_decoder", "cross_attention_layers"),
    "layers that differ in KV heads": ("block_configs",),
}
"""Kinds of models without a plain MHA pool -> fields that only they set."""
_RECURRENT = (
    "attn_layer_period",
    "full_attention_interval",
    "full_attn_idxs",
    "hybrid_override_pattern",
    "layers_block_type",
    "linear_attn_config",
    "mamba_d_conv",
    "mamba_d_state",
    "mixer_types",
    "ssm_cfg",
    "state_size",
    "zaya_layers",
)
"""Fields of models with recurrent or linear-attention layers that do not list their `layer_types`."""
_ATTENTION_LAYERS = {"attention", "full_attention", "sliding_attention", "chunked_attention"}
HYBRID_SWA = {
    "BeamForCausalLM",
    "DeepseekV4ForCausalLM",
    "DeepseekV4ForCausalLMDSpark",
    "DeepseekV4ForCausalLMNextN",
    "DiffusionGemmaForBlockDiffusion",
    "EmbeddingGemma2Model",
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "GptOssForCausalLM",
    "GraniteMoeSWAForCausalLM",
    "GraniteSWAForCausalLM",
    "IQuestQ1ForCausalLM",
    "IQuestQ1MTP",
    "InklingForConditionalGeneration",
    "InklingForConditionalGenerationMTP",
    "LagunaForCausalLM",
    "Llama4ForConditionalGeneration",
    "MellumForCausalLM",
    "MiMoV2FlashForCausalLM",
    "MiMoV2ForCausalLM",
    "MiMoV2MTP",
    "MuseGlimmerForCausalLM",
    "MuseGlimmerForConditionalGeneration",
    "Step3p5ForCausalLM",
    "Step3p5MTP",
    "Step3p7ForConditionalGeneration",
    "UnlimitedOCRForCausalLM",
}
"""Architectures whose sliding-window layers SGLang gives a pool of their own (`is_hybrid_swa_model`)."""


class UnsupportedModel(HiqcacheError):
    """A model, or its division among ranks, that no host representation can serve.

    Attributes:
        violations: every rule broken, not only the first.
    """

    def __init__(self, violations: Iterable[Violation]):
        self.violations = tuple(violations)
        super().__init__("\n  - ".join(["model refused:", *map(str, self.violations)]))

    def __reduce__(self):
        return type(self), (self.violations,)


def geometry_from_config(path: str | Path, *, tp_size: int, page_size: int) -> KVGeometry:
    """What one tensor-parallel rank holds of a model's KV cache.

    Args:
        path: a config.json, or the folder that holds one.
        tp_size: ranks that the attention heads are divided among.
        page_size: tokens in a page.

    Raises:
        UnsupportedModel: no representation can serve this model, or not on this number of ranks.
        HiqcacheError: the file cannot be read, or does not state what is needed.
    """
    config = _read(Path(path))
    try:
        return _geometry(config, tp_size, page_size)
    except _Unstated as error:
        raise HiqcacheError(f"{path}: {error}; {_EXPLICIT}") from error


def key_biases(path: str | Path) -> str | None:
    """What of a config.json says that K has biases; None if nothing does.

    Args:
        path: a config.json, or the folder that holds one.

    Raises:
        HiqcacheError: the file cannot be read.
    """
    config = _read(Path(path))
    text = _text_config(config)
    for name in _KEY_BIASES:
        if text.get(name) is True:
            return f"{name} = true"
    kind = str(text.get("model_type", config.get("model_type")))
    if text.get("qkv_bias") is not False and any(
        kind == name or kind.startswith(f"{name}_") for name in _ALWAYS_BIASED
    ):
        return f"model_type = {kind}"
    return None


def local_kv_heads(heads: int, tp_size: int) -> int:
    """KV heads on each rank: divided among the ranks, or one of them repeated on several.

    Args:
        heads: KV heads of the whole model.
        tp_size: ranks that they are divided among.

    Raises:
        UnsupportedModel: neither number divides the other.
    """
    if max(heads, tp_size) % min(heads, tp_size):
        raise UnsupportedModel([_indivisible("KV heads", heads, tp_size, "a divisor or a multiple")])
    return max(1, heads // tp_size)


class _Unstated(ValueError):
    """A config.json lacks a field, or holds what the field cannot be."""


def _read(file: Path) -> Fields:
    try:
        if file.is_dir():
            file /= "config.json"
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise HiqcacheError(f"{file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise HiqcacheError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise HiqcacheError(f"{file} is not a Hugging Face config: it holds no JSON object")
    return config


def _geometry(config: Fields, tp_size: int, page_size: int) -> KVGeometry:
    text = _text_config(config)
    if text is not config:
        text = {**_NESTED_DEFAULTS.get(str(text.get("model_type")), {}), **text}
    violations = list(_other_caches(config, text))
    if violations:
        raise UnsupportedModel(violations)
    heads = _count(text, "num_attention_heads")
    if heads % tp_size:
        raise UnsupportedModel([_indivisible("attention heads", heads, tp_size, "a divisor")])
    head_dim = _head_dim(text, heads, nested=text is not config)
    return KVGeometry(
        layers=_count(text, "num_hidden_layers") * next((_count(text, name) for name in _LOOPS if name in text), 1),
        heads=local_kv_heads(_kv_heads(config, text, heads), tp_size),
        head_dim=head_dim,
        v_head_dim=_count(text, "v_head_dim") if text.get("v_head_dim") else head_dim,
        page_size=page_size,
        dtype=_kv_dtype(config, text),
        tp_size=tp_size,
    )


def _text_config(config: Fields) -> Fields:
    """The language model's part of a multimodal model's config; a text model's whole config."""
    for name in _TEXT_CONFIGS:
        nested = config.get(name)
        if isinstance(nested, dict):
            inner = nested.get("text_config") if name == "thinker_config" else None
            return inner if isinstance(inner, dict) else nested
    return config


def _other_caches(config: Fields, text: Fields) -> Iterator[Violation]:
    """Everything about a model that keeps its KV out of one plain MHA pool."""

    def refuse(kind: str, seen: str, flag: str = "the model") -> Violation:
        return Violation(rule=f"a model with {kind}", seen=seen, allowed=_PLAIN, flag=flag)

    def stated(names: Iterable[str]) -> list[str]:
        found = {name: value for name in names if (value := text.get(name, config.get(name)))}
        return [name if isinstance(value, list | dict) else f"{name} = {value}" for name, value in found.items()]

    for kind, names in _OTHER_KINDS.items():
        for seen in stated(names):
            yield refuse(kind, seen)
    if layer_types := _strings(text.get("layer_types")):
        recurrent = sorted(layer_types - _ATTENTION_LAYERS)
    else:
        recurrent = stated(_RECURRENT)
    if recurrent:
        yield refuse("recurrent or linear-attention layers", ", ".join(recurrent))
    windowed = sorted(_strings(config.get("architectures")) & HYBRID_SWA)
    if windowed or (windowed := stated(("is_hybrid_swa", "hybrid_layer_pattern"))):
        flag = "--disable-hybrid-swa-memory, for models with equal layers"
        yield refuse("sliding-window layers in a pool of their own", ", ".join(windowed), flag)


def _kv_heads(config: Fields, text: Fields, heads: int) -> int:
    grouped_falcon = config.get("model_type") in _FALCON and config.get("new_decoder_architecture")
    if text.get("multi_query") and not grouped_falcon:
        return 1
    for name in _KV_HEADS:
        if text.get(name) is not None:
            return _count(text, name)
    if text is not config and "num_key_value_heads" not in text:
        raise _Unstated(_left_out("num_key_value_heads"))
    return heads


def _head_dim(text: Fields, heads: int, *, nested: bool) -> int:
    if text.get("head_dim") is not None:
        return _count(text, "head_dim")
    if nested and "head_dim" not in text:
        raise _Unstated(_left_out("head_dim"))
    width = _count(text, "hidden_size")
    if width < heads:
        raise _Unstated(f"hidden_size {width} is less than num_attention_heads {heads}")
    return width // heads


def _kv_dtype(config: Fields, text: Fields) -> torch.dtype:
    """Element type of the device pool under `--dtype auto` and `--kv-cache-dtype auto`."""
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict) and str(quantization.get("quant_method")).startswith("modelopt"):
        scheme = quantization.get("kv_cache_scheme")
        if isinstance(scheme, dict):
            fp8 = scheme.get("type") == "float" and scheme.get("num_bits") == 8
        else:
            fp8 = str(quantization.get("kv_cache_quant_algo")).upper() == "FP8"
        if fp8:
            return torch.float8_e4m3fn
    names = (fields.get(name) for fields in (text, config) for name in ("dtype", "torch_dtype"))
    name = str(next(filter(None, names), None))
    gemma = str(text.get("model_type")).startswith("gemma")
    return _DTYPES.get(name, torch.bfloat16 if gemma else torch.float16)


def _count(fields: Fields, name: str) -> int:
    value = fields.get(name)
    if value is None:
        raise _Unstated(f"{name} is not stated")
    if type(value) is not int or value < 1:  # a bool is an int, but no count
        raise _Unstated(f"{name} is {value!r}, not a positive whole number")
    return value


def _left_out(name: str) -> str:
    # A nested config is saved without the values that equal its class's defaults.
    return f"{name} of the nested language model is not stated, and only transformers knows its default"


def _strings(value: object) -> set[str]:
    return {item for item in value if isinstance(item, str)} if isinstance(value, list) else set()


def _indivisible(what: str, count: int, tp_size: int, allowed: str) -> Violation:
    seen = f"{count} among {tp_size}"
    return Violation(rule=f"{what} divided among ranks", seen=seen, allowed=f"{allowed} of {count}", flag="--tp-size")
