"""What the latency tool makes of its samples and of SGLang's profile."""

import os
import pathlib
import subprocess
import sys
import time
from unittest.mock import Mock

import click
import pytest
import serving_latency
from serving_latency import First, Server


def event(category: str, name: str, ts: float, dur: float) -> dict:
    return {"cat": category, "name": name, "ts": ts, "dur": dur}


def test_work_of_the_gpu_counts_overlapping_kernels_once():
    trace = {
        "traceEvents": [
            event("kernel", "decode_blocks", 1000, 400),
            event("kernel", "_fwd_kernel", 1200, 800),
            event("kernel", "_fwd_kernel", 5000, 1000),
            event("gpu_memcpy", "Memcpy HtoD", 1500, 5500),
            event("cpu_op", "aten::add", 0, 9000),
            {"ph": "M", "name": "process_name"},
        ]
    }
    work = serving_latency.gpu_work(trace)
    assert work["span_ms"] == pytest.approx(6.0)  # 1000 to 7000 microseconds
    assert work["kernels_ms"] == pytest.approx(2.0)  # 1000 to 2000, 5000 to 6000
    assert [(row["name"], row["calls"]) for row in work["largest"]] == [
        ("Memcpy HtoD", 1),
        ("_fwd_kernel", 2),
        ("decode_blocks", 1),
    ]


def test_ratios_are_of_the_same_prompts_and_repeats():
    def server(scale: float) -> Server:
        firsts = [First(scale * seconds, 0.0, scale * seconds / 2, 4032, 0) for seconds in (0.01, 0.1, 1.0)]
        again = [First(0.004, 0.0, 0.0, 0, 4032)] * 3
        return Server("", 0, None, {4096: firsts}, {4096: again}, [[0.01 * scale] * 100, [0.02 * scale] * 100])

    summary = serving_latency.summary(server(0.5), server(1.0))
    ttft, p99 = summary["ttft_ms"]["4096"], summary["inter_token_ms"]["p99"]
    assert ttft["median"] == pytest.approx(50)
    assert (ttft["from_l1"], ttft["over_l1"]) == pytest.approx((4, 46))
    assert (ttft["ratio"], *ttft["ratio_interval"]) == pytest.approx((0.5, 0.5, 0.5))
    assert ttft["prefill"] == pytest.approx(25)
    assert p99["repeats"] == pytest.approx([5, 10])
    assert (p99["ratio"], *p99["ratio_range"]) == pytest.approx((0.5, 0.5, 0.5))


def test_what_was_not_measured_is_left_out():
    first = First(0.01, 0.0, 0.005, 4032, 0)
    server = Server("", 0, None, {4096: [first], 12288: []}, {4096: [first], 12288: []}, [])
    summary = serving_latency.summary(server, server)
    assert list(summary["ttft_ms"]) == ["4096"]
    assert summary["inter_token_ms"] == {}


@pytest.mark.parametrize("tokens", [1024, 4096, 12288, 32768])
def test_a_cycle_of_prompts_is_more_than_l1_holds_and_less_than_l2(tokens):
    held = serving_latency.cycle(tokens) * tokens
    assert (serving_latency.cycle(tokens) - 1) * tokens >= serving_latency.L1_TOKENS
    assert held < serving_latency.L2_GIGABYTES * 10**9 / 147_456


def test_every_server_has_every_set_of_cores_in_turn():
    rounds = [serving_latency.core_sets(range(17), 3, round_) for round_ in range(3)]
    assert rounds[0] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14]]
    for server in range(3):
        assert {tuple(sets[server]) for sets in rounds} == {tuple(part) for part in rounds[0]}
    assert serving_latency.core_sets([0, 1], 3, 1) == [[0, 1]] * 3, "too few to share out"


def test_another_version_is_one_that_is_installed(tmp_path):
    (tmp_path / "hiqcache-0.0.9.dist-info").mkdir()

    def read(*texts: str) -> dict[str, pathlib.Path]:
        return serving_latency.other_versions(Mock(), Mock(), texts)

    assert read(f"before={tmp_path}") == {"before": tmp_path}
    for texts in (["before"], [f"int8={tmp_path}"], [f"a={tmp_path}"] * 2, [f"=/{tmp_path}"], ["a=/nonexistent"]):
        with pytest.raises(click.BadParameter, match=r"NAME=FOLDER|no installed hiqcache"):
            read(*texts)


def test_threads_of_a_process_group_are_pinned():
    cores = sorted(os.sched_getaffinity(0))
    code = (
        "import threading, time; threading.Thread(target=time.sleep, args=(30,), daemon=True).start(); time.sleep(30)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        tasks = pathlib.Path(f"/proc/{process.pid}/task")
        deadline = time.monotonic() + 20
        while len(list(tasks.iterdir())) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        serving_latency.pin(process.pid, cores[:1])
        assert {tuple(os.sched_getaffinity(int(task.name))) for task in tasks.iterdir()} == {(cores[0],)}
        assert sorted(os.sched_getaffinity(0)) == cores, "other processes run where they ran"
    finally:
        process.kill()
        process.wait()
