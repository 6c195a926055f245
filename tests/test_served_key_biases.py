"""A served Qwen2 with large key biases: what a restore from L2 does to its answers, against the same model without."""

import importlib.util
import pathlib
import random
from typing import Any

import numpy as np
import pytest
import tiny_qwen2
from attrs import frozen
from serving import engine, events
from tiny_model import VOCABULARY

from hiqcache.sglang import cpu

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("sglang"), reason="the extra `sglang` is not installed"),
]

BIASES = {
    (1, 0, 30): 600.0,  # of 32 RoPE pairs the last ones have the lowest frequencies
    (1, 0, 31): 150.0,
    (1, 2, 5): 60.0,
    (1, 2, 49): 600.0,
    (3, 1, 29): -60.0,
    (3, 1, 11): 150.0,
}
"""(layer, KV head, channel) -> bias, where channels have a standard deviation of 1."""
PREFIX, SCORED, L1_TOKENS = 192, 48, 1024
RESTORED, OTHERS = 4, 8
"""Prompts that are restored, and those that push them out of L1."""


@frozen
class Served:
    """Log-probabilities `[prompts, positions, vocabulary]` on prefixes in L1 and from L2; what was logged."""

    from_l1: np.ndarray
    from_l2: np.ndarray
    log: str

    @property
    def kl(self) -> float:
        return float((np.exp(self.from_l1) * (self.from_l1 - self.from_l2)).sum(-1).mean())


def serve(
    folder: pathlib.Path, biases: dict[tuple[int, int, int], float], name: str, page_size: int,
    capfd: pytest.CaptureFixture,
) -> Served:  # fmt: skip
    """Ask for continuations of prefixes in L1, and again after they came back from L2; float32, on KV in BF16."""
    rng = random.Random(0)
    prompts = [
        [first, *rng.choices(range(VOCABULARY), k=PREFIX + SCORED - 1)] for first in range(10, 10 + RESTORED + OTHERS)
    ]
    settings: dict[str, Any] = {
        "model_path": str(tiny_qwen2.make(folder / f"{len(biases)}-{name}-{page_size}", biases)),
        "skip_tokenizer_init": True,
        "enable_hierarchical_cache": True,
        "hicache_representation": name,
        "hicache_ratio": 4,
        "page_size": page_size,
        "max_total_tokens": L1_TOKENS,
        "context_length": 512,
        "skip_server_warmup": True,
        "log_level": "info",
    }
    capfd.readouterr()
    with engine(**settings, **cpu.FLOAT32) as server:

        def score(prompt: list[int], source: str) -> list[list[float]]:
            meta = server.engine.generate(
                input_ids=prompt,
                sampling_params={"temperature": 0, "max_new_tokens": 1},
                return_logprob=True,
                logprob_start_len=PREFIX,
                top_logprobs_num=VOCABULARY,
            )["meta_info"]
            assert meta["cached_tokens_details"][source] == PREFIX
            # Nothing predicts the first position that is asked for.
            return [
                [entry[0] for entry in sorted(each, key=lambda entry: entry[1])]
                for each in meta["input_top_logprobs"][1:]
            ]

        before = []
        for prompt in prompts:
            server.generate([prompt[:PREFIX]], 1)
            before.append(score(prompt, "device"))
        after = [score(prompt, "host") for prompt in prompts[:RESTORED]]
    return Served(np.array(before[:RESTORED]), np.array(after), "".join(capfd.readouterr()))


@pytest.mark.parametrize(
    ("name", "page_size"),
    [
        ("int8", 64),
        *[
            pytest.param(*each, marks=pytest.mark.sweep)
            for each in (("int8", 1), ("k6v4", 64), ("k6v4", 1), ("int4", 64), ("int4", 1))
        ],
    ],
)
def test_biases_cost_a_restore_nothing(
    name: str, page_size: int, tmp_path: pathlib.Path, probing: pathlib.Path, capfd: pytest.CaptureFixture
):
    without = serve(tmp_path, {}, name, page_size, capfd)
    biased = serve(tmp_path, BIASES, name, page_size, capfd)
    print(f"{name}, page size {page_size}: KL {without.kl:.3g} without biases, {biased.kl:.3g} with them")
    assert without.from_l1.shape == (RESTORED, SCORED - 1, VOCABULARY)
    assert without.kl > 0
    assert biased.kl <= 2 * without.kl
    assert "K has biases" not in without.log
    assert biased.log.count("K has biases; in 2 layer(s) channels are divided by powers of two, up to 256") == 1

    seen = events(probing)
    assert sum(event["tokens"] for event in seen if event["event"] == "restore") >= 2 * RESTORED * PREFIX
    assert not any(event.get("wrong_bytes", 0) or event.get("wrong_values", 0) for event in seen)
