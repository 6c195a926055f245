"""How fast KV moves between L1 and L2: SGLang's own BF16 paths, and int8 by the PyTorch and the CUDA transfer.

    python tools/bench_transfer.py --out docs/results/transfer-h200.json

Everything runs side by side in one process, interleaved and repeated, through SGLang's own `L2TransferEngine`: every
layer's call, and an event when each layer is done. Each repetition moves other pages, anywhere in host memory
(`shuffled`) or, long `page_first` pages, side by side there (`in order`), as a pool that is not fragmented gives them
to a prompt; on the GPU they lie anywhere. The link's ceiling is measured between them with copies of 1 GiB. Needs an
NVIDIA GPU and SGLang 0.5.23.
"""

import itertools
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import click
import torch
from attrs import asdict, define, frozen
from results import command_line, writable
from rich.console import Console
from rich.table import Table
from sglang.srt.mem_cache.l2_transfer import L2Transfer, L2TransferEngine
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.common import (
    HostTensorAllocator,
    _cuda_host_unregister,
    alloc_with_host_register,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from hiqcache.arena import LAYOUTS, ArenaShape, HostArena
from hiqcache.geometry import KVGeometry
from hiqcache.plotting import save
from hiqcache.registry import get
from hiqcache.transfer import DeviceRows, EagerTransfer, Transfer, make_transfer

CEILING_BYTES = 1 << 30
WARM_UPS = 2
BASELINE = "SGLang BF16"


@frozen
class Setting:
    """One configuration in which all contenders meet."""

    layout: str
    page_size: int
    order: str
    tokens: int

    @property
    def place(self) -> tuple[str, int, str]:
        """What transfers of all sizes have in common."""
        return self.layout, self.page_size, self.order


@frozen
class Sample:
    """One transfer by one contender; milliseconds since its start on the GPU's clock, and the host's to enqueue it."""

    setting: Setting
    contender: str
    direction: str
    first_layer_ms: float
    last_layer_ms: float
    host_ms: float


@define
class Contender:
    """A host pool as `L2TransferEngine` drives it.

    Attributes:
        name: in tables.
        bytes_per_token: that cross the link.
        pool: an SGLang host pool, or something with its transfer methods.
        backup_slots_on, restore_slots_on: where SGLang hands it host slots.
    """

    name: str
    bytes_per_token: int
    pool: object
    backup_slots_on: torch.device
    restore_slots_on: torch.device


class TransferPool:
    """The transfer methods of an SGLang host pool around a `Transfer`."""

    def __init__(self, transfer: Transfer):
        self.transfer = transfer

    def prepare_transfer_indices(self, host_indices, device_indices, io_backend):
        return host_indices, device_indices

    def backup_from_device_all_layer_physical(self, device_pool, host_indices, device_indices, io_backend):
        self.transfer.backup(host_indices, device_indices)

    def load_to_device_per_layer_physical(
        self, device_pool, host_indices, device_indices, layer, io_backend, *, is_draft=False
    ):
        self.transfer.restore(layer, host_indices, device_indices)


class Bench:
    """All pools of one layout and page size, and a device pool that they share.

    Args:
        geometry: of the KV.
        layout: `layer_first` or `page_first`.
        slots: tokens that each pool holds.
    """

    def __init__(self, geometry: KVGeometry, layout: str, slots: int):
        self.geometry, self.layout, self.slots = geometry, layout, slots
        self.engine = L2TransferEngine("kernel")
        self.device_pool = MHATokenToKVPool(
            slots, geometry.page_size, torch.bfloat16, geometry.heads, geometry.head_dim, geometry.layers, "cuda", False
        )
        info = self.device_pool._mha_buffer_info()
        rows = DeviceRows(info.buffers.k, info.buffers.v)
        for layer in (*rows.k, *rows.v):
            layer.normal_()
        bf16 = MHATokenToKVPoolHost(
            info, 1.0, 0, geometry.page_size, layout,
            device_capacity_tokens=slots, start_layer=0, end_layer=geometry.layers - 1, host_token_capacity=slots,
        )  # fmt: skip
        representation = get("int8")(geometry)
        shape = ArenaShape.of(representation, slots // geometry.page_size, layout)
        buffer = alloc_with_host_register((shape.total_bytes,), torch.uint8, "cpu", True, HostTensorAllocator())
        self.arena = HostArena(shape, buffer)
        staging = [tensor for tensor in (bf16.staging_k_buffer, bf16.staging_v_buffer) if tensor is not None]
        cpu, cuda = torch.device("cpu"), rows.device
        self.contenders = [
            Contender(
                BASELINE, geometry.device_bytes_per_token, bf16, cpu if bf16.can_use_write_back_jit else cuda, cuda
            )
        ]
        for name, transfer in (
            ("int8, PyTorch", EagerTransfer(representation, self.arena, rows)),
            ("int8, CUDA", make_transfer(representation, self.arena, rows, staging)),
        ):
            where = transfer.host_indices_device
            pool = TransferPool(transfer)
            self.contenders.append(Contender(name, representation.bytes_per_token(), pool, where, where))
        self._bf16 = bf16
        # Real data everywhere, so that no restore reads pages that nobody wrote.
        everything = torch.arange(slots)
        for contender in self.contenders:
            self._time(contender, "backup", everything, everything.cuda())

    def close(self) -> None:
        """Unpin the host pools."""
        self._bf16.destroy()
        _cuda_host_unregister(self.arena.buffer)

    @property
    def orders(self) -> Sequence[str]:
        """How the pages of a transfer may lie in host memory."""
        matters = self.layout == "page_first" and self.geometry.page_size > 1
        return ("in order", "shuffled") if matters else ("shuffled",)

    def run(self, order: str, tokens: int, repeats: int) -> Iterator[Sample]:
        """Backups and restores of `tokens` by every contender, shuffled; the first `WARM_UPS` rounds are dropped."""
        setting = Setting(self.layout, self.geometry.page_size, order, tokens)
        turns = list(itertools.product(self.contenders, ("backup", "restore")))
        dice = random.Random(0)
        for repeat in range(-WARM_UPS, repeats):
            host, device = self._slots(tokens, order), self._slots(tokens, "shuffled").cuda()
            dice.shuffle(turns)  # so that nobody always follows the same other, whose code fills the caches
            for contender, direction in turns:
                milliseconds = self._time(contender, direction, host, device)
                if repeat >= 0:
                    yield Sample(setting, contender.name, direction, *milliseconds)

    def _slots(self, tokens: int, order: str) -> torch.Tensor:
        everywhere, count = self.slots // self.geometry.page_size, tokens // self.geometry.page_size
        pages = torch.randperm(everywhere)[:count]
        if order == "in order":
            pages = torch.arange(count) + torch.randint(everywhere - count + 1, ())
        return (pages[:, None] * self.geometry.page_size + torch.arange(self.geometry.page_size)).flatten()

    def _time(
        self, contender: Contender, direction: str, host: torch.Tensor, device: torch.Tensor
    ) -> tuple[float, float, float]:
        where = contender.backup_slots_on if direction == "backup" else contender.restore_slots_on
        transfers = [L2Transfer(contender.pool, self.device_pool, host.to(where), device)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(self.geometry.layers)]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        if direction == "backup":
            done = self.engine.submit_device_to_host(transfers)
            events = [done.finish_event]
        else:
            done = self.engine.submit_host_to_device(
                transfers,
                transfer_layer_id_max=self.geometry.layers,
                on_layer_done=lambda layer: events[layer].record(),
            )
        host_ms = 1e3 * (time.perf_counter() - begin)
        torch.cuda.synchronize()
        return done.start_event.elapsed_time(events[0]), done.start_event.elapsed_time(done.finish_event), host_ms


class Ceiling:
    """One large copy between pinned memory and the GPU."""

    def __init__(self):
        self._host = torch.empty(CEILING_BYTES, dtype=torch.uint8, pin_memory=True)
        self._device = torch.empty_like(self._host, device="cuda")
        self.gb_per_s: dict[str, list[float]] = {"backup": [], "restore": []}

    def measure(self) -> None:
        for direction, (to, source) in {
            "backup": (self._host, self._device),
            "restore": (self._device, self._host),
        }.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            to.copy_(source, non_blocking=True)
            end.record()
            torch.cuda.synchronize()
            self.gb_per_s[direction].append(CEILING_BYTES / start.elapsed_time(end) / 1e6)


@frozen
class Row:
    """What one contender did in one setting and direction: medians over repetitions, and ranges."""

    setting: Setting
    direction: str
    contender: str
    tokens_per_s: float
    tokens_per_s_range: tuple[float, float]
    gb_per_s: float
    share_of_ceiling: float
    first_layer_ms: float
    last_layer_ms: float
    host_ms: float
    ratio: float
    ratio_range: tuple[float, float]


def summarise(samples: Sequence[Sample], bytes_per_token: dict[str, int], ceiling: dict[str, float]) -> list[Row]:
    """Ratios compare a contender with the baseline in the same repetition."""

    def key(sample: Sample):
        return sample.setting, sample.direction, sample.contender

    groups: dict[tuple, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(key(sample), []).append(sample)
    rows = []
    for (setting, direction, contender), group in groups.items():
        rates = [setting.tokens / sample.last_layer_ms * 1e3 for sample in group]
        baseline = [sample.last_layer_ms for sample in groups[setting, direction, BASELINE]]
        ratios = [base / sample.last_layer_ms for base, sample in zip(baseline, group, strict=True)]
        rate = statistics.median(rates)
        gb_per_s = rate * bytes_per_token[contender] / 1e9
        rows.append(
            Row(
                setting,
                direction,
                contender,
                rate,
                (min(rates), max(rates)),
                gb_per_s,
                gb_per_s / ceiling[direction],
                statistics.median(sample.first_layer_ms for sample in group),
                statistics.median(sample.last_layer_ms for sample in group),
                statistics.median(sample.host_ms for sample in group),
                statistics.median(ratios),
                (min(ratios), max(ratios)),
            )
        )
    return rows


def table(rows: Sequence[Row], ceiling: dict[str, float]) -> Table:
    links = ", ".join(f"{direction} {rate:.1f} GB/s" for direction, rate in ceiling.items())
    result = Table(title=f"Transfers between L1 and L2; link ceiling: {links}")
    for heading in ("layout", "page", "pages", "tokens", "direction", "path"):
        result.add_column(heading)
    for heading in ("Mtok/s", "GB/s", "of ceiling", "first layer ms", "last layer ms", "host ms", "x BF16", "range"):
        result.add_column(heading, justify="right")
    previous = None
    for row in rows:
        setting = row.setting
        group = (setting.layout, str(setting.page_size), setting.order, str(setting.tokens), row.direction)
        result.add_row(
            *(group if group != previous else [""] * len(group)),
            row.contender,
            f"{row.tokens_per_s / 1e6:.3f}",
            f"{row.gb_per_s:.1f}",
            f"{row.share_of_ceiling:.0%}",
            f"{row.first_layer_ms:.2f}" if row.direction == "restore" else "",
            f"{row.last_layer_ms:.2f}",
            f"{row.host_ms:.2f}",
            f"{row.ratio:.2f}",
            f"{row.ratio_range[0]:.2f}-{row.ratio_range[1]:.2f}",
        )
        previous = group
    return result


def plot(rows: Sequence[Row], bytes_per_token: dict[str, int], ceiling: dict[str, float], path: Path) -> None:
    """Tokens a second over the size of the transfer; dashed: the link's ceiling at each path's bytes a token."""
    from matplotlib import pyplot as plt

    places = sorted({row.setting.place for row in rows}, key=lambda place: (place[0] != "page_first", place))
    figure, axes = plt.subplots(
        2, len(places), figsize=(4 * len(places), 6.4), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for (line, direction), (column, place) in itertools.product(enumerate(("restore", "backup")), enumerate(places)):
        axis = axes[line][column]
        for number, contender in enumerate(bytes_per_token):
            points = [
                (row.setting.tokens, row.tokens_per_s / 1e6)
                for row in rows
                if (row.direction, row.contender, row.setting.place) == (direction, contender, place)
            ]
            axis.plot(*zip(*sorted(points), strict=True), marker="o", color=f"C{number}", label=contender)
            if not contender.endswith("PyTorch"):
                limit = ceiling[direction] * 1e3 / bytes_per_token[contender]
                axis.axhline(limit, linestyle="--", linewidth=1, color=f"C{number}")
        axis.set(title="{}, {}, page size {}, {}".format(direction, *place), xscale="log", ylim=(0, None))
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("tokens in the transfer")
    for axis in axes[:, 0]:
        axis.set_ylabel("million tokens a second")
    axes[0][0].legend(fontsize="small")
    save(figure, path)


def shape_of(text: str) -> tuple[int, int]:
    try:
        heads, dim = map(int, text.split("x"))
    except ValueError as error:
        raise click.BadParameter(f"{text!r}; allowed: HEADSxDIM, such as 8x128") from error
    return heads, dim


@click.command(help=__doc__)
@click.option("--shape", type=shape_of, default="8x128", show_default=True, help="Local KV heads x head width.")
@click.option("--layers", default=36, show_default=True)
@click.option("--layout", "layouts", type=click.Choice(LAYOUTS), multiple=True, default=("page_first", "layer_first"))
@click.option("--page-size", "page_sizes", type=int, multiple=True, default=(64, 1), show_default=True)
@click.option("--tokens", "sizes", type=int, multiple=True, default=(64, 512, 1024, 4096, 16384), show_default=True)
@click.option("--repeats", default=15, show_default=True, help="Interleaved rounds of each setting.")
@click.option(
    "--out", type=click.Path(path_type=Path), callback=writable, help="JSON to write; the plot goes beside it as .png."
)
def main(shape, layers, layouts, page_sizes, sizes, repeats, out: Path | None) -> None:
    torch.manual_seed(0)
    ceiling, samples, bytes_per_token = Ceiling(), [], {}
    for layout, page_size in itertools.product(layouts, page_sizes):
        geometry = KVGeometry(
            layers=layers, heads=shape[0], head_dim=shape[1], v_head_dim=shape[1], page_size=page_size
        )
        bench = Bench(geometry, layout, slots=2 * max(sizes))
        bytes_per_token = {contender.name: contender.bytes_per_token for contender in bench.contenders}
        for order in bench.orders:
            for tokens in sizes:
                ceiling.measure()
                samples += bench.run(order, tokens, repeats)
        bench.close()
        del bench
        torch.cuda.empty_cache()
    limits = {direction: statistics.median(rates) for direction, rates in ceiling.gb_per_s.items()}
    rows = summarise(samples, bytes_per_token, limits)
    Console(width=None if sys.stdout.isatty() else 160).print(table(rows, limits))
    if out:
        versions = {name: version(name) for name in ("hiqcache", "torch", "triton", "sglang")}
        record = {
            "command": command_line(),
            "gpu": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "versions": versions,
            "shape": {"heads": shape[0], "head_dim": shape[1], "layers": layers},
            "repeats": repeats,
            "bytes_per_token": bytes_per_token,
            "ceiling_gb_per_s": limits,
            "rows": [asdict(row) for row in rows],
        }
        out.write_text(json.dumps(record, indent=1) + "\n")
        plot(rows, bytes_per_token, limits, out.with_suffix(".png"))


if __name__ == "__main__":
    main()
