"""Where int8's error comes from, and what other formats of about its size would change: a study on a model's real KV.

\b
    python tools/error_sources.py run --prompts prompts.json --out docs/results/error-sources.json
    python tools/error_sources.py report docs/results/error-sources.json
    python tools/error_sources.py plot docs/results/error-sources.json --out docs/results/error-sources.svg
    python tools/error_sources.py choice docs/results/error-sources.json --out choice.svg

The model runs in float32 in this process, on a GPU if there is one, without SGLang. Each prompt's prefix is computed
once; its KV, rounded to BF16 as L1 holds it, goes through each variant of the format and back, and the text's true
continuation is computed on top. Reported for each variant: the error of K and V relative to their size (root mean
square), after one trip and after two, and the divergence of the next token's distribution (KL over the whole
vocabulary, in nats) from that on unchanged BF16 KV. `prompts.json` is that of tools/quality.py.

`int8` here is the format's own code; every other variant is written below, as arithmetic on values: none is a format.

Of the registered formats, and of NVFP4, the error of K and V in each layer at page size 64, on the first prompts.

The same for candidates of fewer than 8 bits (`tools/small_formats.py`), with their error after 1, 2 and 8 trips on the
first prompts, the groups of which a second trip changes a byte, and the error of the attention output on the synthetic
K with biases of `tools/key_biases.py`: as it is, and with each channel divided by a power of two beforehand.
"""

import json
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from attrs import evolve, frozen
from key_biases import DIM, PLACES, Sample
from nvfp4.hiqcache_nvfp4 import NVFP4
from quality_report import estimate, kl, table
from quality_texts import Prompt, Prompts
from results import Commands, read_result, writable
from rich.console import Console
from rich.progress import track
from small_formats import Grid, Rotated, bf16, changed, hadamard
from torch.nn.functional import pad

from hiqcache import sample_model
from hiqcache.backends.int4 import Int4
from hiqcache.backends.int8 import Int8
from hiqcache.backends.k6v4 import K6V4
from hiqcache.commands._picture import picture
from hiqcache.geometry import HiqcacheError, KVGeometry, Part
from hiqcache.plotting import save
from hiqcache.representation import HostRepresentation

CALIBRATION = 4
"""Prompts, behind those that are measured, from which the per-channel scales are taken."""
LEVELS = 127


PARTS = ("variants", "sources", "int8_relative_error", "model", "prompts", "scored_tokens")
"""What a result has."""


@frozen
class Place:
    """Which rows are coded.

    Attributes:
        part: K or V.
        layer: of the model.
        channels: typical magnitude of each channel of this part and layer in other texts, `[heads, dim]`.
    """

    part: Part
    layer: int
    channels: torch.Tensor


Codec = Callable[[torch.Tensor, Place], torch.Tensor]
"""`[tokens, heads, dim]` float32 of BF16 numbers -> what comes back, float32."""


def grid(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The multiple of the scale nearest to x, of those that 8 bits hold."""
    return (x / scale).round().clamp(-LEVELS, LEVELS) * scale


def absmax(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax(-1, keepdim=True).clamp(min=2.0**-112)


def through(cls: type[HostRepresentation], page_size: int = 1) -> Codec:
    """A representation's own encode and decode; zeros fill the last page."""

    def code(x: torch.Tensor, place: Place) -> torch.Tensor:
        tokens, heads, dim = x.shape
        representation = cls(KVGeometry(layers=1, heads=heads, head_dim=dim, v_head_dim=dim, page_size=page_size))
        values = pad(x.bfloat16(), (0, 0, 0, 0, 0, -tokens % page_size)).view(-1, page_size, heads, dim)
        blocks = x.new_empty(len(values), representation.layouts[place.part].block_bytes, dtype=torch.uint8)
        out = torch.empty_like(values)
        representation.encode(values, place.part, blocks)
        representation.decode(blocks, place.part, out)
        return out.flatten(0, 1)[:tokens].float()

    return code


format_itself = through(Int8)


def only(part: Part) -> Codec:
    return lambda x, place: format_itself(x, place) if place.part is part else x


def exact_scale(x: torch.Tensor, place: Place) -> torch.Tensor:
    """A float32 scale, values returned unrounded: the quantiser alone."""
    return grid(x, absmax(x) / LEVELS)


def unrounded(x: torch.Tensor, place: Place) -> torch.Tensor:
    """The format's BF16 scale, values returned unrounded."""
    return grid(x, bf16(absmax(x) / LEVELS))


def float32_scale(x: torch.Tensor, place: Place) -> torch.Tensor:
    return bf16(exact_scale(x, place))


def zero_point(x: torch.Tensor, place: Place) -> torch.Tensor:
    """256 levels from the smallest to the largest value of a head; scale and offset in BF16."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale, middle = bf16(((high - low) / 255).clamp(min=2.0**-112)), bf16((high + low) / 2)
    return bf16(((x - middle) / scale).round().clamp(-128, 127) * scale + middle)


def in_groups(size: int) -> Codec:
    """A BF16 scale for every `size` neighbouring values."""

    def code(x: torch.Tensor, place: Place) -> torch.Tensor:
        groups = x.unflatten(-1, (-1, min(size, x.shape[-1])))
        return bf16(grid(groups, bf16(absmax(groups) / LEVELS))).flatten(-2)

    return code


def per_channel(x: torch.Tensor, place: Place) -> torch.Tensor:
    """K divided by its channels' typical magnitude, known beforehand; V as it is."""
    if place.part is Part.V:
        return format_itself(x, place)
    level = x / place.channels
    return bf16(grid(level, bf16(absmax(level) / LEVELS)) * place.channels)


def rotated(*parts: Part, group: int | None = None) -> Codec:
    """Heads of `parts` turned by a Hadamard matrix before, and back afterwards; a scale for each group of values."""

    def code(x: torch.Tensor, place: Place) -> torch.Tensor:
        if place.part not in parts:
            return format_itself(x, place)
        turn = hadamard(x)
        turned = (x @ turn).unflatten(-1, (-1, group or x.shape[-1]))
        return bf16(grid(turned, bf16(absmax(turned) / LEVELS)).flatten(-2) @ turn.T)

    return code


def fp8(x: torch.Tensor, place: Place) -> torch.Tensor:
    """As --kv-cache-dtype fp8_e4m3 without calibrated scales."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def scaled_fp8(x: torch.Tensor, place: Place) -> torch.Tensor:
    """FP8 (e4m3) with int8's scale for each head."""
    scale = bf16(absmax(x) / 448)
    return bf16((x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale)


@frozen
class Variant:
    """A codec to try.

    Attributes:
        what: for tables.
        code: the codec.
        used_bytes: of one token's record with 8 heads x 128, before padding to a multiple of 128; None if no format.
    """

    what: str
    code: Codec
    used_bytes: int | None = None


VARIANTS = {
    "int8": Variant("the format as it is", format_itself, 1040),
    "K only": Variant("K through int8, V unchanged", only(Part.K)),
    "V only": Variant("V through int8, K unchanged", only(Part.V)),
    "quantiser": Variant("int8 with an exact scale and unrounded output", exact_scale),
    "+ BF16 scale": Variant("int8 with unrounded output", unrounded),
    "float32 scale": Variant("a float32 scale for each head", float32_scale, 1056),
    "zero point": Variant("256 levels from smallest to largest, BF16 offset", zero_point, 1056),
    "groups of 32": Variant("a BF16 scale for every 32 values", in_groups(32), 1088),
    "groups of 16": Variant("a BF16 scale for every 16 values", in_groups(16), 1152),
    "channel scales": Variant("K divided by calibrated magnitudes of its channels", per_channel, 1040),
    "Hadamard": Variant("heads rotated before, and back after", rotated(*Part), 1040),
    "Hadamard of K": Variant("the same for K alone", rotated(Part.K), 1040),
    "both": Variant("heads rotated, and groups of 16", rotated(*Part, group=16), 1152),
    "FP8 per head": Variant("e4m3 with a BF16 scale for each head", scaled_fp8, 1040),
    "FP8": Variant("e4m3 without a scale", fp8, 1024),
}


@frozen
class Format:
    """A candidate for a format of its own.

    Attributes:
        what: for tables.
        bytes: of one token in one layer, K and V, with 8 heads x 128 at page size 64.
        codecs: of K and of V.
    """

    what: str
    bytes: int
    codecs: tuple[Codec | Rotated, Codec | Rotated]

    def code(self, x: torch.Tensor, place: Place) -> torch.Tensor:
        codec = self.codecs[place.part is Part.V]
        return codec.decode(codec.encode(x)) if isinstance(codec, Rotated) else codec(x, place)

    def wider(self) -> "Format":
        """Scales of whole heads as heads of 128 would have them."""
        k, v = (codec.wider() if isinstance(codec, Rotated) else codec for codec in self.codecs)
        return evolve(self, codecs=(k, v))


def a_head(levels: int, mantissa_bits: int, largest: float | None = None) -> Rotated:
    return Rotated(Grid(levels, None, mantissa_bits, largest=largest))


def groups_of(size: int, levels: int, **more: Any) -> Rotated:
    """Of 4 bits as int4 would have them, unless `more` says otherwise."""
    return Rotated(Grid(levels, size, **{"mantissa_bits": 3, **more}))


K6_GROUPS = groups_of(64, 64, mantissa_bits=5, farthest=1)
"""Exponents lie closer than with 4 bits, or the rounding of a large group would move codes of a small one."""


K5_GROUPS = groups_of(64, 32, mantissa_bits=4)
K5_SMALL = a_head(32, 3, largest=15.89)
"""A scale of 3 mantissa bits is off by 1/17 at most. With 15.5 steps to the largest value it could fall short of the
outermost code, and a second trip would find another scale. With 15.89 it never does."""

FORMATS = {
    "fp8_e4m3": Format("e4m3 without a scale", 2048, (fp8, fp8)),
    "int8 rotated": Format("8 bits, a BF16 scale a head", 2080, (rotated(*Part), rotated(*Part))),
    "k6v4, 0 is a code": Format(
        "K 6 bits with a BF16 scale a head, V 4 bits in groups of 32", 1336, (a_head(63, 7), groups_of(32, 15))
    ),
    "k6v4": Format("the same, codes half a step beside 0", 1336, (a_head(64, 5), groups_of(32, 16))),
    "k6v4, groups": Format("the same, K in groups of 64", 1344, (K6_GROUPS, groups_of(32, 16))),
    "k6v4, signed": Format("the same, V's scales have a sign", 1344, (K6_GROUPS, groups_of(32, 16, signed=True))),
    "k6v4, offset": Format(
        "the same, V's numbers moved and searched", 1344, (K6_GROUPS, groups_of(32, 16, offset=True))
    ),
    "k5v5": Format("5 bits, groups of 64", 1328, (K5_GROUPS, K5_GROUPS)),
    "k5v4": Format("K 5 bits, V 4, a BF16 scale a head", 1184, (a_head(32, 4), a_head(16, 3))),
    "k5v4, small": Format("the same, a one-byte scale a head", 1168, (K5_SMALL, a_head(16, 3))),
    "int4, 0 is a code": Format("4 bits, groups of 16", 1168, (groups_of(16, 15), groups_of(16, 15))),
    "int4": Format("the same, codes half a step beside 0", 1168, (groups_of(16, 16), groups_of(16, 16))),
    "int4, signed": Format(
        "the same, scales have a sign", 1168, (groups_of(16, 16, signed=True), groups_of(16, 16, signed=True))
    ),
    "int4, offset": Format(
        "the same, moved and searched", 1168, (groups_of(16, 16, offset=True), groups_of(16, 16, offset=True))
    ),
    "nvfp4": Format("TensorRT-LLM's cold pages", 1152, (through(NVFP4), through(NVFP4))),
    "k6v4 itself": Format("the format's own code", 1336, (through(K6V4), through(K6V4))),
    "int4 itself": Format("the format's own code", 1168, (through(Int4), through(Int4))),
}
ITSELF = {cls.name: through(cls, page_size=64) for cls in (Int8, K6V4, Int4, NVFP4)}
"""Formats whose error is measured layer by layer: their own encode and decode."""
BF16_BYTES, INT8_BYTES = 4096, 2080
"""Of one token in one layer, K and V, with 8 heads x 128 at page size 64."""
TRIPS = (1, 2, 8)
REPEATED = 4
"""Prompts whose KV makes more than one trip through `FORMATS`, and one through `ITSELF`."""
BATCH = 6
"""Codecs whose KV is continued at once."""
BIASES = (0, 60, 151, 600)
"""Of key biases, in standard deviations of the other channels."""


# The model. ---------------------------------------------------------------------------------------------------------

Rows = list[dict[Part, torch.Tensor]]
"""For each layer, K and V `[tokens, heads, dim]` float32."""


class Model:
    """A causal language model in float32, its KV in our hands.

    Raises:
        HiqcacheError: the folder holds none.
    """

    def __init__(self, folder: Path):
        from transformers import AutoModelForCausalLM

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        except (OSError, ValueError) as error:
            raise HiqcacheError(f"cannot load {folder} (--model): {str(error).splitlines()[0]}") from error
        self.model.to(self.device)  # pyright: ignore[reportArgumentType] (transformers wraps it in its own type)

    def compute(self, tokens: Sequence[int]) -> Rows:
        """KV of a text, rounded to BF16."""
        cache = self.model.model(torch.tensor([tokens], device=self.device), use_cache=True).past_key_values
        return [
            {part: bf16(x[0].transpose(0, 1)) for part, x in zip(Part, (layer.keys, layer.values), strict=True)}
            for layer in cache.layers
        ]

    def logprobs(self, several: Sequence[Rows], continuation: Sequence[int]) -> torch.Tensor:
        """`[KV, positions, vocabulary]`: after each token of a continuation, on top of several texts' KV."""
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer in range(len(several[0])):
            k, v = (torch.stack([rows[layer][part].transpose(0, 1) for rows in several]) for part in Part)
            cache.update(k, v, layer)
        tokens = torch.tensor([continuation], device=self.device).expand(len(several), -1)
        return self.model(tokens, past_key_values=cache).logits.log_softmax(-1)


def channel_magnitudes(model: Model, prompts: Sequence[Any]) -> list[dict[Part, torch.Tensor]]:
    """Root mean square of each channel in some texts, `[heads, dim]` for each layer and part."""
    texts = [model.compute(prompt.prefix) for prompt in prompts]
    return [
        {
            part: torch.cat([rows[layer][part] for rows in texts]).square().mean(0).sqrt().clamp(min=1e-6)
            for part in Part
        }
        for layer in range(len(texts[0]))
    ]


@click.group(cls=Commands, help=__doc__)
def main() -> None:
    pass


@main.command()
@click.option(
    "--model", "folder", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Default: SmolLM2-135M."
)
@click.option("--prompts", "file", required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--count", default=48, show_default=True, type=click.IntRange(min=1), help="Prompts to measure on.")
@click.option("--out", required=True, type=click.Path(path_type=Path), callback=writable, help="JSON file to write.")
@torch.inference_mode()
def run(folder: Path | None, file: Path, count: int, out: Path) -> None:
    """Measure every variant."""
    everything = Prompts.load(file)
    prompts = everything.prompts
    if len(prompts) < count + CALIBRATION:
        raise click.ClickException(f"{file} holds {len(prompts)} prompts; --count {count} and {CALIBRATION} are needed")
    folder = folder or sample_model.fetch()
    everything.require_ids_of(folder)
    model = Model(folder)
    channels = channel_magnitudes(model, prompts[count : count + CALIBRATION])
    dim = channels[0][Part.K].shape[-1]
    if dim & (dim - 1):
        raise click.ClickException(f"heads of {dim} values; allowed: powers of two, for the rotations (--model)")
    codecs = {name: each.code for name, each in VARIANTS.items()}
    codecs |= {name: each.wider().code for name, each in FORMATS.items()}
    measured: dict[str, list[float]] = {name: [] for name in codecs}
    wrong: dict[str, dict[str, Any]] = {name: {"once": 0.0, "twice": 0.0} for name in VARIANTS}
    repeated: dict[str, dict[int, Any]] = {name: dict.fromkeys(TRIPS, 0.0) for name in FORMATS}
    moved: dict[str, dict[Part, list[float]]] = {name: {part: [] for part in Part} for name in FORMATS}
    by_layer: dict[str, Any] = dict.fromkeys(ITSELF, 0.0)
    size: Any = 0.0
    size_repeated: Any = 0.0
    for number, prompt in enumerate(track(prompts[:count], "measuring", console=Console(stderr=True))):
        rows = model.compute(prompt.prefix)
        continuation = prompt.tokens[prompt.prefix_tokens :]
        (exact,) = model.logprobs([rows], continuation)
        size += squares(rows)
        for names in batched(codecs):
            once = {name: coded(rows, codecs[name], channels) for name in names}
            for name, other in zip(names, model.logprobs(list(once.values()), continuation), strict=True):
                measured[name].append(float((exact.exp() * (exact - other)).sum(-1).mean()))
                if name in VARIANTS:
                    wrong[name]["once"] += squares(once[name], rows)
                    wrong[name]["twice"] += squares(coded(once[name], codecs[name], channels), rows)
        if number < REPEATED:
            size_repeated += squares(rows)
            for name, code in ITSELF.items():
                by_layer[name] += squares(coded(rows, code, channels), rows)
            for name, each in FORMATS.items():
                trip = rows
                for trips in range(1, max(TRIPS) + 1):
                    trip = coded(trip, each.code, channels)
                    if trips in TRIPS:
                        repeated[name][trips] += squares(trip, rows)
                for part, codec in zip(Part, each.codecs, strict=True):
                    if isinstance(codec, Rotated):
                        moved[name][part] += [changed(codec, parts[part]) for parts in rows]
    relative = {name: {trips: np.sqrt(sums / size) for trips, sums in wrong[name].items()} for name in VARIANTS}
    values = {name: np.array(by_prompt) for name, by_prompt in measured.items()}
    result = {
        "what": "error of int8 and of other formats on the KV of a real model, and what it does to the next token",
        "command": "python tools/error_sources.py run",
        "hardware": torch.cuda.get_device_name() if model.device == "cuda" else f"CPU, {platform.machine()}",
        "versions": {name: version(name) for name in ("hiqcache", "torch", "transformers")},
        "model": folder.name,
        "prompts": [origin(prompt) for prompt in prompts[:count]],
        "calibration": [origin(prompt) for prompt in prompts[count : count + CALIBRATION]],
        "scored_tokens": len(prompts[0].tokens) - prompts[0].prefix_tokens,
        "variants": {
            name: {
                "what": variant.what,
                "record_bytes": None if variant.used_bytes is None else -(-variant.used_bytes // 128) * 128,
                "used_bytes": variant.used_bytes,
                **divergence(values[name], values["int8"]),
                "relative_error": {
                    part.value: {trips: float(error[i].mean()) for trips, error in relative[name].items()}
                    for i, part in enumerate(Part)
                },
                "kl_by_prompt": measured[name],
            }
            for name, variant in VARIANTS.items()
        },
        "int8_relative_error": {part.value: relative["int8"]["once"][i].tolist() for i, part in enumerate(Part)},
        "sources": sources({name: wrong[name]["once"] for name in VARIANTS}),
        "formats": {
            name: {
                "what": each.what,
                "bytes": each.bytes,
                **divergence(values[name], values["int8"]),
                "relative_error": {
                    part.value: {
                        str(trips): float(np.sqrt(sums / size_repeated)[i].mean())
                        for trips, sums in repeated[name].items()
                    }
                    for i, part in enumerate(Part)
                },
                "groups_changed": {
                    part.value: float(np.mean(shares)) if shares else None for part, shares in moved[name].items()
                },
                "kl_by_prompt": measured[name],
            }
            for name, each in FORMATS.items()
        },
        "by_layer": {
            name: {
                part.value: np.sqrt(sums / size_repeated)[i].mean(-1).tolist()  # over heads
                for i, part in enumerate(Part)
            }
            for name, sums in by_layer.items()
        },
        "key_biases": {
            "biases": list(BIASES),
            "errors": {name: biased(each) for name, each in FORMATS.items()},
        },
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    click.echo(markdown(result))


def batched(names: Iterable[str]) -> Iterator[list[str]]:
    """Lists of `BATCH` names."""
    names = list(names)
    return (names[start : start + BATCH] for start in range(0, len(names), BATCH))


def exponents(k: torch.Tensor) -> torch.Tensor:
    """A power of two for each channel of biased K `[tokens, heads, dim]` whose channels spread by 1: `[heads, dim]`.

    2**round(log2(max(1, A / 3))), A the amplitude of the bias of the channel's RoPE pair.
    """
    first, second = k.square().mean(0).chunk(2, dim=-1)
    amplitudes = (first + second - 2).clamp(min=0).sqrt()
    return (amplitudes / 3).clamp(min=1).log2().round().exp2().repeat(1, 2)


def biased(each: Format) -> dict[str, dict[str, list[float]]]:
    """Relative error of the attention output of `tools/key_biases.py` for each bias, without and with exponents."""
    errors: dict[str, dict[str, list[float]]] = {}
    for place in PLACES:
        samples = [Sample.draw(bias, place, 0) for bias in BIASES]
        for kind in ("as it is", "exponents"):
            errors.setdefault(kind, {})[place] = []
            for sample in samples:
                k = sample.kv[Part.K].float()
                divisors = exponents(k) if kind == "exponents" else torch.ones(k.shape[1:])

                def code(values: torch.Tensor, part: Part, divisors: torch.Tensor = divisors) -> torch.Tensor:
                    by = divisors if part is Part.K else torch.ones(())
                    return (each.code(values.float() / by, Place(part, 0, torch.ones(DIM))) * by).bfloat16()

                errors[kind][place].append(sample.error(code))
    return errors


def coded(rows: Rows, code: Codec, channels: list[dict[Part, torch.Tensor]]) -> Rows:
    """KV after a trip through a codec."""
    return [
        {part: code(x, Place(part, layer, channels[layer][part])) for part, x in parts.items()}
        for layer, parts in enumerate(rows)
    ]


def squares(rows: Rows, less: Rows | None = None) -> np.ndarray:
    """Sum of the squares of values, or of what they differ by from others, `[part, layer, head]`."""
    sums = []
    for part in Part:
        differences = [rows[i][part] - (less[i][part] if less else 0) for i in range(len(rows))]
        sums.append(torch.stack([x.double().square().sum((0, 2)) for x in differences]))
    return torch.stack(sums).cpu().numpy()


def divergence(by_prompt: np.ndarray, of_int8: np.ndarray) -> dict[str, list[float]]:
    """Mean KL, and what it is of int8's, with intervals."""
    numbers = range(len(by_prompt))
    return {
        "kl": estimate(lambda chosen: by_prompt[chosen].mean(-1), numbers),
        "kl_over_int8": estimate(lambda chosen: by_prompt[chosen].mean(-1) / of_int8[chosen].mean(-1), numbers),
    }


def origin(prompt: Prompt) -> dict[str, Any]:
    return {"origin": prompt.origin, "prefix_tokens": prompt.prefix_tokens, "sha256": prompt.sha256}


def sources(wrong: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Shares of int8's squared error, K and V: quantiser, BF16 scale, rounding of the output; layers count alike."""
    found = {}
    for i, part in enumerate(Part):
        steps = [(wrong[name][i] / wrong["int8"][i]).mean() for name in ("quantiser", "+ BF16 scale", "int8")]
        names = ("quantiser", "BF16 scale", "rounding of the output")
        found[part.value] = dict(zip(names, np.diff(steps, prepend=0.0).tolist(), strict=True))
    return found


def markdown(result: dict[str, Any]) -> str:
    """Every table of a result."""
    tokens = sum(prompt["prefix_tokens"] for prompt in result["prompts"])
    rows = []
    for name, entry in result["variants"].items():
        ratio = "{:.2f} ({:.2f} to {:.2f})".format(*entry["kl_over_int8"])
        record = "-" if entry["record_bytes"] is None else f"{entry['record_bytes']:,} ({entry['used_bytes']:,} used)"
        errors = ("{once:.3%}, {twice:.3%}".format(**entry["relative_error"][part.value]) for part in Part)
        rows.append([name, entry["what"], record, *errors, kl(entry["kl"]), ratio])
    titles = [
        "variant",
        "what",
        "bytes of 8 x 128, page size 1",
        "error of K after 1 and 2 trips",
        "of V",
        "mean KL, 1e-4 nats",
    ]
    titles.append("KL over int8's")
    shares = [[part.value.upper(), *(f"{x:.1%}" for x in result["sources"][part.value].values())] for part in Part]
    heads = []
    for part in Part:
        error = np.array(result["int8_relative_error"][part.value])
        worst = np.unravel_index(error.argmax(), error.shape)
        spread = (f"{error.min():.3%}", f"{np.median(error):.3%}", f"{error.max():.3%}")
        heads.append([part.value.upper(), *spread, f"layer {worst[0]}, head {worst[1]}"])
    return "\n\n".join(
        [
            f"{result['model']}: {len(result['prompts'])} prompts, {tokens:,} prefix tokens, {result['scored_tokens']} "
            "scored tokens each.",
            table(titles, rows),
            table(["squared error of int8", *next(iter(result["sources"].values()))], shares),
            table(["error of int8 by layer and head", "smallest", "median", "largest", "where"], heads),
            *(below_8_bits(result) if "formats" in result else []),
            *([layer_by_layer(result["by_layer"])] if "by_layer" in result else []),
        ]
    )


def layer_by_layer(errors: dict[str, dict[str, list[float]]]) -> str:
    """The table of `ITSELF`: relative error in each layer, mean over heads."""
    columns = [(name, part, of[part.value]) for name, of in errors.items() for part in Part]
    titles = ["error in layer, page size 64", *(f"{name}, {part.value.upper()}" for name, part, _ in columns)]
    layers = zip(*(of for _, _, of in columns), strict=True)
    return table(titles, [[str(layer), *(f"{error:.2%}" for error in row)] for layer, row in enumerate(layers)])


def below_8_bits(result: dict[str, Any]) -> list[str]:
    """The tables of `FORMATS`: their KL and error, and what key biases cost."""
    rows, biased_rows = [], []
    for name, entry in result["formats"].items():
        errors = (", ".join(f"{error:.2%}" for error in entry["relative_error"][part.value].values()) for part in Part)
        shares = [entry["groups_changed"][part.value] for part in Part]
        again = "-" if None in shares else ", ".join(f"{share:.3%}" for share in shares)
        ratio = f"{entry['bytes']:,} ({BF16_BYTES / entry['bytes']:.2f})"
        rows.append([name, entry["what"], ratio, kl(entry["kl"]), *errors, again])
    for name, kinds in result["key_biases"]["errors"].items():
        cells = (" / ".join(f"{error:.1%}" for error in places[place]) for places in kinds.values() for place in PLACES)
        biased_rows.append([name, *cells])
    ratios = []
    for mine, peer in (("k6v4 itself", "fp8_e4m3"), ("int4 itself", "nvfp4")):
        ours, theirs = (np.array(result["formats"][name]["kl_by_prompt"]) for name in (mine, peer))
        figure = estimate(lambda chosen, a=ours, b=theirs: a[chosen].mean(-1) / b[chosen].mean(-1), range(len(ours)))
        ratios.append("KL of {} over that of {}: {:.2f} ({:.2f} to {:.2f})".format(mine, peer, *figure))
    trips = ", ".join(map(str, TRIPS))
    biases = " / ".join(map(str, result["key_biases"]["biases"]))
    titles = [
        "format",
        "what",
        "bytes of 8 x 128, page size 64 (BF16 over it)",
        "mean KL, 1e-4 nats",
        f"error of K after {trips} trips",
        "of V",
        "groups of K and V that a second trip changes",
    ]
    return [
        table(titles, rows),
        "; ".join(ratios) + ".",
        table(
            [
                f"attention output's error at key biases of {biases}",
                *(f"{place} frequencies{how}" for how in ("", ", exponents") for place in PLACES),
            ],
            biased_rows,
        ),
    ]


@main.command()
@click.argument("result", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def report(result: Path) -> None:
    """Print a result's tables in Markdown."""
    click.echo(markdown(read_result(result, *PARTS)))


@main.command()
@click.argument("result", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), callback=picture, help="SVG or PNG file to write."
)
def plot(result: Path, out: Path) -> None:
    """Draw int8's error by layer and head, and the variants' KL."""
    import matplotlib.pyplot as plt

    data = read_result(result, *PARTS)
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.5), layout="constrained", width_ratios=(1, 1, 2.2))
    for axis, part in zip(axes, Part, strict=False):
        error = 100 * np.array(data["int8_relative_error"][part.value])
        image = axis.imshow(error, aspect="auto", cmap="viridis")
        axis.set(title=f"int8: error of {part.value.upper()}, %", xlabel="KV head", ylabel="layer")
        axis.set_xticks(range(error.shape[1]))
        figure.colorbar(image, ax=axis)
    names = list(data["variants"])[::-1]
    values, low, high = np.array([data["variants"][name]["kl"] for name in names]).T
    axes[2].barh(names, values, xerr=np.stack([values - low, high - values]), capsize=3)
    axes[2].set(xscale="log", xlabel="mean KL from BF16 KV, nats")
    save(figure, out)


@main.command()
@click.argument("result", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), callback=picture, help="SVG or PNG file to write."
)
def choice(result: Path, out: Path) -> None:
    """Draw KL over bytes: hiqcache's formats, their peers, and the candidates that were not taken."""
    import matplotlib.pyplot as plt

    data = read_result(result, *PARTS, "formats")
    tried = {name: (entry["bytes"], *entry["kl"]) for name, entry in data["formats"].items()}
    named = {
        "int8": (INT8_BYTES, *data["variants"]["int8"]["kl"]),
        "k6v4": tried.pop("k6v4 itself"),
        "int4": tried.pop("int4 itself"),
        "FP8 KV (e4m3 in L1)": tried.pop("fp8_e4m3"),
        "NVFP4": tried.pop("nvfp4"),
    }
    figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    others = np.array(list(tried.values()))
    axis.scatter(others[:, 0], 1e4 * others[:, 1], s=14, color="lightgrey", label="candidates that were not taken")
    for name, (size, *figures) in named.items():
        mean, low, high = (1e4 * each for each in figures)
        ours = name in ("int8", "k6v4", "int4")
        color = "C0" if ours else "C1"
        axis.errorbar(size, mean, [[mean - low], [high - mean]], marker="o" if ours else "s", color=color, capsize=4)
        axis.annotate(name, (size, mean), xytext=(7, 5), textcoords="offset points", color=color)
    axis.axvline(BF16_BYTES, color="grey", linewidth=0.8, linestyle="--")
    axis.annotate("BF16", (BF16_BYTES, axis.get_ylim()[0]), xytext=(-34, 6), textcoords="offset points", color="grey")
    axis.set(yscale="log", xlabel="bytes of a token in one layer, K and V, 8 KV heads x 128, page size 64")
    axis.set(ylabel="mean KL from exact KV, 1e-4 nats", title=f"{data['model']}, {len(data['prompts'])} prompts")
    axis.legend(loc="lower left")
    axis.grid(alpha=0.3)
    save(figure, out)


if __name__ == "__main__":
    main()
