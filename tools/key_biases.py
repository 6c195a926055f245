"""What a key bias costs: the error of the attention output where a few K channels lie far above the others.

\b
    python tools/key_biases.py run --out docs/results/key-biases.json
    python tools/key_biases.py report docs/results/key-biases.json

Synthetic K and V, on the CPU, in less than a minute. K is normal with a standard deviation of 1, as V is, plus a bias
in 4 RoPE pairs of each head, rotated and rounded to BF16. The pairs are those of the lowest frequencies, or random
ones. Queries are small there in proportion, as in a trained model, so the biased channels decide no more than any
other. K and V go through the representation and back, in pages of 64 tokens, or through a plain FP8 cast. With
exponents, K's channels are divided by powers of two before and multiplied after, as a server does; without, they are
not. The figure is the root mean square of what the attention output differs by, over that of the exact output.

A bias is the amplitude of its pair, sqrt(a**2 + b**2), in standard deviations of the other channels.
"""

import json
import math
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import torch
from attrs import frozen
from quality_report import table
from results import Commands, command_line, read_result, writable

from hiqcache import registry
from hiqcache.exponents import KeyExponents, divide, multiply
from hiqcache.geometry import KVGeometry, Part
from hiqcache.key_biases import amplitudes, exponents
from hiqcache.representation import HostRepresentation

HEADS, DIM, PAGE_SIZE, PAGES, QUERIES = 32, 128, 64, 16, 32
TOKENS = PAGE_SIZE * PAGES
ROPE_BASE = 1e6
"""Qwen2.5's."""
BIASED_PAIRS = 4
LOGIT_SPREAD = 2.0
"""Standard deviation of the attention logits without biases."""
BIASES = (0, 5, 10, 14, 20, 60, 151, 600)
PLACES = ("low", "random")
"""Which RoPE frequencies the biased pairs have."""
FP8 = "fp8_e4m3"
NAMES = ("int8", "k6v4", "int4")
PARTS = ("biases", "errors")
"""What a result has."""

Codec = Callable[[torch.Tensor, Part], torch.Tensor]
"""`[TOKENS, HEADS, DIM]` BF16 -> what comes back, of the same shape and type."""


@frozen
class Sample:
    """Queries `[QUERIES, HEADS, DIM]` float32, and the K and V that they attend to, `[TOKENS, HEADS, DIM]` BF16.

    `factors` `[HEADS, DIM]` are what K's channels are divided by for their biases.
    """

    queries: torch.Tensor
    kv: dict[Part, torch.Tensor]
    factors: torch.Tensor

    @classmethod
    def draw(cls, bias: float, place: str, seed: int) -> "Sample":
        """The same random numbers for every bias."""
        generator = torch.Generator().manual_seed(seed)
        half = DIM // 2
        pairs = torch.stack([torch.randperm(half, generator=generator)[:BIASED_PAIRS] for _ in range(HEADS)])
        if place == "low":
            pairs = torch.arange(half - BIASED_PAIRS, half).expand(HEADS, -1)
        phases = 2 * math.pi * torch.rand(HEADS, BIASED_PAIRS, generator=generator)
        biases, weights = torch.zeros(HEADS, DIM), torch.ones(HEADS, DIM)
        for channels, shares in ((pairs, phases.cos()), (pairs + half, phases.sin())):
            biases.scatter_(1, channels, bias * shares)
            weights.scatter_(1, channels, 1 / max(1.0, bias))
        k, v = torch.randn(2, TOKENS, HEADS, DIM, generator=generator)
        queries = LOGIT_SPREAD * torch.randn(QUERIES, HEADS, DIM, generator=generator) * weights
        spread = torch.ones(HEADS, DIM)
        powers = KeyExponents(exponents(amplitudes(biases, DIM, interleaved=False), spread)[None])
        factors = powers.factors(biases.device)[0]
        return cls(queries, {Part.K: rotated(k + biases).bfloat16(), Part.V: v.bfloat16()}, factors)

    def attention(self, kv: dict[Part, torch.Tensor]) -> torch.Tensor:
        """Output in float64, `[HEADS, QUERIES, DIM]`."""
        logits = torch.einsum("qhd,thd->hqt", self.queries.double(), kv[Part.K].double()) / math.sqrt(DIM)
        return torch.einsum("hqt,thd->hqd", logits.softmax(-1), kv[Part.V].double())

    def error(self, code: Codec, scaled: bool = False) -> float:
        """Relative error of the output after K and V went through `code`, K divided by `factors` first if `scaled`."""
        exact = self.attention(self.kv)
        k = self.kv[Part.K].clone()
        if scaled:
            divide(k, self.factors)
        k = code(k, Part.K)
        if scaled:
            multiply(k, self.factors)
        coded = self.attention({Part.K: k, Part.V: code(self.kv[Part.V], Part.V)})
        return float((coded - exact).norm() / exact.norm())


def rotated(k: torch.Tensor) -> torch.Tensor:
    """RoPE: channels i and i + DIM / 2 of `[TOKENS, HEADS, DIM]` turn by the token's position times a frequency."""
    frequencies = ROPE_BASE ** (-torch.arange(DIM // 2) / (DIM // 2))
    angles = (torch.arange(TOKENS)[:, None] * frequencies)[:, None]
    first, second = k.chunk(2, dim=-1)
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def through(representation: HostRepresentation) -> Codec:
    """The representation's own encode and decode."""

    def code(values: torch.Tensor, part: Part) -> torch.Tensor:
        pages = values.view(PAGES, PAGE_SIZE, HEADS, DIM)
        blocks = torch.empty(PAGES, representation.layouts[part].block_bytes, dtype=torch.uint8)
        representation.encode(pages, part, blocks)
        out = torch.empty_like(pages)
        representation.decode(blocks, part, out)
        return out.view_as(values)

    return code


def fp8(values: torch.Tensor, part: Part) -> torch.Tensor:
    """As --kv-cache-dtype fp8_e4m3 without calibrated scales; values above 448 saturate."""
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).to(values.dtype)


@click.group(cls=Commands, help=__doc__)
def main() -> None:
    pass


@main.command()
@click.option(
    "--representation",
    "names",
    multiple=True,
    default=["int8", "k6v4", "int4"],
    show_default=True,
    help="May be repeated.",
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--out", required=True, type=click.Path(path_type=Path), callback=writable, help="JSON file to write.")
def run(names: tuple[str, ...], seed: int, out: Path) -> None:
    """Measure every bias."""
    geometry = KVGeometry(layers=1, heads=HEADS, head_dim=DIM, v_head_dim=DIM, page_size=PAGE_SIZE)
    kinds: list[tuple[str, Codec, bool]] = []
    for name in names:
        code = through(registry.get(name)(geometry))
        kinds += [(f"{name} without exponents", code, False), (name, code, True)]
    kinds.append((FP8, fp8, False))
    samples = {place: [Sample.draw(bias, place, seed) for bias in BIASES] for place in PLACES}
    result = {
        "what": "relative error of the attention output where 4 RoPE pairs of each K head have a bias",
        "command": command_line(),
        "hardware": f"CPU, {platform.machine()}",
        "versions": {name: version(name) for name in ("hiqcache", "torch")},
        "seed": seed,
        "setup": {
            "heads": HEADS,
            "head_dim": DIM,
            "tokens": TOKENS,
            "page_size": PAGE_SIZE,
            "queries": QUERIES,
            "biased_pairs": BIASED_PAIRS,
            "rope_base": ROPE_BASE,
            "logit_spread": LOGIT_SPREAD,
        },
        "biases": list(BIASES),
        "errors": {
            name: {place: [sample.error(code, scaled) for sample in samples[place]] for place in PLACES}
            for name, code, scaled in kinds
        },
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    click.echo(markdown(result))


def markdown(result: dict[str, Any]) -> str:
    """The table of a result; of low and random frequencies the larger error."""
    rows = [
        [str(bias), *(f"{max(errors[i] for errors in places.values()):.1%}" for places in result["errors"].values())]
        for i, bias in enumerate(result["biases"])
    ]
    return table(["bias, in standard deviations", *result["errors"]], rows)


@main.command()
@click.argument("result", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def report(result: Path) -> None:
    """Print a result's table in Markdown."""
    click.echo(markdown(read_result(result, *PARTS)))


if __name__ == "__main__":
    main()
