"""The small model of `tiny_model` as a Gemma 3: three of its four layers attend to a sliding window only."""

import json
import pathlib

import tiny_model
import torch
from safetensors.torch import load_file, save_file

WINDOW = 32

CONFIG = tiny_model.CONFIG | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "layer_types": ["sliding_attention"] * (tiny_model.LAYERS - 1) + ["full_attention"],
    "sliding_window": WINDOW,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": tiny_model.HEAD_DIM,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def make(directory: pathlib.Path) -> pathlib.Path:
    """Write config.json and weights."""
    weights = load_file(tiny_model.make(directory) / "model.safetensors")
    del weights["lm_head.weight"]
    # A norm multiplies by 1 + weight.
    weights |= {name: torch.zeros_like(weight) for name, weight in weights.items() if name.endswith("norm.weight")}
    for layer in range(tiny_model.LAYERS):
        prefix = f"model.layers.{layer}"
        for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            weights[f"{prefix}.{name}.weight"] = torch.zeros(tiny_model.HIDDEN, dtype=torch.bfloat16)
        for name in ("q_norm", "k_norm"):
            weights[f"{prefix}.self_attn.{name}.weight"] = torch.zeros(tiny_model.HEAD_DIM, dtype=torch.bfloat16)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory
