"""The quality tool: its figures by hand, its refusals, and real restores of a small model."""

import concurrent.futures
import contextlib
import json
import math
import os
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import error_sources
import numpy as np
import pytest
import quality
import small_formats
import tiny_model
import torch
from attrs import evolve
from click.testing import CliRunner, Result
from nvfp4.hiqcache_nvfp4 import NVFP4
from quality import Client, NotMeasured, Plan, Run
from quality_report import Arm, Greedy, Score, agreeing, bars, compared, divergence, estimate, summarise, summary
from quality_texts import SOURCES, Prompt, Prompts, _Text
from rich.progress import Progress
from small_formats import Grid, Rotated

from hiqcache.backends.int4 import Int4
from hiqcache.backends.int8 import Int8
from hiqcache.backends.k6v4 import K6V4
from hiqcache.geometry import HiqcacheError, Part

DOCS = Path(__file__).parents[1] / "docs"


def some_prompts(count: int = 18, continuation: int = 24) -> Prompts:
    """Random tokens, prefixes of 48 and 96."""
    rng = np.random.default_rng(0)
    prompts = []
    for number in range(count):
        prefix = (48, 96)[number % 2]
        # Not the last token of the vocabulary: SGLang gives it back as token 0 beside its log-probability.
        rest = rng.integers(0, tiny_model.VOCABULARY - 1, prefix + continuation - 1).tolist()
        kind = ("prose", "code")[number // 2 % 2]
        prompts.append(Prompt(kind=kind, origin="random", prefix_tokens=prefix, tokens=(10 + number, *rest)))
    return Prompts(tokenizer="none", shared_tokens=0, prompts=tuple(prompts))


def score(logprobs: np.ndarray, top: int, true: int = 0) -> Score:
    """From log-probabilities `[positions, vocabulary]`."""
    ids = np.argsort(-logprobs, axis=1)[:, :top]
    return Score(true=logprobs[:, true], ids=ids, logprobs=np.take_along_axis(logprobs, ids, 1))


def random_logprobs(seed: int, positions: int = 20, vocabulary: int = 30) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(0, 2, (positions, vocabulary))
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


# Figures.


def test_divergence_by_hand():
    exact = Score(true=np.zeros(1), ids=np.array([[7, 3]]), logprobs=np.log([[0.5, 0.3]]))
    other = Score(true=np.zeros(1), ids=np.array([[5, 7]]), logprobs=np.log([[0.5, 0.4]]))
    # Both name token 7; everything else is one bucket.
    expected = 0.5 * math.log(0.5 / 0.4) + 0.5 * math.log(0.5 / 0.6)
    assert divergence(exact, other) == pytest.approx([expected])
    assert divergence(exact, exact).tolist() == [0]


def test_divergence_over_the_whole_vocabulary_and_over_a_part():
    p = random_logprobs(1)
    q = p + 0.1 * random_logprobs(2)
    q -= np.log(np.exp(q).sum(1, keepdims=True))
    whole = (np.exp(p) * (p - q)).sum(1)
    assert divergence(score(p, 30), score(q, 30)) == pytest.approx(whole, abs=1e-6)
    part = divergence(score(p, 12), score(q, 12))
    assert (part <= whole + 1e-9).all()
    assert (part >= 0).all()
    assert part.mean() > 0.5 * whole.mean()


def test_agreement_of_greedy_answers():
    answer = Greedy(tokens=(1, 2, 3, 9), ended=True)
    assert agreeing(answer, answer) == 4
    assert agreeing(answer, Greedy(tokens=(1, 2, 4, 9), ended=True)) == 2
    assert agreeing(answer, Greedy(tokens=(1, 2), ended=True)) == 2
    longer = Greedy(tokens=(1, 2, 3, 9, 5), ended=False)
    one = [score(random_logprobs(1), 5)]
    (entry,) = compared(Arm(name="a", scores=one, greedy=[answer]), Arm(name="b", scores=one, greedy=[longer]))
    assert (entry["first_token"], entry["whole_sequence"], entry["agreeing_tokens"]) == (True, False, 4)


def test_the_interval_is_that_of_a_mean():
    values = np.random.default_rng(0).normal(3, 2, 400)
    value, low, high = estimate(lambda chosen: values[chosen].mean(-1), range(400))
    assert value == pytest.approx(values.mean())
    for edge in (value - low, high - value):
        assert edge == pytest.approx(1.96 * values.std() / 20, rel=0.1)


def test_perplexity_is_compared_through_the_change_of_log_probability():
    p = random_logprobs(3)
    exact = Arm(name="exact", scores=[score(p, 5)] * 3)
    worse = Arm(name="worse", scores=[score(p - 0.01, 5)] * 3)
    found = summary(compared(exact, worse), range(3))
    assert found["perplexity_ratio"] == pytest.approx([math.exp(0.01)] * 3)
    assert found["perplexity"] == pytest.approx([math.exp(0.01 - p[:, 0].mean())] * 3)
    assert found["logprob_change_abs"] == pytest.approx([0.01] * 3)


def a_result(
    prompts: Prompts, int8: float, fp8: float | None, unavailable: dict[str, str], greedy: bool = True
) -> dict[str, Any]:
    """What `run` writes, of answers whose log-probabilities differ from exact ones by so much."""
    exact = [score(random_logprobs(number), 10) for number in range(len(prompts.prompts))]

    def arm(name: str, distance: float, against: str | None = "exact (bf16)") -> Arm:
        near = [evolve(s, logprobs=s.logprobs - distance, true=s.true - distance) for s in exact]
        answers = [Greedy(tokens=(1, 2), ended=False)] * len(near) if greedy else None
        return Arm(name=name, against=against, scores=near, greedy=answers)

    arms = [arm("exact (bf16)", 0, None), arm("int8", int8), *([] if fp8 is None else [arm("fp8", fp8)])]
    return {
        "model": {"name": "a model"},
        "hardware": "a machine",
        "versions": {"hiqcache": "1"},
        "settings": {"scored_tokens": 20, "arithmetic": "float32, KV in BF16"},
        "prompts": [{}] * len(prompts.prompts),
        **summarise(prompts.prompts, {arm.name: arm for arm in arms}, unavailable),
    }


@pytest.mark.parametrize(
    ("int8", "fp8", "perplexity", "kl_over_fp8"),
    [(0.0015, 0.1, True, True), (0.0025, 0.1, False, True), (0.0015, 0.0016, True, False), (0.0015, None, True, None)],
)
def test_bars(int8, fp8, perplexity, kl_over_fp8):
    result = a_result(some_prompts(), int8, fp8, {})
    assert result["bars"]["int8: perplexity"]["holds"] is perplexity
    assert result["bars"]["int8: kl_over_fp8"]["holds"] is kl_over_fp8
    assert bars({}, range(3)) == {}


def test_bars_of_the_small_formats():
    """Half of the prompts have twice the KL of the other half, so an interval is as wide as they are few."""

    def arm(name: str, kl: float, perplexity: float) -> dict[str, Any]:
        prompts = [{"kl": kl * (1 if name == "fp8" else 0.5 + number % 2)} for number in range(20)]
        return {"prompts": prompts, "all": {"perplexity_ratio": [perplexity, perplexity - 1e-3, perplexity + 1e-3]}}

    def holds(**kl: float) -> dict[str, Any]:
        found = bars({name: arm(name, each, 1.003) for name, each in kl.items()}, range(20))
        return {name: bar["holds"] for name, bar in found.items()}

    assert holds(k6v4=0.5, int4=0.4, fp8=1.0, nvfp4=1.0) == {
        "k6v4: perplexity": True,
        "k6v4: kl_over_fp8": True,
        "int4: perplexity": True,
        "int4: kl_over_nvfp4": True,
    }
    assert holds(k6v4=0.9, fp8=1.0)["k6v4: kl_over_fp8"] is False, "its interval reaches beyond 1"
    assert holds(int4=0.46, nvfp4=1.0)["int4: kl_over_nvfp4"] is False
    assert holds(int4=0.46, fp8=1.0)["int4: kl_over_nvfp4"] is None


def quality_command(*arguments: object) -> Result:
    return CliRunner().invoke(quality.main, list(map(str, arguments)))


def test_report_and_plot(tmp_path):
    result = a_result(some_prompts(), 0.001, None, {"fp8": "no such arithmetic here"})
    (tmp_path / "result.json").write_text(json.dumps(result))
    report = quality_command("report", tmp_path / "result.json")
    assert report.exit_code == 0, report.output
    row = next(line for line in report.output.splitlines() if line.startswith("| int8"))
    assert row.count("|") == 7
    assert "+0.100% (+0.100% to +0.100%)" in row
    assert "fp8: not measured, no such arithmetic here" in report.output
    assert "at most the limit (0.5): not measured" in report.output
    plot = quality_command("plot", tmp_path / "result.json", "--out", tmp_path / "result.svg")
    assert plot.exit_code == 0, plot.output
    assert "<svg" in (tmp_path / "result.svg").read_text()

    result = a_result(some_prompts(), 0, None, {})  # nothing differs from exact KV
    (tmp_path / "result.json").write_text(json.dumps(result))
    plot = quality_command("plot", tmp_path / "result.json", "--out", tmp_path / "same.svg")
    assert plot.exit_code == 0, plot.output


def test_report_and_plot_without_greedy_answers(tmp_path):
    result = a_result(some_prompts(), 0.001, 0.1, {}, greedy=False)
    (tmp_path / "result.json").write_text(json.dumps(result))
    report = quality_command("report", tmp_path / "result.json")
    assert report.exit_code == 0, report.output
    assert "arithmetic: float32, KV in BF16" in report.output
    assert "| int8 | exact (bf16) |" in report.output
    assert "whole answer" not in report.output
    plot = quality_command("plot", tmp_path / "result.json", "--out", tmp_path / "result.svg")
    assert plot.exit_code == 0, plot.output
    assert "greedy" not in (tmp_path / "result.svg").read_text()


def test_the_page_has_the_table_of_small_formats():
    result = json.loads((DOCS / "results/error-sources-small-formats.json").read_text())
    page = (DOCS / "quality.md").read_text()
    for table in error_sources.below_8_bits(result)[:2]:
        assert table in page, table


def test_a_picture_of_the_choice(tmp_path):
    arguments = [DOCS / "results/error-sources-small-formats.json", "--out", tmp_path / "choice.svg"]
    drawn = CliRunner().invoke(error_sources.main, ["choice", *map(str, arguments)])
    assert drawn.exit_code == 0, drawn.output
    assert "NVFP4" in (tmp_path / "choice.svg").read_text()


@pytest.mark.parametrize(
    ("report", "file"),
    [(quality.main, "quality-smollm2-h200.json"), (error_sources.main, "error-sources-smollm2.json")],
)
def test_the_tables_of_the_page_are_those_of_the_results(report, file):
    page = (DOCS / "quality.md").read_text()
    said = CliRunner().invoke(report, ["report", str(DOCS / "results" / file)]).output
    tables = [part for part in said.strip().split("\n\n") if part.startswith("|")]
    assert len(tables) >= 3
    assert [table for table in tables if table not in page] == []


def test_the_sentences_of_the_page_are_those_of_the_results():
    page = " ".join((DOCS / "quality.md").read_text().split())
    served, study = (
        json.loads((DOCS / "results" / name).read_text())
        for name in ("quality-smollm2-h200.json", "error-sources-smollm2.json")
    )
    kl = {name: np.array([entry["kl"] for entry in arm["prompts"]]) for name, arm in served["arms"].items()}

    def ratio(name: str, other: str) -> list[float]:
        return estimate(lambda chosen: kl[name][chosen].mean(-1) / kl[other][chosen].mean(-1), range(80))

    assert "KL is {:.2f} times ({:.2f} to {:.2f}) that of computing".format(*ratio("int8", "recomputed")) in page
    assert "changes {:.1f} times as much** ({:.1f} to {:.1f})".format(*ratio("fp8", "int8")) in page
    count = len(study["prompts"])
    assert [each["sha256"] for each in study["prompts"]] == [each["sha256"] for each in served["prompts"][:count]]
    assert f"{1e4 * np.mean(study['variants']['int8']['kl_by_prompt']):.2f}e-4 nats, a sixth" in page
    assert f"on the same prompts ({1e4 * kl['int8'][:count].mean():.2f}e-4)" in page
    assert f"({served['arms']['int8 twice']['encoded_per_restored']:.3f} in the run below)" in page
    files = {each["origin"].split(", ")[1] for each in served["prompts"]}
    assert f"from {len(files)} files" in page
    assert not any(entry["ended"] for arm in served["arms"].values() for entry in arm["prompts"] if "ended" in entry)


# Prompts.


def test_prompts_survive_a_file(tmp_path):
    prompts = some_prompts()
    prompts.save(tmp_path / "prompts.json")
    assert Prompts.load(tmp_path / "prompts.json") == prompts


@pytest.mark.parametrize(
    "content", ["no", "[]", "{}", '"text"', '{"prompts": [{"kind": "prose"}]}', "\0", "[" * 100_000, "1" * 5000]
)
def test_a_file_without_prompts_is_refused(content, tmp_path):
    (tmp_path / "prompts.json").write_text(content)
    result = quality_command("run", "--model", tmp_path, "--prompts", tmp_path / "prompts.json", "--out", "x")
    assert result.exit_code == 1
    assert "holds no prompts" in result.output


@pytest.mark.parametrize(("prefix", "tokens"), [(0, (1, 2, 3)), (-1, (1, 2, 3)), (3, (1, 2, 3)), (1, ("a", "b", "c"))])
def test_prompts_that_are_none_are_refused(prefix, tokens):
    with pytest.raises(HiqcacheError, match="its tokens are no ids of a prefix"):
        Prompts(
            tokenizer="", shared_tokens=0, prompts=(Prompt(kind="", origin="", prefix_tokens=prefix, tokens=tokens),)
        )
    with pytest.raises(HiqcacheError, match="there are no prompts"):
        Prompts(tokenizer="", shared_tokens=0, prompts=())


@pytest.mark.parametrize(
    ("of_all", "of_one", "message"),
    [
        ({"shared_tokens": 600}, {}, "'shared_tokens' must be in (0, 1) (got 600)"),  # else nothing need be restored
        ({}, {"kind": ["prose"]}, "'kind' must be <class 'str'>"),
        ({}, {"prefix_tokens": 48.0}, "'prefix_tokens' must be <class 'int'>"),
        ({}, {"prefix_tokens": 0}, "its tokens are no ids of a prefix"),
    ],
)
def test_a_file_of_prompts_with_one_wrong_field_is_refused(of_all, of_one, message, tmp_path):
    some_prompts(4).save(tmp_path / "prompts.json")
    data = json.loads((tmp_path / "prompts.json").read_text()) | of_all
    data["prompts"][1] |= of_one
    (tmp_path / "prompts.json").write_text(json.dumps(data))
    for command in (quality.main, error_sources.main):
        arguments = ["run", "--prompts", tmp_path / "prompts.json", "--model", tmp_path, "--out", tmp_path / "x.json"]
        result = CliRunner().invoke(command, list(map(str, arguments)))
        assert (result.exit_code, message in result.output) == (1, True), result.output


def test_prompts_of_another_model_are_refused(tiny, tmp_path):
    prompts = some_prompts(8)
    first = prompts.prompts[0]
    for number, wrong in enumerate((-1, tiny_model.VOCABULARY)):
        changed = evolve(first, tokens=(*first.tokens[:-1], wrong))
        evolve(prompts, prompts=(changed, *prompts.prompts[1:])).save(tmp_path / f"{number}.json")
        for command in (quality.main, error_sources.main):
            arguments = ["run", "--model", tiny, "--prompts", tmp_path / f"{number}.json", "--count", "2"]
            result = CliRunner().invoke(command, [*map(str, arguments), "--out", str(tmp_path / "x.json")])
            assert result.exit_code == 1
            assert f"has {tiny_model.VOCABULARY} tokens: make prompts for it with" in result.output
    with pytest.raises(HiqcacheError, match="is no folder of a model"):
        prompts.require_ids_of(tmp_path)


def test_a_folder_without_a_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 1024}')
    some_prompts(8).save(tmp_path / "prompts.json")
    arguments = ["run", "--model", tmp_path, "--prompts", tmp_path / "prompts.json", "--count", "2", "--out", "x.json"]
    result = CliRunner().invoke(error_sources.main, list(map(str, arguments)))
    assert result.exit_code == 1
    assert f"cannot load {tmp_path} (--model): " in result.output
    result = quality_command("prompts", "--model", tmp_path, "--out", tmp_path / "x.json")
    assert result.exit_code == 1
    assert f"{tmp_path} has no tokenizer (--model): " in result.output


def test_a_wrong_name_is_refused_before_anything_takes_time(monkeypatch, tmp_path):
    monkeypatch.setattr(quality.sample_model, "fetch", lambda: pytest.fail("downloads the model"))
    result = quality_command("run", "--representation", "nosuch", "--out", tmp_path / "x.json")
    assert result.exit_code == 1
    assert "unknown representation 'nosuch'" in result.output


def test_prompts_that_serve_one_another_are_refused():
    prompts = some_prompts()
    with pytest.raises(HiqcacheError, match="share more than 0 leading tokens"):
        evolve(prompts, prompts=(*prompts.prompts, prompts.prompts[0]))
    shorter = evolve(prompts.prompts[0], tokens=prompts.prompts[0].tokens[:-1])
    with pytest.raises(HiqcacheError, match="differ in length"):
        evolve(prompts, prompts=(shorter, *prompts.prompts[1:]))


def test_too_few_prompts_are_refused():
    with pytest.raises(HiqcacheError, match="2 prompts of 192 tokens do not push one another out of an L1 of 248"):
        Run(some_prompts(2))


def test_a_refused_run_leaves_nothing(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    some_prompts(4).save(tmp_path / "prompts.json")
    arguments = ["run", "--model", tiny, "--prompts", tmp_path / "prompts.json", "--count", "1"]
    result = quality_command(*arguments, "--out", tmp_path / "x.json")
    assert result.exit_code == 1
    assert "1 prompts of 72 tokens do not push one another out" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.json"]


def test_recomputed_cuts_prefixes_and_no_continuation():
    assert Run(some_prompts(continuation=24)).small_pieces == 24
    assert Run(some_prompts(continuation=4)).small_pieces == 16


@pytest.mark.parametrize("names", [["int8", "int8"], ["bf16", "int8"]])
def test_no_server_is_started_twice(names):
    names = [plan.name for plan in Run(some_prompts()).plans(names)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("gpu", "float32", "attention", "arithmetic"),
    [
        (True, False, "triton", []),
        (True, True, "torch_native", ["--dtype", "float32", "--kv-cache-dtype", "bf16"]),
        (False, False, "torch_native", ["--dtype", "float32", "--kv-cache-dtype", "bf16"]),
    ],
)
def test_float32_keeps_kv_in_bf16(gpu, float32, attention, arithmetic, monkeypatch, tmp_path):
    """The words of a server: on a GPU an attention that does not round float32 queries to BF16."""
    commands = []

    @contextlib.contextmanager
    def http(command, log, port, variables):
        commands.append(command)
        yield quality.HttpServer("http://nowhere", 0)

    monkeypatch.setattr(quality, "http", http)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    (plan,) = (each for each in Run(some_prompts(), float32).plans(["int8"]) if each.name == "int8")
    with Progress(disable=True) as progress:
        quality.serve(evolve(plan, measure=lambda client: []), tmp_path, 0, tmp_path / "log", progress, Event())
    (words,) = commands
    assert words[words.index("--attention-backend") + 1] == attention
    for flag in ("--dtype", "--kv-cache-dtype"):
        assert words.count(flag) == (flag in arithmetic)
        if arithmetic:
            assert words[words.index(flag) + 1] == arithmetic[arithmetic.index(flag) + 1]


@pytest.mark.parametrize("float32", [False, True])
def test_float32_scores_and_generates_nothing(float32):
    """Every arm asks as often as its bar of progress says, and never for an answer in float32."""
    asked: list[str] = []

    class Asked:
        server = None

        def fill(self, prompt):
            asked.append("fill")

        restore = fill

        def score(self, prompt, source):
            asked.append("score")
            return score(random_logprobs(1), 5)

        def continue_greedily(self, prompt, source):
            asked.append("generate")
            return Greedy(tokens=(1,), ended=False)

    for plan in Run(some_prompts(), float32).plans(["int8"]):
        if plan.name == quality.after_trips("int8"):
            continue  # it reads the server's counters
        asked.clear()
        arms = plan.measure(Asked())  # pyright: ignore[reportArgumentType]
        assert len(asked) == plan.answers
        assert ("generate" in asked) is not float32
        assert all((arm.greedy is None) is float32 for arm in arms)


def test_passages_start_lines_with_tokens_of_their_own():
    #       line 1          line 2       line 3             line 4
    tokens = [1, 2, 3, 4, 1, 6, 7, 5, 8, 9, 10, 11, 12, 13, 14]
    spans = [(number, number + 1) for number in range(len(tokens))]
    text = _Text(SOURCES[0], "a file", tokens, spans, line_starts={0, 4, 7, 12})
    assert text.cut(3, taken={0}) == (0, 3)
    assert text.cut(3, taken={0, 1}) == (7, 10)  # token 1 starts a prompt already
    assert text.cut(4, taken={0, 1, 5}) is None


# Refusals of a client.


class Answers:
    """Stands in for `requests`: gives prepared answers."""

    def __init__(self, **meta: Any):
        self.ok, self.meta = True, {"finish_reason": {"type": "length"}, **meta}

    def post(self, url: str, json: dict[str, Any], timeout: float) -> "Answers":
        return self

    def json(self) -> dict[str, Any]:
        return {"meta_info": self.meta, "output_ids": [1]}


@pytest.fixture
def client(monkeypatch):
    def make(shared: int = 0, **meta: Any) -> Client:
        monkeypatch.setattr(quality, "requests", Answers(**meta))
        return Client(quality.HttpServer("http://nowhere", 0), shared, lambda: None)

    return make


@pytest.mark.parametrize(
    ("device", "host", "shared", "source", "accepted"),
    [
        (0, 48, 0, "host", True),
        (0, 47, 0, "host", False),
        (1, 47, 0, "host", False),
        (1, 47, 1, "host", True),
        (48, 0, 0, "host", False),
        (48, 0, 0, "device", True),
        (0, 48, 0, "device", False),
        (48, 1, 0, "device", False),
    ],
)
def test_a_prefix_from_elsewhere_is_refused(client, device, host, shared, source, accepted):
    asked = client(shared, cached_tokens_details={"device": device, "host": host})
    if accepted:
        assert asked.continue_greedily(some_prompts().prompts[0], source) == Greedy(tokens=(1,), ended=False)
    else:
        with pytest.raises(NotMeasured, match=f"{device} came from L1 and {host} from L2.*nothing is reported"):
            asked.continue_greedily(some_prompts().prompts[0], source)


def test_a_prefix_that_was_cached_already_is_refused(client):
    client(cached_tokens_details=None).fill(some_prompts().prompts[0])
    with pytest.raises(NotMeasured, match="wanted nothing cached"):
        client(cached_tokens_details={"device": 3, "host": 0}).fill(some_prompts().prompts[0])


def test_scores_are_of_the_continuation(client):
    prompt = some_prompts(continuation=4).prompts[0]
    following = prompt.tokens[-3:]
    meta = {
        "cached_tokens_details": {"device": 0, "host": 48},
        "input_token_logprobs": [[None, prompt.tokens[48], None], *([-1.5, token, None] for token in following)],
        "input_top_logprobs": [None, *([[-0.5, 3, None], [-1.5, token, None]] for token in following)],
    }
    found = client(**meta).score(prompt, "host")
    assert found.true.tolist() == [-1.5] * 3
    assert found.ids.tolist() == [[3, token] for token in following]
    with pytest.raises(NotMeasured, match="scored 2 tokens other than the 3 after random"):
        client(**meta | {"input_token_logprobs": meta["input_token_logprobs"][:-1]}).score(prompt, "host")


@pytest.mark.parametrize("wrong", [None, float("nan"), float("-inf")])  # SGLang's JSON has null where it has NaN
@pytest.mark.parametrize("field", ["input_token_logprobs", "input_top_logprobs"])
def test_scores_that_are_no_numbers_are_refused(client, field, wrong):
    prompt = some_prompts(continuation=4).prompts[0]
    meta: dict[str, Any] = {
        "cached_tokens_details": {"device": 0, "host": 48},
        "input_token_logprobs": [[None, 0, None], *([-1.5, token, None] for token in prompt.tokens[-3:])],
        "input_top_logprobs": [None, *([[-0.5, 3, None]] for _ in range(3))],
    }
    client(**meta).score(prompt, "host")
    entry = meta[field][2]
    (entry if field == "input_token_logprobs" else entry[0])[0] = wrong
    with pytest.raises(NotMeasured, match="log-probabilities after random are not all numbers"):
        client(**meta).score(prompt, "host")


# Failures and Ctrl-C.

ENDLESS = 10_000
"""Answers that nobody stopped, 20 ms each."""


def plans_of(*measures: Any) -> list[Plan]:
    return [Plan(name=str(n), l1_tokens=1, chunk=1, measure=m, answers=1) for n, m in enumerate(measures)]


@pytest.mark.parametrize("error", [NotMeasured("a prefix from elsewhere"), KeyboardInterrupt()])
def test_after_a_failure_no_other_server_is_asked_to_the_end(error, monkeypatch, tmp_path):
    asked, started = [], Event()

    @contextlib.contextmanager
    def http(command, log, port, variables):
        yield quality.HttpServer("http://nowhere", 0)

    def fails(client):
        assert started.wait(300)
        raise error

    def endless(client):
        started.set()
        while len(asked) < ENDLESS:
            asked.append(None)
            client.asked()
            time.sleep(0.02)
        return []

    def never(client):
        pytest.fail("a server started after the failure")

    monkeypatch.setattr(quality, "http", http)
    monkeypatch.setattr(Run, "plans", lambda self, names: plans_of(endless, fails, never))
    with pytest.raises(type(error)) as raised:
        quality.run_all(Run(some_prompts()), tmp_path, ["int8"], at_once=2, logs=tmp_path)
    assert 0 < len(asked) < ENDLESS
    if isinstance(error, NotMeasured):
        assert str(raised.value).startswith("1: a prefix from elsewhere; its log is ")


def test_a_run_that_is_terminated_ends_its_servers(tiny, tmp_path, monkeypatch):
    ended = []

    @contextlib.contextmanager
    def http(command, log, port, variables):
        try:
            yield quality.HttpServer("http://nowhere", 0)
        finally:
            ended.append(port)

    waiting, asked = Event(), []

    def as_completed(futures):
        waiting.set()
        return concurrent.futures.as_completed(futures)

    def endless(client):
        assert waiting.wait(300)
        os.kill(os.getpid(), signal.SIGTERM)
        while len(asked) < ENDLESS:
            asked.append(None)
            client.asked()
            time.sleep(0.02)
        return []

    monkeypatch.setattr(quality, "http", http)
    monkeypatch.setattr(quality, "as_completed", as_completed)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Run, "plans", lambda self, names: plans_of(endless))
    some_prompts().save(tmp_path / "prompts.json")
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        arguments = ["run", "--model", tiny, "--prompts", tmp_path / "prompts.json", "--out", tmp_path / "x.json"]
        result = quality_command(*arguments)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "Aborted!" in result.output
    assert len(ended) == 1
    assert len(asked) < ENDLESS
    assert not (tmp_path / "x.json").exists()


# For real.


@pytest.mark.slow
@pytest.mark.sweep
def test_real_restores(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(quality, "GENERATED", 8)
    prompts, names = some_prompts(), ("int8", "int4")
    wanted = {each for name in names for each in (name, quality.after_trips(name))}
    plans = [plan for plan in Run(prompts).plans(names) if plan.name in wanted]
    with Progress(disable=True) as progress, ThreadPoolExecutor(2) as pool:
        served = [pool.submit(quality.serve, plan, tiny, 0, tmp_path / plan.name, progress, Event()) for plan in plans]
        arms = {arm.name: arm for future in served for arm in future.result()}
    assert arms.keys() == wanted | {f"exact ({name})" for name in wanted}
    for name in names:
        often = quality.after_trips(name)
        entries = {each: compared(arms[f"exact ({each})"], arms[each]) for each in (name, often)}
        assert 0 < summary(entries[name], range(18))["kl"][0] < (0.01 if name == "int8" else 0.2)
        assert (arms[often].encoded_per_restored or 0) >= 0.9
        # Encoding what was decoded gives the same bytes, so the model sees the same KV.
        assert [entry["kl"] for entry in entries[name]] == [entry["kl"] for entry in entries[often]]
        assert all(len(answer.tokens) == 8 or answer.ended for answer in arms[name].greedy or ())


# Where the error comes from.


def test_variants_of_the_format():
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(50, 3, 64, generator=generator) * 3).bfloat16().float()
    place = {part: error_sources.Place(part, 0, torch.ones(3, 64)) for part in Part}
    variants = {name: variant.code for name, variant in error_sources.VARIANTS.items()}
    error = {name: float((code(x, place[Part.K]) - x).square().mean()) for name, code in variants.items()}

    # The quantiser's error is uniform over a step of absmax / 127.
    steps = x.abs().amax(-1) / 127
    assert error["quantiser"] == pytest.approx(float(steps.square().mean() / 12), rel=0.05)
    assert error["quantiser"] < error["int8"] < 1.2 * error["quantiser"]
    assert error["groups of 16"] < error["groups of 32"] < error["int8"] < error["FP8 per head"]
    assert torch.equal(variants["K only"](x, place[Part.V]), x)
    assert torch.equal(variants["V only"](x, place[Part.V]), variants["int8"](x, place[Part.V]))

    turn = error_sources.hadamard(x)
    assert torch.allclose(turn @ turn.T, torch.eye(64), atol=1e-6)
    outlier = torch.zeros(1, 3, 64)
    outlier[..., 0], outlier[..., 1:] = 100, 0.3
    lost = {name: float((variants[name](outlier, place[Part.K]) - outlier)[..., 1:].abs().mean()) for name in variants}
    assert lost["Hadamard"] < 0.5 * lost["int8"] == pytest.approx(0.15)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("levels", [15, 16, 64])
def test_a_grid_has_the_error_of_its_step(levels):
    y = normal(4000, 128)
    grid = Grid(levels, 32, 7)
    coded = grid.encode(y)
    wrong = grid.decode(coded) - y
    steps = coded[..., -2]
    assert float(wrong.square().mean()) == pytest.approx(float(steps.square().mean() / 12), rel=0.05)
    assert (wrong.unflatten(-1, (-1, 32)).abs() <= 0.51 * steps[..., None]).all()
    assert coded[..., :-2].unique().tolist() == list(range(levels))
    largest = y.unflatten(-1, (-1, 32)).abs().amax(-1)
    assert (steps / (largest / ((levels - 1) / 2)) - 1).abs().max() <= 2**-8
    assert (grid.decode(grid.encode(torch.zeros(1, 128))).abs() < 2.0**-90).all()


def test_a_small_group_has_a_scale_near_the_largest():
    y = torch.cat([normal(100, 16), 0.01 * normal(100, 16, seed=1)], dim=-1)
    scales = Grid(16, 16, 3).encode(y)[..., -2]
    assert torch.equal(scales[:, 1], 2.0 ** (scales[:, 0].log2().floor() - 3))


def test_the_largest_of_a_head_of_128():
    largest = [normal(40_000, dim).abs().amax(-1).square().mean().sqrt() for dim in (64, 128)]
    assert float(largest[1] / largest[0]) == pytest.approx(small_formats.WIDER[64], abs=0.003)


def test_what_a_second_trip_changes():
    x = (3 * normal(4000, 2, 128)).bfloat16().float()
    x[:2000, :, ::8] += 20 * normal(2000, 2, 16, seed=1).bfloat16().float()  # and some heads with large channels
    x = x.bfloat16().float()
    for name in ("k6v4", "k6v4, groups", "k6v4, signed", "k5v5", "k5v4", "k5v4, small", "int4", "int4, signed"):
        for codec in error_sources.FORMATS[name].codecs:
            assert isinstance(codec, Rotated)
            assert small_formats.changed(codec, x) == 0, name
    (fine, _) = error_sources.FORMATS["k6v4, 0 is a code"].codecs
    assert isinstance(fine, Rotated)
    assert 0 < small_formats.changed(fine, x) < 0.2


def test_a_signed_scale_has_the_largest_as_the_outermost_number():
    y = normal(4000, 64)
    plain, signed = Grid(16, 16, 3), Grid(16, 16, 3, signed=True)
    coded = signed.encode(y)
    raised = coded[..., -2].abs() <= 2.0 ** (coded[..., -2].abs().amax(-1, keepdim=True).log2().floor() - 3)
    groups, codes = y.unflatten(-1, (-1, 16)), coded[..., :-2]
    outermost = codes.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0]
    assert (outermost[~raised] == 0).all()
    assert (signed.decode(coded).unflatten(-1, (-1, 16))[codes == 8] == 0).all()
    error = {grid.signed: float((grid.decode(grid.encode(y)) - y).square().mean()) for grid in (plain, signed)}
    assert error[True] < 0.95 * error[False]


def test_an_offset_takes_the_least_squared_error():
    y = normal(2000, 64)
    plain, searched = Grid(16, 16, 3), Grid(16, 16, 3, offset=True)
    error = {grid.offset: float((grid.decode(grid.encode(y)) - y).square().mean()) for grid in (plain, searched)}
    assert error[True] < 0.75 * error[False]
    moved = y.unflatten(-1, (-1, 16)) + 2
    assert set(searched.encode(moved.flatten(-2))[..., -1].unique().tolist()) <= set(range(-4, 4))


@pytest.mark.parametrize(
    ("name", "bits", "of_a_head"),
    [
        ("k6v4", (6, 4), 2),
        ("k6v4, groups", (6, 4), 2),
        ("k6v4, signed", (6, 4), 2),
        ("k5v4", (5, 4), 2),
        ("k5v4, small", (5, 4), 1),
        ("k5v5", (5, 5), 2),
        ("int4", (4, 4), 2),
        ("int4, signed", (4, 4), 2),
    ],
)
def test_bytes_of_the_candidates(name, bits, of_a_head):
    """Codes; a scale for a head, or a byte for each group and one for the head."""
    candidate, total = error_sources.FORMATS[name], 0
    for codec, width in zip(candidate.codecs, bits, strict=True):
        assert isinstance(codec, Rotated)
        assert codec.grid.levels == 2**width
        total += 8 * (128 * width // 8 + (of_a_head if codec.grid.group is None else 128 // codec.grid.group + 1))
    assert candidate.bytes == total


@pytest.mark.parametrize("cls", [Int8, K6V4, Int4, NVFP4])
def test_pages_do_not_change_values(cls):
    """Rows are coded alone, so pages of 64 give what pages of 1 give, the last one half empty."""
    x = normal(100, 8, 64).bfloat16().float()
    for part in Part:
        place = error_sources.Place(part, 0, torch.ones(8, 64))
        paged = error_sources.through(cls, page_size=64)(x, place)
        assert paged.shape == x.shape
        assert torch.equal(paged, error_sources.through(cls)(x, place))


def test_a_hadamard_matrix_is_made_once():
    x = normal(3, 64)
    assert small_formats.hadamard(x) is small_formats.hadamard(x[:1])
    assert small_formats.hadamard(x).shape == (64, 64)
    assert small_formats.hadamard(x.double()).dtype == torch.float64


def test_exponents_of_biased_channels():
    k = normal(4000, 1, 8)
    k[..., 1] += 30
    k[..., 5] += 40  # the other half of its RoPE pair: an amplitude of 50, and 50 / 3 is next to 16
    assert error_sources.exponents(k).tolist() == [[1, 16, 1, 1, 1, 16, 1, 1]]


def test_exponents_bear_biases(monkeypatch):
    monkeypatch.setattr("key_biases.HEADS", 2)
    monkeypatch.setattr(error_sources, "BIASES", (0, 151))
    errors = error_sources.biased(error_sources.FORMATS["k6v4"])
    for place in ("low", "random"):
        assert errors["exponents"][place][0] == errors["as it is"][place][0] < 0.12
        assert errors["exponents"][place][1] < 0.15 < 0.5 < errors["as it is"][place][1]


def test_a_study_of_a_small_model(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("key_biases.HEADS", 2)
    monkeypatch.setattr(error_sources, "BIASES", (0, 60))
    prompts = some_prompts(6)
    prompts.save(tmp_path / "prompts.json")
    out = tmp_path / "study.json"
    arguments = ["run", "--model", tiny, "--prompts", tmp_path / "prompts.json", "--count", 2, "--out", out]
    result = CliRunner().invoke(error_sources.main, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    study = json.loads(out.read_text())
    variants = study["variants"]
    assert variants["K only"]["relative_error"]["v"] == {"once": 0, "twice": 0}
    assert variants["int8"]["relative_error"]["k"]["once"] == variants["int8"]["relative_error"]["k"]["twice"]
    assert 0.003 < variants["int8"]["relative_error"]["k"]["once"] < 0.01
    assert 0 < variants["int8"]["kl"][0] < variants["FP8"]["kl"][0]
    assert sum(study["sources"]["k"].values()) == pytest.approx(1)
    assert np.array(study["int8_relative_error"]["k"]).shape == (tiny_model.LAYERS, tiny_model.HEADS)
    formats = study["formats"]
    for part in ("k", "v"):
        error = formats["int4"]["relative_error"][part]
        assert error["1"] == error["2"] == error["8"]
        assert formats["int4"]["groups_changed"][part] == 0
    assert formats["int8 rotated"]["kl"][0] < formats["k6v4"]["kl"][0] < formats["int4"]["kl"][0]
    for name in formats:
        assert f"| {name} |" in result.output
    by_layer = study["by_layer"]
    assert list(by_layer) == ["int8", "k6v4", "int4", "nvfp4"]
    for part in ("k", "v"):
        # Both prompts are measured layer by layer, and int8's values are the same at any page size.
        assert by_layer["int8"][part] == pytest.approx(np.mean(study["int8_relative_error"][part], axis=1))
        assert np.mean(by_layer["int4"][part]) == pytest.approx(formats["int4"]["relative_error"][part]["1"], rel=0.1)
    row = next(line for line in result.output.splitlines() if line.startswith("| 0 |"))
    assert [cell.strip() for cell in row.split("|")[2:-1]] == [
        f"{of[part][0]:.2%}" for of in by_layer.values() for part in ("k", "v")
    ]
    assert "attention output's error at key biases of 0 / 60" in result.output
    plot = CliRunner().invoke(error_sources.main, ["plot", str(out), "--out", str(tmp_path / "study.svg")])
    assert plot.exit_code == 0, plot.output
    assert "<svg" in (tmp_path / "study.svg").read_text()
