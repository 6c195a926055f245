"""Serve with encoded host pools on a GPU and check every byte that moves, and SGLang's own counters.

\b
    python tools/check_serving.py --out docs/results/check-serving.json
    python tools/check_serving.py --tp 2 --out docs/results/check-serving-tp2.json   # on two GPUs

Starts real SGLang servers side by side (random weights in Qwen3-8B's KV shape: 36 layers, 8 KV heads x 128; some with
so few KV heads that each rank has one), each with another page size, host layout and representation. A probe inside
each scheduler, so on each tensor-parallel rank, encodes what is backed up and decodes what is restored with the
representation's plain-PyTorch code on the CPU and compares byte for byte. Exits with status 1 if a byte differs,
nothing was restored, or a counter is not the format's arithmetic.
"""

import json
import pathlib
import random
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click
import requests
from attrs import asdict, evolve, frozen
from counters import BACKUP_BYTES, BACKUP_TOKENS, L2_TOKENS, RESTORE_BYTES, RESTORE_TOKENS, metric
from results import command_line, writable
from servers import end_servers_on_sigterm, launch, provenance
from serving import PROBE, environment, events, free_port, http, pip_install

VOCABULARY = 4096
LAYERS = 36
ANSWER_TOKENS = 32
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
    tp_size: int = 1
    kv_heads: int = 8
    l1_tokens: int = 8192
    cuda_graphs: bool = True

    @property
    def name(self) -> str:
        graphs = "" if self.cuda_graphs else "-no-cuda-graphs"
        return f"{self.representation}-{self.page_size}-{self.layout}-{self.kv_heads}-heads{graphs}"

    @property
    def bytes_per_token(self) -> int:
        """One rank's, from the formats' definition.

        Of each head of a token 128 INT8 and a BF16 scale, a page's together padded to 128 bytes; or 128 BF16.
        """
        heads = self.kv_heads // self.tp_size
        block = {"int8": self.page_size * heads * (128 + 2), "bf16": self.page_size * heads * 128 * 2}
        return 2 * LAYERS * (-(-block[self.representation] // 128) * 128) // self.page_size

    @property
    def host_tokens(self) -> int:
        """SGLang's rule, and one page."""
        flag, value = self.sizing
        if flag == "--hicache-size":
            wanted = int(value) * 1_000_000_000 // self.bytes_per_token
        else:
            wanted = int(self.l1_tokens * float(value))
        return (wanted // self.page_size + 1) * self.page_size


CASES = {
    1: (
        Case("int8", 1, "page_first", ("--hicache-size", "8")),
        Case("int8", 64, "page_first", ("--hicache-ratio", "3")),
        Case("int8", 64, "page_first", ("--hicache-ratio", "3"), cuda_graphs=False),
        Case("int8", 1, "layer_first", ("--hicache-ratio", "3")),
        Case("int8", 64, "layer_first", ("--hicache-ratio", "3")),
        Case("int8", 64, "page_first", ("--hicache-ratio", "3"), kv_heads=1),
        Case("bf16", 64, "page_first", ("--hicache-ratio", "3")),
    ),
    2: (
        Case("int8", 1, "page_first", ("--hicache-size", "8"), tp_size=2),
        Case("int8", 64, "page_first", ("--hicache-ratio", "3"), tp_size=2),
        Case("int8", 64, "page_first", ("--hicache-ratio", "3"), tp_size=2, kv_heads=2),
        Case("int8", 16, "layer_first", ("--hicache-ratio", "3"), tp_size=2, kv_heads=2),
        Case("bf16", 64, "page_first", ("--hicache-ratio", "3"), tp_size=2),
    ),
}
"""Tensor-parallel size -> servers."""


def write_config(folder: pathlib.Path, kv_heads: int) -> pathlib.Path:
    """A model's folder; its weights are random."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_key_value_heads": kv_heads}))
    return folder


def run(case: Case, model: pathlib.Path, probe: pathlib.Path, scratch: pathlib.Path) -> dict[str, Any]:
    """Serve, fill, evict, restore; what was seen."""
    file, port = scratch / f"{case.name}.jsonl", free_port()
    words = ["--skip-tokenizer-init", "--load-format", "dummy", "--context-length", "4096", "--enable-metrics"]
    words += ["--enable-hierarchical-cache", "--hicache-mem-layout", case.layout, *case.sizing]
    words += ["--hicache-representation", case.representation]
    if case.tp_size > 1:  # with NCCL alone, which is there wherever two GPUs are
        words += ["--tp-size", str(case.tp_size), "--disable-custom-all-reduce"]
    words += [] if case.cuda_graphs else ["--disable-cuda-graph"]
    command = launch(model, port, l1_tokens=case.l1_tokens, page_size=case.page_size, memory=0.1, arguments=words)
    variables = environment(HIQCACHE_PROBE=file)
    variables["PYTHONPATH"] = f"{variables.get('PYTHONPATH', '')}:{probe}"
    rng = random.Random(0)
    prompts = [[rng.randrange(10, VOCABULARY) for _ in range(1500 + 7 * number)] for number in range(8)]
    with http(command, scratch / f"{case.name}.log", port, variables) as server:
        for prompt in prompts:
            server.generate([prompt])
        restored = [server.generate([prompt], ANSWER_TOKENS)[0] for prompt in prompts[:4]]
        page = requests.get(f"{server.url}/metrics", timeout=30).text
        (report,) = server.info()["hiqcache"]
    ranks = [checked(events(file), rank) for rank in range(case.tp_size)]
    found = {
        **asdict(case),
        "report": report,
        "answers": [answer.tokens for answer in restored],
        "restored_tokens": [answer.from_host for answer in restored],
        "ranks": ranks,
        "host_total_tokens": metric(page, L2_TOKENS),
        "backup_bytes_per_token": metric(page, BACKUP_BYTES) / max(1, metric(page, BACKUP_TOKENS)),
        "load_back_bytes_per_token": metric(page, RESTORE_BYTES) / max(1, metric(page, RESTORE_TOKENS)),
    }
    whole = [(len(prompt) - 1) // case.page_size * case.page_size for prompt in prompts[:4]]
    found["passed"] = (
        not any(rank["backup_wrong_bytes"] or rank["restore_wrong_values"] for rank in ranks)
        and found["restored_tokens"] == whole
        and all(rank["restore_tokens"] >= sum(whole) for rank in ranks)
        and found["backup_bytes_per_token"] == found["load_back_bytes_per_token"] == case.bytes_per_token
        and found["host_total_tokens"] == report["tokens"] == case.host_tokens
    )
    return found


def checked(seen: list[dict[str, Any]], rank: int) -> dict[str, int]:
    """What the probe on a rank saw, summed."""
    backups = [event for event in seen if event["rank"] == rank and event["event"] == "backup"]
    restores = [event for event in seen if event["rank"] == rank and event["event"] == "restore"]
    return {
        "backup_tokens": sum(event["tokens"] for event in backups),
        "backup_wrong_bytes": sum(event["wrong_bytes"] for event in backups),
        "restore_tokens": sum(event["tokens"] for event in restores) // LAYERS,
        "restore_wrong_values": sum(event["wrong_values"] for event in restores),
    }


@click.command(help=__doc__)
@click.option("--out", required=True, type=click.Path(path_type=pathlib.Path), callback=writable, help="JSON to write.")
@click.option("--tp", type=click.Choice(["1", "2"]), default="1", show_default=True, help="GPUs, each with its ranks.")
def main(out: pathlib.Path, tp: str) -> None:
    end_servers_on_sigterm()
    cases = CASES[int(tp)]
    with tempfile.TemporaryDirectory() as directory:
        scratch = pathlib.Path(directory)
        models = {case.kv_heads: write_config(scratch / f"{case.kv_heads}-heads", case.kv_heads) for case in cases}
        probe = pip_install(PROBE, scratch / "probe")

        def attempt(case: Case) -> dict[str, Any]:
            try:
                return run(case, models[case.kv_heads], probe, scratch)
            except Exception as error:
                return {**asdict(case), "passed": False, "error": f"{type(error).__name__}: {error}"}

        with ThreadPoolExecutor(len(cases)) as pool:
            found = list(pool.map(attempt, cases))
    answers = {case: seen.get("answers") for case, seen in zip(cases, found, strict=True)}
    pairs = [(answers[case], answers[evolve(case, cuda_graphs=True)]) for case in cases if not case.cuda_graphs]
    same_answers = all(one is not None and one == other for one, other in pairs) if pairs else None
    result = {
        "what": "bytes backed up and restored by real SGLang servers against the reference codec",
        **provenance(command_line()),
        "same_answers_with_and_without_cuda_graphs": same_answers,
        "cases": found,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    for case in found:
        click.echo(json.dumps(case))
    if same_answers is not None:
        click.echo(f"same answers with and without CUDA graphs: {same_answers}")
    sys.exit(0 if same_answers is not False and all(case["passed"] for case in found) else 1)


if __name__ == "__main__":
    main()
