"""The small model of `tiny_model`, as a Qwen2 with key biases."""

import json
import pathlib
from collections.abc import Mapping

import tiny_model
import torch
from safetensors.torch import load_file, save_file


def make(directory: pathlib.Path, key_biases: Mapping[tuple[int, int, int], float]) -> pathlib.Path:
    """Write config.json and weights.

    Queries are small in the RoPE pair of a biased channel, as in a trained model, so that the bias does not decide what
    attention looks at.

    Args:
        directory: where; created.
        key_biases: (layer, KV head, channel) -> bias; all others are 0. Channels have a standard deviation of about 1.
    """
    tiny_model.make(directory)
    weights = load_file(directory / "model.safetensors")
    for layer in range(tiny_model.LAYERS):
        for name in ("q_proj", "k_proj", "v_proj"):
            bias = torch.zeros(tiny_model.HEADS, tiny_model.HEAD_DIM)
            if name == "k_proj":
                for (at, head, channel), value in key_biases.items():
                    bias[head, channel] = value if at == layer else bias[head, channel]
            weights[f"model.layers.{layer}.self_attn.{name}.bias"] = bias.flatten().bfloat16()
    for (layer, head, channel), value in key_biases.items():
        queries = weights[f"model.layers.{layer}.self_attn.q_proj.weight"].unflatten(0, (tiny_model.HEADS, -1))
        half = tiny_model.HEAD_DIM // 2
        queries[head, [channel % half, channel % half + half]] /= max(1, abs(value))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = tiny_model.CONFIG | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory
