"""Serve with encoded host pools on a GPU and check every byte that moves, and SGLang's own counters.

    python tools/check_serving.py --out docs/results/check-serving.json

Starts real SGLang servers side by side on one GPU (random weights in Qwen3-8B's KV shape: 36 layers, 8 KV heads x
128), each with another page size, host layout and representation. A probe inside each scheduler encodes what is backed
up and decodes what is restored with the representation's plain-PyTorch code on the CPU and compares byte for byte.
Exits with status 1 if a byte differs, nothing was restored, or a counter is not the format's arithmetic.
"""

import importlib.metadata
import json
import pathlib
import random
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click
import requests
import torch
from attrs import asdict, frozen

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from serving import PROBE, environment, events, free_port, http, pip_install  # noqa: E402

VOCABULARY = 4096
LAYERS = 36
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}


@frozen
class Case:
    """One server."""

    representation: str
    page_size: int
    layout: str
    sizing: tuple[str, str]
    l1_tokens: int = 8192

    @property
    def bytes_per_token(self) -> int:
        """From the formats' definition: 8 x 128 INT8, 8 BF16 scales, padded to 128 bytes; or 8 x 128 BF16."""
        return 2 * LAYERS * {"int8": 1152, "bf16": 2048}[self.representation]

    @property
    def host_tokens(self) -> int:
        """SGLang's rule, and one page."""
        flag, value = self.sizing
        if flag == "--hicache-size":
            wanted = int(value) * 1_000_000_000 // self.bytes_per_token
        else:
            wanted = int(self.l1_tokens * float(value))
        return (wanted // self.page_size + 1) * self.page_size


CASES = (
    Case("int8", 1, "page_first", ("--hicache-size", "8")),
    Case("int8", 64, "page_first", ("--hicache-ratio", "3")),
    Case("int8", 1, "layer_first", ("--hicache-ratio", "3")),
    Case("int8", 64, "layer_first", ("--hicache-ratio", "3")),
    Case("bf16", 64, "page_first", ("--hicache-ratio", "3")),
)


def metric(text: str, name: str) -> float:
    """Sum of a counter over its label sets on a `/metrics` page."""
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.M))


def run(case: Case, model: pathlib.Path, probe: pathlib.Path, scratch: pathlib.Path) -> dict[str, Any]:
    """Serve, fill, evict, restore; what was seen."""
    name = f"{case.representation}-{case.page_size}-{case.layout}"
    file, port = scratch / f"{name}.jsonl", free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port)]
    command += ["--skip-tokenizer-init", "--load-format", "dummy", "--attention-backend", "triton"]
    command += ["--sampling-backend", "pytorch", "--mem-fraction-static", "0.12", "--max-total-tokens"]
    command += [str(case.l1_tokens), "--page-size", str(case.page_size), "--cuda-graph-backend-prefill", "disabled"]
    command += ["--enable-metrics", "--enable-hierarchical-cache", "--hicache-mem-layout", case.layout, *case.sizing]
    command += ["--hicache-representation", case.representation, "--context-length", "4096"]
    variables = environment(HIQCACHE_PROBE=file)
    variables["PYTHONPATH"] = f"{variables.get('PYTHONPATH', '')}:{probe}"
    rng = random.Random(0)
    prompts = [[rng.randrange(10, VOCABULARY) for _ in range(1500 + 7 * number)] for number in range(8)]
    with http(command, scratch / f"{name}.log", port, variables) as server:
        for prompt in prompts:
            server.generate([prompt])
        restored = [server.generate([prompt])[0] for prompt in prompts[:4]]
        page = requests.get(f"{server.url}/metrics", timeout=30).text
        (report,) = server.info()["hiqcache"]
    seen = events(file)
    backups = [event for event in seen if event["event"] == "backup"]
    restores = [event for event in seen if event["event"] == "restore"]
    found = {
        **asdict(case),
        "report": report,
        "restored_tokens": [answer.from_host for answer in restored],
        "backup_tokens": sum(event["tokens"] for event in backups),
        "backup_wrong_bytes": sum(event["wrong_bytes"] for event in backups),
        "restore_tokens": sum(event["tokens"] for event in restores) // LAYERS,
        "restore_wrong_values": sum(event["wrong_values"] for event in restores),
        "host_total_tokens": metric(page, "sglang:hicache_host_total_tokens"),
        "backup_bytes_per_token": metric(page, "sglang:hicache_backup_bytes_total")
        / max(1, metric(page, "sglang:hicache_backup_tokens_total")),
        "load_back_bytes_per_token": metric(page, "sglang:load_back_bytes_total")
        / max(1, metric(page, "sglang:load_back_tokens_total")),
    }
    whole = [(len(prompt) - 1) // case.page_size * case.page_size for prompt in prompts[:4]]
    found["passed"] = (
        found["backup_wrong_bytes"] == found["restore_wrong_values"] == 0
        and found["restored_tokens"] == whole
        and found["restore_tokens"] >= sum(whole)
        and found["backup_bytes_per_token"] == found["load_back_bytes_per_token"] == case.bytes_per_token
        and found["host_total_tokens"] == report["tokens"] == case.host_tokens
    )
    return found


@click.command(help=__doc__)
@click.option("--out", required=True, type=click.Path(path_type=pathlib.Path), help="JSON file to write.")
def main(out: pathlib.Path) -> None:
    with tempfile.TemporaryDirectory() as directory:
        scratch = pathlib.Path(directory)
        model = scratch / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(CONFIG))
        probe = pip_install(PROBE, scratch / "probe")

        def attempt(case: Case) -> dict[str, Any]:
            try:
                return run(case, model, probe, scratch)
            except Exception as error:
                return {**asdict(case), "passed": False, "error": f"{type(error).__name__}: {error}"}

        with ThreadPoolExecutor(len(CASES)) as pool:
            found = list(pool.map(attempt, CASES))
    result = {
        "what": "bytes backed up and restored by real SGLang servers against the reference codec",
        "command": "python tools/check_serving.py",
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": {name: importlib.metadata.version(name) for name in ("hiqcache", "sglang", "torch", "triton")},
        "cases": found,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    for case in found:
        click.echo(json.dumps(case))
    sys.exit(0 if all(case["passed"] for case in found) else 1)


if __name__ == "__main__":
    main()
