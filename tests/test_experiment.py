"""The experiments: their sizes, what they refuse to compare, their order, and a small one on a real server."""

import json
import multiprocessing
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import experiment
import experiment_report
import pytest
import tiny_model
import torch
from click.testing import CliRunner
from counters import RESTORE_TOKENS, metric
from experiment import Broken, Clock, Configuration, Experiment, Refused, Result, Server, Workload
from servers import QWEN3_8B, write_tokenizer

from hiqcache.backends.bf16 import Bf16
from hiqcache.backends.int8 import Int8
from hiqcache.capacity import tokens_of_ratio, tokens_of_size
from hiqcache.geometry import KVGeometry

DOCS = Path(__file__).parents[1] / "docs"
GEOMETRY = KVGeometry(layers=36, heads=8, head_dim=128, v_head_dim=128, page_size=1)
WORKLOAD = Workload(groups=32, prompts_per_group=4, prefix=2048, question=128, output=32, concurrency=8)


def option(configuration: Configuration, flag: str) -> str:
    return configuration.arguments[configuration.arguments.index(flag) + 1]


# -- sizes -----------------------------------------------------------------------------------------------------------


def test_the_shape_is_qwen3_8b():
    shape = [QWEN3_8B[key] for key in ("num_hidden_layers", "num_key_value_heads", "head_dim")]
    assert shape == [GEOMETRY.layers, GEOMETRY.heads, GEOMETRY.head_dim]


def test_equal_capacity_is_what_8_gb_hold_in_bf16():
    found = experiment.full_size()["equal-capacity"]
    sizes = {}
    for configuration, representation in zip(found.configurations, (Bf16, Int8), strict=True):
        assert option(configuration, "--hicache-representation") == representation.name
        tokens = tokens_of_ratio(float(option(configuration, "--hicache-ratio")), configuration.l1_tokens, 1)
        sizes[representation.name] = (tokens, tokens * representation(GEOMETRY).bytes_per_token())
    assert sizes == {"bf16": (54_254, 8_000_077_824), "int8": (54_254, 4_500_043_776)}


def test_equal_budget_differs_in_l2_alone():
    found = {c.name: c for c in experiment.full_size()["equal-budget"].configurations}
    assert list(found) == ["no-l2", "stock", "bf16", "int8", "fp8-kv", "fp8-kv-l1x2"]
    assert [c.l1_tokens for c in found.values()] == [16_384] * 5 + [32_768]
    assert [c.has_l2 for c in found.values()] == [False] + [True] * 5
    assert [c.uses_hiqcache for c in found.values()] == [False, False, True, True, False, False]
    for configuration in list(found.values())[1:]:
        assert option(configuration, "--hicache-size") == "8"
        assert option(configuration, "--hicache-write-policy") == "write_back"
    assert option(found["fp8-kv"], "--kv-cache-dtype") == "fp8_e4m3"


def test_the_workload_lies_between_the_two_capacities():
    """Else the experiment would be refused after minutes of starting servers."""
    workload = experiment.full_size()["equal-budget"].workload
    assert workload == WORKLOAD
    assert workload.requests == 128
    assert tokens_of_size(8, 147_456, 1) < workload.reusable_tokens == 65_536 < tokens_of_size(8, 82_944, 1)


def test_the_formats_meet_at_a_working_set_between_their_capacities():
    found = experiment.full_size()["formats"]
    assert [c.name for c in found.configurations] == ["stock", "int8", "k6v4", "int4", "fp8-kv"]
    assert found.page_size == 64
    sizes = {"int8": 74_880, "k6v4": 48_096, "int4": 42_048}
    held = {name: tokens_of_size(8, size, 64) for name, size in sizes.items()}
    assert held == {"int8": 106_880, "k6v4": 166_336, "int4": 190_272}
    assert held["int8"] < found.workload.reusable_tokens == 131_072 < held["k6v4"]


def test_experiments_of_different_page_sizes_are_not_run_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(experiment, "end_servers_on_sigterm", lambda: None)
    result = CliRunner().invoke(experiment.main, ["run", "formats", "crossover", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "formats, crossover have different page sizes; run one at a time" in " ".join(result.output.split())


def test_the_small_budgets_are_equal(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_model.CONFIG))
    found = experiment.small_size(tmp_path)["equal-budget"].configurations
    ratios = {c.name: float(option(c, "--hicache-ratio")) for c in found if c.has_l2}
    # 3 heads x 64 in BF16 are 384 bytes; in INT8 192 and 6 of scales, padded to 256.
    assert ratios["int8"] / ratios["bf16"] == pytest.approx(384 / 256)


def test_bench_serving_takes_the_workload():
    words = " ".join(WORKLOAD.options(seed=7))
    assert words == (
        "--dataset-name generated-shared-prefix --tokenize-prompt --gsp-num-groups 32 --gsp-prompts-per-group 4 "
        "--gsp-system-prompt-len 2048 --gsp-question-len 128 --gsp-output-len 32 --max-concurrency 8 --seed 7"
    )


def test_the_crossover_goes_from_half_the_smallest_l2_to_twice_the_largest():
    found = experiment.full_size()["crossover"]
    servers = [server("stock", l2=54_254), server("int8", l2=96_451)]
    sizes = [workload.reusable_tokens for workload in experiment.points(found, servers)]
    assert sizes == sorted(set(sizes))
    assert len(sizes) == 7
    assert sizes[0] == pytest.approx(54_254 / 2, abs=2048 / 2)
    assert sizes[-1] == pytest.approx(2 * 96_451, abs=2048 / 2)


def test_only():
    both = [experiment.full_size()[name] for name in ("equal-budget", "crossover")]
    kept = experiment.keep(both, ["stock", "bf16"])
    assert [[c.name for c in one.configurations] for one in kept] == [["stock", "bf16"], ["stock"]]
    with pytest.raises(experiment.click.BadParameter, match="saw int7; allowed: bf16, fp8-kv"):
        experiment.keep(both, ["int7"])


def test_the_arithmetic_on_the_page():
    one, two = GEOMETRY, attrs.evolve(GEOMETRY, heads=4, tp_size=2)
    sizes = [representation(geometry).bytes_per_token() for geometry in (one, two) for representation in (Bf16, Int8)]
    assert sizes == [147_456, 82_944, 73_728, 46_080]
    numbers = [*sizes, *(tokens_of_size(8, sizes[index], 1) for index in (0, 1, 3)), WORKLOAD.reusable_tokens]
    numbers += [54_254 * size for size in sizes[:2]]
    page = (DOCS / "experiments.md").read_text()
    assert not [number for number in numbers if f"{number:,}" not in page]


# -- counters --------------------------------------------------------------------------------------------------------


def test_a_counter_is_summed_over_its_labels_and_not_mixed_with_others():
    page = f"""# HELP {RESTORE_TOKENS} Tokens
# TYPE {RESTORE_TOKENS} counter
{RESTORE_TOKENS}{{model_name="a{{b",pool="kv"}} 1.5e+03
{RESTORE_TOKENS}{{model_name="a",pool="other"}} 2.0
{RESTORE_TOKENS}_created{{model_name="a"}} 1.7e+09
sglang:load_back_tokens 7.0
"""
    assert metric(page, RESTORE_TOKENS) == 1502
    assert metric(page, "sglang:none") == 0


# -- refusing --------------------------------------------------------------------------------------------------------


def server(
    name: str, *, l1: int = 16_384, l2: int = 0, size: float = 0, report: dict[str, Any] | None = None
) -> Server:
    arguments = ("--enable-hierarchical-cache",) if l2 else ()
    http: Any = SimpleNamespace(url="http://nowhere")
    return Server(Configuration(name, 16_384, arguments), http, [], l1, report, l2, size)


BF16, INT8 = server("bf16", l2=54_254, size=147_456), server("int8", l2=96_451, size=82_944)


def budget(workload: Workload = WORKLOAD, *, points: int = 0) -> Experiment:
    return Experiment("equal-budget", (), workload, "bytes", points)


def test_what_can_be_compared():
    experiment.check_servers(budget(), [server("no-l2"), BF16, INT8])
    smaller = server("int8", l2=54_254, size=82_944)
    experiment.check_servers(Experiment("equal-capacity", (), WORKLOAD, "tokens"), [BF16, smaller])


@pytest.mark.parametrize(
    ("found", "servers", "message"),
    [
        (budget(), [server("no-l2"), INT8], r"1 server\(s\) with an L2; comparing takes two"),
        (budget(), [BF16, server("int8", l1=9_000, l2=96_451, size=82_944)], "L1 of 9,000 tokens, 16,384 were asked"),
        (budget(), [BF16, server("int8", l2=54_254, size=82_944)], "bf16 8,000,077,824, int8 4,500,043,776"),
        (Experiment("a", (), WORKLOAD, "tokens"), [BF16, INT8], "these hold bf16 54,254, int8 96,451"),
        (budget(attrs.evolve(WORKLOAD, groups=8)), [BF16, INT8], "16,384 tokens fits into L1"),
        (budget(attrs.evolve(WORKLOAD, groups=26)), [BF16, INT8], "53,248 tokens fits into every L2"),
    ],
)
def test_servers_that_cannot_be_compared(found: Experiment, servers: list[Server], message: str):
    with pytest.raises(Refused, match=message):
        experiment.check_servers(found, servers)


def test_a_crossover_may_begin_with_what_fits():
    experiment.check_servers(budget(attrs.evolve(WORKLOAD, groups=8), points=3), [BF16, INT8])


def a_run(**more: Any) -> dict[str, Any]:
    return {
        "experiment": "equal-budget",
        "configuration": "int8",
        "repeat": 1,
        "workload": attrs.asdict(WORKLOAD),
        "prompt_tokens": 278_528,
        "from_l1_tokens": 20_000,
        "from_l2_tokens": 100_000,
        "l2_used_tokens": 90_000,
        "backup_tokens": 80_000,
        "backup_bytes": 80_000 * 82_944,
        "restore_tokens": 100_000,
        "restore_bytes": 100_000 * 82_944,
        "ttft_ms": {"mean": 50.0, "p99": 200.0, "answers": 128},
        "tpot_ms": 10.0,
        "output_tokens_per_s": 500.0,
    } | more


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"restore_tokens": 0, "restore_bytes": 0}, "nothing was restored from L2"),
        (
            {"backup_bytes": 80_000 * 147_456},
            "moved 11,796,480,000 bytes, but a token has 82,944",
        ),
        ({"restore_bytes": 1}, "restore of 100,000 tokens moved 1 bytes"),
    ],
)
def test_runs_that_say_nothing(more: dict[str, Any], message: str):
    reporting = server("int8", l2=96_451, size=82_944, report={"bytes_per_token": 82_944})
    experiment.check_run(a_run(), reporting, WORKLOAD)
    with pytest.raises(Refused, match=message):
        experiment.check_run(a_run(**more), reporting, WORKLOAD)


def test_without_l2_nothing_needs_to_be_restored():
    nothing = dict.fromkeys(("backup_tokens", "backup_bytes", "restore_tokens", "restore_bytes"), 0)
    experiment.check_run(a_run(**nothing), server("no-l2"), WORKLOAD)


@pytest.mark.skipif(experiment.torch.cuda.is_available(), reason="there is a GPU")
def test_the_full_size_needs_a_gpu(tmp_path: Path):
    answer = CliRunner().invoke(experiment.main, ["run", "equal-budget", "--out", str(tmp_path)])
    assert answer.exit_code == 1
    assert "no NVIDIA GPU here; allowed: --small" in answer.output


# -- driving ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def result(tmp_path: Path) -> Result:
    servers = {one.name: experiment.describe(one) for one in (server("no-l2"), BF16, INT8)}
    texts = {"hardware": "a GPU", "model": "a model", "versions": {"sglang": "0.5.23"}, "replaced": []}
    data = {"experiment": "equal-budget", **texts, "page_size": 1, "servers": servers}
    return Result(tmp_path / "result.json", data | {"finished": False, "refused": None, "broken": {}, "runs": []})


def conduct(result: Result, tmp_path: Path, repeats: int = 3) -> None:
    experiment.conduct(budget(), [server("no-l2"), BF16, INT8], result, repeats, tmp_path, Clock(60))


def measure_with(monkeypatch: pytest.MonkeyPatch, results: list[Any]) -> None:
    """Runs give these, in order; an exception is raised."""
    given = iter(results)

    def measure(*_: Any) -> dict[str, Any]:
        found = next(given)
        if isinstance(found, Exception):
            raise found
        run = a_run(**found)
        return {key: run[key] for key in run if key not in ("experiment", "configuration", "repeat", "workload")} | {
            "bench": {}
        }

    monkeypatch.setattr(experiment, "measure", measure)


def test_runs_take_turns(result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    measure_with(monkeypatch, [{}] * 9)
    conduct(result, tmp_path)
    kept = json.loads(result.path.read_text())
    assert [run["configuration"] for run in kept["runs"]] == [
        *("no-l2", "bf16", "int8"),
        *("bf16", "int8", "no-l2"),
        *("int8", "no-l2", "bf16"),
    ]
    assert [run["repeat"] for run in kept["runs"]] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert kept["finished"]


def test_what_is_measured_is_kept_when_time_is_up(result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    measure_with(monkeypatch, [{"from_l2_tokens": 10_000}, {}, {}, {}, TimeoutError()])
    conduct(result, tmp_path)
    kept = json.loads(result.path.read_text())
    assert len(kept["runs"]) == 4
    assert not kept["finished"]
    # The repeat that was cut short is not compared: only one configuration has it.
    assert {name: len(runs) for name, runs in experiment_report.compared(kept)[65_536].items()} == {
        "no-l2": 1,
        "bf16": 1,
        "int8": 1,
    }


def test_on_without_a_server_that_breaks(result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    measure_with(monkeypatch, [Broken("gone"), *[{}] * 6])
    conduct(result, tmp_path)
    kept = json.loads(result.path.read_text())
    assert kept["finished"]
    assert kept["broken"] == {"no-l2": "gone"}
    assert [run["configuration"] for run in kept["runs"]] == ["bf16", "int8", "int8", "bf16", "bf16", "int8"]
    assert {name: len(runs) for name, runs in experiment_report.compared(kept)[65_536].items()} == {
        "bf16": 3,
        "int8": 3,
    }
    lines = experiment_report.markdown(kept).splitlines()
    assert "Left out: no-l2, which broke." in lines
    assert "| hit rate | 43.1% | 43.1% |" in lines


def test_one_server_is_not_compared(result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    measure_with(monkeypatch, [{}, Broken("gone"), {}])
    with pytest.raises(Refused, match="comparing takes two"):
        conduct(result, tmp_path)
    assert not json.loads(result.path.read_text())["finished"]


def test_unanswered_requests_break_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bench = {"completed": 120, "errors": ["", "out of memory"]}
    monkeypatch.setattr(experiment, "bench_serving", lambda *_: bench)
    monkeypatch.setattr(experiment, "counters", lambda _: {})
    monkeypatch.setattr(experiment, "SETTLING_SECONDS", 0)
    answering = server("int8", l2=96_451)
    answering.http = SimpleNamespace(url="http://nowhere", flush=lambda: None)  # type: ignore[assignment]
    with pytest.raises(Broken, match="120 of 128 requests were answered; out of memory"):
        experiment.measure(answering, WORKLOAD, 1, tmp_path, 10)


def test_a_refusal_is_in_the_file_and_ends_the_report(result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    measure_with(monkeypatch, [{}, {"restore_tokens": 0, "restore_bytes": 0}])
    with pytest.raises(Refused):
        conduct(result, tmp_path)
    kept = json.loads(result.path.read_text())
    assert len(kept["runs"]) == 2
    assert "bf16, repeat 1: nothing was restored from L2" in kept["refused"]
    answer = CliRunner().invoke(experiment.main, ["report", str(result.path)])
    assert answer.exit_code == 1
    assert "nothing was restored from L2" in answer.output


def test_a_benchmark_that_hangs_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(experiment, "_bench_serving", lambda *_: time.sleep(3600))
    before = multiprocessing.active_children()
    with pytest.raises(TimeoutError):
        experiment.bench_serving([], tmp_path, 0.2)
    assert set(multiprocessing.active_children()) <= set(before)


def test_a_benchmark_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(_: list[str], log: Path) -> None:
        log.write_text("no such option")
        raise SystemExit(2)

    monkeypatch.setattr(experiment, "_bench_serving", fail)
    with pytest.raises(Broken, match="ended with status 2: no such option"):
        experiment.bench_serving([], tmp_path, 600)


# -- reporting -------------------------------------------------------------------------------------------------------


def test_the_report(result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hits = [0, 10_000, 30_000, 10_000, 60_000, 0, 50_000, 0, 90_000]
    measure_with(monkeypatch, [{"from_l2_tokens": tokens} for tokens in hits])
    conduct(result, tmp_path)
    picture = tmp_path / "plot.svg"
    answer = CliRunner().invoke(experiment.main, ["report", str(result.path), "--plot", str(picture)])
    assert answer.exit_code == 0
    lines = answer.output.splitlines()
    assert "| bf16 | 16,384 | 54,254 | 147,456 | 8,000,077,824 |" in lines
    assert "| no-l2 | 16,384 | - | - | - |" in lines
    # bf16 was 2nd, 1st and 3rd; int8 3rd, 2nd and 1st.
    assert "| tokens from L2 | 0 | 10,000 (10,000 to 90,000) | 50,000 (30,000 to 60,000) |" in lines
    assert "| hit rate | 7.2% | 10.8% (10.8% to 39.5%) | 25.1% (18.0% to 28.7%) |" in lines
    assert "| tokens backed up | 80,000 | 80,000 | 80,000 |" in lines
    assert "| backed up, GB | 6.64 | 6.64 | 6.64 |" in lines
    assert picture.stat().st_size > 1000


def test_the_report_of_a_crossover_has_a_row_for_each_size(result: Result, tmp_path: Path):
    for groups, tokens in ((13, 60_000), (94, 20_000)):
        for name in ("no-l2", "bf16", "int8"):
            workload = attrs.asdict(attrs.evolve(WORKLOAD, groups=groups))
            result.add(a_run(configuration=name, workload=workload, from_l2_tokens=tokens, from_l1_tokens=0))
    lines = experiment_report.markdown(result.data).splitlines()
    assert "| 26,624 | 21.5% | 21.5% | 21.5% | 50 | 50 | 50 |" in lines
    assert "| 192,512 | 7.2% | 7.2% | 7.2% | 50 | 50 | 50 |" in lines
    experiment_report.plot(result.data, tmp_path / "plot.png")


# -- real servers ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.skipif(experiment.torch.cuda.is_available(), reason="--small is for CPUs")
def test_a_small_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The tool itself on real servers, asked one request at a time: then hits do not depend on which is done first."""
    model = write_tokenizer(tiny_model.make(tmp_path / "tiny"), tiny_model.VOCABULARY)
    small = experiment.small_size(model)["equal-budget"]
    one_by_one = attrs.evolve(small, workload=attrs.evolve(small.workload, concurrency=1))
    monkeypatch.setattr(experiment, "small_size", lambda _: {"equal-budget": one_by_one})
    options = ["--small", "--model", str(model), "--out", str(tmp_path), "--runs-dir", str(tmp_path / "runs")]
    only = ["--only", "bf16", "--only", "int8", "--repeats", "1"]
    answer = CliRunner().invoke(experiment.main, ["run", "equal-budget", *options, *only])
    assert answer.exit_code == 0, answer.output

    kept = json.loads((tmp_path / "experiment-equal-budget-small.json").read_text())
    # 256 tokens of L1, 1.5 times as many in BF16's bytes, and a page: 2 x 4 layers x 384 or 256 bytes each.
    sizes = {name: (one["l2_tokens"], one["bytes_per_token"]) for name, one in kept["servers"].items()}
    assert sizes == {"bf16": (385, 3072), "int8": (577, 2048)}
    bf16, int8 = kept["runs"]
    for run in (bf16, int8):
        assert run["prompt_tokens"] == 27 * (80 + 8)
        assert run["restore_tokens"] >= run["from_l2_tokens"] > 0
        assert run["ttft_ms"]["answers"] == 27
    assert int8["from_l2_tokens"] > bf16["from_l2_tokens"], "L2 holds half as many again"
    raw = sorted((tmp_path / "runs").iterdir())
    assert [json.loads(path.read_text())["completed"] for path in raw] == [27, 27]
    assert "| int8 | 256 | 577 | 2,048 | 1,181,696 |" in answer.output
