"""What the tools that drive real SGLang servers share: a model's shape, the launch and provenance."""

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch

from hiqcache.sglang import cpu

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # tests/serving.py starts servers for the tools too

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 36,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def end_servers_on_sigterm() -> None:
    """Make SIGTERM what Ctrl-C is: contexts are left, and servers with them."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def write_model(directory: pathlib.Path, config: dict[str, Any]) -> pathlib.Path:
    """A folder that SGLang serves with random weights (`--load-format dummy`): config.json and a tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return write_tokenizer(directory, config["vocab_size"])


def write_tokenizer(directory: pathlib.Path, vocabulary: int) -> pathlib.Path:
    """Put a tokenizer that needs no download into a model's folder.

    Every token id is a word of its own, "w0", "w1" and so on: each generated token is text at once, so that a client
    sees when it came.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{token}": token for token in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return directory


def launch(
    model: pathlib.Path,
    port: int,
    *,
    l1_tokens: int,
    page_size: int,
    memory: float,
    prefill_graphs: Sequence[int] = (),
    attention: str = "triton",
    arguments: Sequence[str] = (),
) -> list[str]:
    """The command of a server with L1 pinned, on this machine's GPU or, if it has none, its CPU.

    Args:
        model: folder of the model.
        port: where to listen.
        l1_tokens: `--max-total-tokens`.
        page_size: `--page-size`.
        memory: `--mem-fraction-static`; of what is free when the server starts, servers side by side leave the rest.
        prefill_graphs: numbers of new tokens to capture CUDA graphs of prefills for, on a GPU. SGLang's own list takes
            minutes to capture.
        attention: `--attention-backend` on a GPU.
        arguments: what else to say.
    """
    words = ["--model-path", str(model), "--port", str(port), "--max-total-tokens", str(l1_tokens)]
    words += ["--page-size", str(page_size), *arguments]
    if not torch.cuda.is_available():
        return cpu.command_line(words)
    words += ["--attention-backend", attention, "--sampling-backend", "pytorch", "--mem-fraction-static", str(memory)]
    if prefill_graphs:
        words += ["--cuda-graph-bs-prefill", *map(str, prefill_graphs)]
    else:
        words += ["--cuda-graph-backend-prefill", "disabled"]
    return [sys.executable, "-m", "sglang.launch_server", *words]


def provenance(command: str) -> dict[str, Any]:
    """What a result file says of where it came from: command, hardware, versions, and parts that are not SGLang's."""
    return {
        "command": command,
        "hardware": _hardware(),
        "versions": {name: importlib.metadata.version(name) for name in ("hiqcache", "sglang", "torch", "triton")},
        "replaced": _replaced(),
    }


def _hardware() -> str:
    if not torch.cuda.is_available():
        return f"CPU, {os.cpu_count()} cores"
    # torch would make a CUDA context in this process to tell.
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    names = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    return ", ".join(names)


def _replaced() -> list[str]:
    """Parts of SGLang that something else stands in for on this machine."""
    found = []
    spec = importlib.util.find_spec("sgl_kernel")
    folder = None if spec is None or spec.origin is None else pathlib.Path(spec.origin).parent
    if not torch.cuda.is_available():
        found.append("kernels: SGLang's CPU engine on PyTorch's CPU kernels")
    elif folder is None or not any(folder.rglob("*.so")):
        found.append("sgl_kernel: norms and activations in plain PyTorch, for every configuration alike")
    if os.environ.get("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND") == "python":
        found.append("radix tree: SGLang's Python one instead of its Rust one")
    return found
