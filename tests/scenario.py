"""The life of an L2 on a real server, and what every server must show of it.

Answers are compared only with answers of the same arithmetic: a restored one with one from L1. Both compute the same
last tokens on top of the same cached prefix, alone in their batch. A cold run computes a prompt at once, which rounds
differently on some CPUs and GPUs. So nothing is compared with it, and it leaves out a prompt's last token: SGLang would
go on from that token's cached KV, rounded as in the cold run, in the answer from L1 alone.
"""

import pathlib
import random
from typing import Any

import tiny_model
from attrs import frozen
from serving import Output, Server, events

L2_RATIO = 2
ANSWER_TOKENS = 8
FIRST, REST = 5, 10
"""Prompts that L2 holds but L1 does not, and those that then push them out of L2."""


@frozen
class Case:
    """One server: what its L2 is like, and how many tokens are asked of it.

    Attributes:
        representation: value of `--hicache-representation`.
        page_size: tokens of a page.
        layout: value of `--hicache-mem-layout`.
        policy: value of `--hicache-write-policy`.
    """

    representation: str
    page_size: int
    layout: str
    policy: str

    def __str__(self) -> str:
        return f"{self.representation}-{self.page_size}-{self.layout}-{self.policy}"

    @property
    def lossless(self) -> bool:
        return self.representation == "bf16"

    @property
    def insertions(self) -> int:
        """How often a prompt must be seen in L1 before it is backed up."""
        return 2 if self.policy == "write_through_selective" else 1

    @property
    def prompt_tokens(self) -> int:
        """Some whole pages and an odd end."""
        return max(99, 3 * self.page_size + 3)

    @property
    def whole(self) -> int:
        """Tokens of a prompt that can come from a cache: in whole pages, and the last one is always computed."""
        return self.in_pages(self.prompt_tokens - 1)

    @property
    def l1_tokens(self) -> int:
        """L1 with room for three answered prompts, a fourth in the making, and half of another."""
        kept = self.in_pages(self.prompt_tokens + ANSWER_TOKENS - 1)
        taken = self.in_pages(self.prompt_tokens + ANSWER_TOKENS + self.page_size - 1)
        return 3 * kept + taken + self.in_pages(kept // 2)

    @property
    def l2_tokens(self) -> int:
        """By SGLang's rule, which adds a page."""
        return L2_RATIO * self.l1_tokens + self.page_size

    def in_pages(self, tokens: int) -> int:
        return tokens // self.page_size * self.page_size

    def prompts(self) -> list[list[int]]:
        """For the tiny model: random tokens, no two prompts with a common prefix, nor with a health check's token 0."""
        rng = random.Random(0)
        rest = self.prompt_tokens - 1
        return [[first, *rng.choices(range(tiny_model.VOCABULARY), k=rest)] for first in range(10, 10 + FIRST + REST)]

    def settings(self, model: pathlib.Path, **more: Any) -> dict[str, Any]:
        """Of a server of the tiny model, or one like it."""
        return {
            "model_path": str(model),
            "skip_tokenizer_init": True,
            "enable_hierarchical_cache": True,
            "hicache_representation": self.representation,
            "hicache_ratio": L2_RATIO,
            "hicache_mem_layout": self.layout,
            "hicache_write_policy": self.policy,
            "page_size": self.page_size,
            "max_total_tokens": self.l1_tokens,
            "context_length": 2 * self.prompt_tokens,
            "skip_server_warmup": True,
        } | more


def ask(server: Server, prompt: list[int], *, device: int, host: int, new_tokens: int = ANSWER_TOKENS) -> Output:
    """The answer to one prompt, so many tokens of which come from L1 and from L2."""
    (answer,) = server.generate([prompt], new_tokens)
    assert (answer.from_device, answer.from_host) == (device, host)
    return answer


def fill(server: Server, case: Case, prompts: list[list[int]]) -> list[Output]:
    """Ask for more than L1 holds, for each prompt's prefix and then for the prompt; answers whose prefix is in L1."""
    exact = []
    for prompt in prompts:
        ask(server, prompt[:-1], device=0, host=0, new_tokens=1)
        exact.append(ask(server, prompt, device=case.whole, host=0))
    return exact


def check_restored(server: Server, case: Case, prompt: list[int], exact: Output, *, device: int = 0) -> None:
    """A prompt of which L1 has `device` tokens and L2 the rest is answered as it is from L1.

    The KV that a restore left in L1 must give the same answer when it is used again: the forward pass waited for it.
    """
    restored = ask(server, prompt, device=device, host=case.whole - device)
    if case.lossless:
        assert restored.tokens == exact.tokens
    again = ask(server, prompt, device=case.whole, host=0)
    assert restored.tokens == again.tokens


def check(server: Server, case: Case) -> None:
    """The life of an L2: filled, restored from, half used, used by several, overflowing, flushed, used again."""
    prompts = case.prompts()
    first, rest = prompts[:FIRST], prompts[FIRST:]
    exact = fill(server, case, first)
    for number in (0, 1):  # longest unused: gone from L1, whole in L2
        check_restored(server, case, first[number], exact[number])

    half = case.prompt_tokens // 2
    head = case.in_pages(half)
    ask(server, [*first[2][:half], first[3][0]], device=0, host=head)
    check_restored(server, case, first[2], exact[2], device=head)

    together = server.generate([first[3], first[4], first[0]], ANSWER_TOKENS)
    assert sum(answer.from_host for answer in together) >= case.whole
    assert all(len(answer.tokens) == ANSWER_TOKENS for answer in together)

    for prompt in rest:
        for _ in range(case.insertions):
            server.generate([prompt], ANSWER_TOKENS)
    ask(server, first[1], device=0, host=0)  # L2 has overflowed

    server.flush()
    exact = fill(server, case, [rest[-1], *first[:4]])
    check_restored(server, case, rest[-1], exact[0])


def check_bytes(file: pathlib.Path, case: Case, layers: int = tiny_model.LAYERS) -> None:
    """All that the probe saw `check` move was right, byte for byte, and it saw enough of it."""
    seen = events(file)
    backups = [event for event in seen if event["event"] == "backup"]
    restores = [event for event in seen if event["event"] == "restore"]
    assert not any(event["wrong_bytes"] for event in backups)
    assert not any(event["wrong_values"] for event in restores)
    assert {event["layer"] for event in restores} == set(range(layers))
    assert sum(event["tokens"] for event in restores) >= 5 * case.whole * layers
    assert sum(event["tokens"] for event in backups) > 1.1 * case.l2_tokens, "slots of L2 were to be used again"
