"""What the latency tool makes of its samples and of SGLang's profile."""

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
        return Server("", None, {4096: firsts}, {4096: firsts}, [[0.01 * scale] * 100, [0.02 * scale] * 100])

    summary = serving_latency.summary(server(0.5), server(1.0))
    ttft, p99 = summary["ttft_ms"]["4096"], summary["inter_token_ms"]["p99"]
    assert ttft["median"] == pytest.approx(50)
    assert (ttft["ratio"], *ttft["ratio_interval"]) == pytest.approx((0.5, 0.5, 0.5))
    assert ttft["prefill"] == pytest.approx(25)
    assert p99["repeats"] == pytest.approx([5, 10])
    assert (p99["ratio"], *p99["ratio_range"]) == pytest.approx((0.5, 0.5, 0.5))
