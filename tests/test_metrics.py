"""What a dashboard sees: clocks that nobody waits for, and the series that they end up in."""

import json
import pathlib
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transfers

from hiqcache.registry import get
from hiqcache.transfer import EagerTransfer, clock
from hiqcache.transfer.clock import SAMPLE_EVERY, EventClock, WallClock

DASHBOARD = pathlib.Path(__file__).parents[1] / "docs/grafana/hiqcache.json"
LAYERS, PAGE_SIZE, PAGES = 3, 4, 5


# -- clocks ----------------------------------------------------------------------------------------------------------


def test_the_wall_clock_counts_every_run(monkeypatch: pytest.MonkeyPatch):
    times = iter([10.0, 10.5, 20.0, 20.25])
    monkeypatch.setattr(clock, "perf_counter", lambda: next(times))
    wall = WallClock()
    for tokens in (3.0, 4.0):
        wall.start()
        wall.stop(tokens)
    assert wall.take() == (0.75, 7.0)
    assert wall.take() == (0.0, 0.0)


class FakeEvent:
    """A CUDA event that passes when the test says so; it has no way to wait."""

    passed = False

    def __init__(self, enable_timing: bool):
        assert enable_timing
        self.records = 0

    def record(self) -> None:
        self.records += 1

    def query(self) -> bool:
        return FakeEvent.passed

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert FakeEvent.passed, "CUDA refuses events that have not passed"
        return 250.0


@pytest.fixture
def event_clock(monkeypatch: pytest.MonkeyPatch) -> EventClock:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "passed", False)
    return EventClock()


def run(of: EventClock, times: int, tokens: float = 8.0) -> int:
    """How many of so many runs were measured."""
    begin: Any = of._begin
    before = begin.records
    for _ in range(times):
        of.start()
        of.stop(tokens)
    return begin.records - before


def test_the_event_clock_measures_some_runs(event_clock: EventClock, monkeypatch: pytest.MonkeyPatch):
    assert run(event_clock, SAMPLE_EVERY - 1) == 0
    assert run(event_clock, 1) == 1
    monkeypatch.setattr(FakeEvent, "passed", True)
    assert event_clock.take() == (0.25, 8.0)
    assert event_clock.take() == (0.0, 0.0)
    assert run(event_clock, SAMPLE_EVERY) == 1


def test_the_event_clock_waits_for_nobody(event_clock: EventClock, monkeypatch: pytest.MonkeyPatch):
    run(event_clock, SAMPLE_EVERY, tokens=8.0)
    assert event_clock.take() == (0.0, 0.0)
    assert run(event_clock, 10 * SAMPLE_EVERY, tokens=1.0) == 0, "its events are not free"
    monkeypatch.setattr(FakeEvent, "passed", True)
    assert event_clock.take() == (0.25, 8.0)


def test_a_transfer_of_nothing_leaves_the_events_free(event_clock: EventClock):
    run(event_clock, SAMPLE_EVERY, tokens=0.0)
    assert run(event_clock, SAMPLE_EVERY) == 1


def test_a_transfer_on_the_cpu_accounts_for_every_token():
    generator = torch.Generator().manual_seed(0)
    geometry = transfers.geometry((3, 64), PAGE_SIZE, LAYERS)
    representation = get("int8")(geometry)
    arena = transfers.random_arena(representation, PAGES, "page_first", generator)
    rows = transfers.random_rows(geometry, PAGES * PAGE_SIZE, generator)
    transfer = EagerTransfer(representation, arena, rows)
    host, device = (transfers.random_slots(3, PAGES, PAGE_SIZE, generator) for _ in range(2))
    transfer.backup(host, device)
    seconds, tokens = transfer.encode_clock.take()
    assert tokens == pytest.approx(3 * PAGE_SIZE)
    assert seconds > 0
    assert transfer.decode_clock.take() == (0, 0)
    for layer in range(LAYERS - 1):
        transfer.restore(layer, host, device)
    seconds, tokens = transfer.decode_clock.take()
    assert tokens == pytest.approx(3 * PAGE_SIZE * (LAYERS - 1) / LAYERS)
    assert seconds > 0


# -- series ----------------------------------------------------------------------------------------------------------


def test_series_are_made_by_the_classes_that_sglang_was_given(monkeypatch: pytest.MonkeyPatch):
    """SGLang lets a deployment replace Prometheus' classes; its Ray wrappers do."""
    pytest.importorskip("sglang", reason="needs the sglang extra")
    from hiqcache.sglang.metrics import Metrics
    from hiqcache.sglang.proof import Report

    made: dict[str, Any] = {}

    class Series:
        def __init__(self, name: str, documentation: str, labelnames: list[str], multiprocess_mode: str = ""):
            assert documentation
            made[name] = self
            self.labelnames, self.mode, self.values = labelnames, multiprocess_mode, {}

        def labels(self, **labels: object) -> SimpleNamespace:
            assert list(labels) == self.labelnames
            key = tuple(labels.values())
            self.values.setdefault(key, 0)

            def change(value: float, keep: int) -> None:
                self.values[key] = keep * self.values[key] + value

            return SimpleNamespace(set=lambda value: change(value, 0), inc=lambda value: change(value, 1))

    report = Report(
        representation="int8",
        format_tag="int8-head-v2",
        bytes_per_token=82_944,
        device_bytes_per_token=147_456,
        tokens=96_451,
        page_size=1,
        layout="page_first",
        transfer="CudaTransfer",
        staging_bytes=128 << 20,
    )
    collector = SimpleNamespace(labels={"model_name": "m", "tp_rank": 3}, _gauge_cls=Series, _counter_cls=Series)
    transfer: Any = SimpleNamespace(encode_clock=WallClock(), decode_clock=WallClock())
    metrics = Metrics(collector, report, transfer)
    assert made["hiqcache:bytes_per_token"].values == {("m", 3): 82_944}
    assert made["hiqcache:bf16_bytes_per_token"].values == {("m", 3): 147_456}
    assert made["hiqcache:host_tokens"].values == {("m", 3): 96_451}
    assert made["hiqcache:staging_bytes"].values == {("m", 3): 134_217_728}
    assert {series.mode for name, series in made.items() if not name.endswith("_total")} == {"mostrecent"}
    ((info, one),) = made["hiqcache:representation_info"].values.items()
    assert (info[:4], one) == (("m", 3, "int8", "int8-head-v2"), 1)

    times = iter([0.0, 2.0, 5.0, 5.5])
    monkeypatch.setattr(clock, "perf_counter", lambda: next(times))
    for tokens in (10, 20):
        transfer.encode_clock.start()
        transfer.encode_clock.stop(tokens)
        metrics.update()
    assert made["hiqcache:sampled_codec_seconds_total"].values == {("m", 3, "encode"): 2.5, ("m", 3, "decode"): 0}
    assert made["hiqcache:sampled_codec_tokens_total"].values == {("m", 3, "encode"): 30, ("m", 3, "decode"): 0}


# -- the dashboard ---------------------------------------------------------------------------------------------------


def dashboard_metrics() -> set[str]:
    """Names of the series that the dashboard asks for."""
    document = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in document["panels"] for target in panel["targets"]]
    assert len(expressions) > 15
    unquoted = [re.sub(r'"[^"]*"', "", expression) for expression in expressions]
    return {name for expression in unquoted for name in re.findall(r"\b\w+:\w+\b", expression)}


def test_the_dashboard_shows_every_series_of_ours():
    source = (DASHBOARD.parents[2] / "hiqcache/sglang/metrics.py").read_text(encoding="utf-8")
    ours = set(re.findall(r'"hiqcache:(\w+)"', source)) | set(re.findall(r'publish\(\s*"(\w+)"', source))
    assert len(ours) == 7
    assert {name.removeprefix("hiqcache:") for name in dashboard_metrics() if name.startswith("hiqcache:")} == ours


def test_every_series_of_ours_has_its_line_in_the_documentation():
    page = (DASHBOARD.parents[1] / "metrics.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `(hiqcache:\w+)` \|", page, re.MULTILINE))
    assert documented == {name for name in dashboard_metrics() if name.startswith("hiqcache:")}


def test_panels_do_not_overlap():
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
