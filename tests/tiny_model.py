"""A Llama of random weights, small enough that serving it on two CPU cores takes no time worth mentioning."""

import json
import pathlib
from collections.abc import Iterable

import torch
from safetensors.torch import save_file

LAYERS, HEADS, HEAD_DIM = 4, 3, 64
HIDDEN, INNER, VOCABULARY = HEADS * HEAD_DIM, 256, 1024

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def make(directory: pathlib.Path) -> pathlib.Path:
    """Write config.json and weights; serve with `skip_tokenizer_init` unless a tokenizer is added."""
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) / columns**0.5).bfloat16()

    weights = {"model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN) * HIDDEN**0.5}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weights[f"{prefix}.self_attn.{name}.weight"] = matrix(HIDDEN, HIDDEN)
        weights[f"{prefix}.mlp.gate_proj.weight"] = matrix(INNER, HIDDEN)
        weights[f"{prefix}.mlp.up_proj.weight"] = matrix(INNER, HIDDEN)
        weights[f"{prefix}.mlp.down_proj.weight"] = matrix(HIDDEN, INNER)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{name}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    weights["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    weights["lm_head.weight"] = matrix(VOCABULARY, HIDDEN) * 8
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def add_tokenizer(directory: pathlib.Path, texts: Iterable[str]) -> pathlib.Path:
    """Write a tokenizer that has a token for each word of `texts`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = dict.fromkeys(word for text in texts for word in text.split())
    vocabulary = {"?": 0} | {word: number for number, word in enumerate(words, start=1)}
    assert len(vocabulary) <= VOCABULARY
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return directory
