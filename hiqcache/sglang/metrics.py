"""hiqcache's series on SGLang's `/metrics` page, with the labels of the scheduler's own.

docs/metrics.md lists them. They are updated whenever SGLang writes its own statistics, in the scheduler's thread.
"""

from typing import Any

from hiqcache import __version__
from hiqcache.sglang.proof import Report
from hiqcache.transfer import Transfer


class Metrics:
    """The series of one scheduler.

    SGLang's own counters tell the tokens, the bytes and the time of whole transfers; these tell what is stored, and
    what the codec takes of that time.

    Args:
        collector: SGLang's `SchedulerMetricsCollector`.
        report: what the scheduler says of its L2.
        transfer: whose clocks are read.
    """

    def __init__(self, collector: Any, report: Report, transfer: Transfer):
        # Not before SGLang has set PROMETHEUS_MULTIPROC_DIR, or values would stay in this process.
        from prometheus_client import Counter, Gauge

        gauge, counter = collector._gauge_cls or Gauge, collector._counter_cls or Counter

        def publish(name: str, documentation: str, value: float, **more: object) -> None:
            labels = {**collector.labels, **more}
            series = gauge(
                name=f"hiqcache:{name}",
                documentation=documentation,
                labelnames=list(labels),
                multiprocess_mode="mostrecent",
            )
            series.labels(**labels).set(value)

        publish(
            "representation_info",
            "How L2 stores KV; always 1.",
            1,
            representation=report.representation,
            format_tag=report.format_tag,
            layout=report.layout,
            page_size=report.page_size,
            transfer=report.transfer,
            hiqcache_version=__version__,
        )
        publish("bytes_per_token", "Host bytes of a token on this rank, padding included.", report.bytes_per_token)
        publish("bf16_bytes_per_token", "The same token's bytes in BF16.", report.device_bytes_per_token)
        publish("host_tokens", "Tokens that L2 has room for.", report.tokens)
        publish("staging_bytes", "Device memory that the transfer allocated for itself.", report.staging_bytes)

        names = [*collector.labels, "operation"]
        seconds = counter(
            name="hiqcache:sampled_codec_seconds_total",
            documentation="Time that the measured runs of encoding and decoding took.",
            labelnames=names,
        )
        tokens = counter(
            name="hiqcache:sampled_codec_tokens_total",
            documentation="Tokens that the measured runs of encoding and decoding covered.",
            labelnames=names,
        )
        clocks = {"encode": transfer.encode_clock, "decode": transfer.decode_clock}
        self._series = [
            (clock, *(series.labels(**collector.labels, operation=operation) for series in (seconds, tokens)))
            for operation, clock in clocks.items()
        ]

    def update(self) -> None:
        """Publish what the clocks have measured since the last time; waits for nothing."""
        for clock, seconds, tokens in self._series:
            for series, value in zip((seconds, tokens), clock.take(), strict=True):
                series.inc(value)
