"""How fast KV moves between L1 and L2: SGLang's own BF16 paths against encoded pages on the CUDA transfer.

\b
    python tools/bench_transfer.py --out docs/results/transfer-h200.json
    python tools/bench_transfer.py --place 8x128:page_first:64 --variant FIRST_GROUP=16M --variant MANY=1000

Everything runs side by side in one process, interleaved and repeated, through SGLang's own `L2TransferEngine`: every
layer's call, and an event when each layer is done. Each repetition moves other pages, anywhere in host memory
(`shuffled`) or, long `page_first` pages, side by side there (`in order`), as a pool that is not fragmented gives them
to a prompt; on the GPU they lie anywhere. Beside the rates it reports the host's time to enqueue a transfer, which
SGLang's scheduler spends, and when the first layer of a restore is ready. The link's ceiling is measured between them
with copies of 1 GiB. The kernels that encode and decode are timed alone too. Needs an NVIDIA GPU and SGLang 0.5.23.

A `--variant` is one more contender for each representation, with other values for constants of hiqcache/transfer (4K
and 16M are bytes, 0.7/0.3 is a tuple): a sweep, by measurements of one process.
"""

import contextlib
import itertools
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
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
from hiqcache.registry import names as registered
from hiqcache.transfer import DeviceRows, EagerTransfer, Transfer, chunks, copy_engine, make_transfer
from hiqcache.transfer.codec import BlockCodec

CEILING_BYTES = 1 << 30
WARM_UPS = 2
BASELINE = "SGLang BF16"
ORDERS = ("shuffled", "in order")
CODEC_TOKENS, CODEC_REPEATS = 4096, 15
"""What the codec's kernels are timed on, without a link."""
PLACES = ("8x128:page_first:64", "1x128:page_first:64", "8x128:page_first:1", "8x128:layer_first:64")


@frozen
class Place:
    """A pool's geometry and arrangement.

    Attributes:
        heads, dim: local KV heads, values of each.
        layout: `layer_first` or `page_first`.
        page_size: tokens in a page.
    """

    heads: int
    dim: int
    layout: str
    page_size: int

    @classmethod
    def parse(cls, text: str) -> "Place":
        """Read `8x128:page_first:64`.

        Raises:
            click.BadParameter: it is anything else.
        """
        try:
            shape, layout, page_size = text.split(":")
            heads, dim = map(int, shape.split("x"))
            if layout not in LAYOUTS:
                raise ValueError(layout)
            return cls(heads, dim, layout, int(page_size))
        except ValueError as error:
            allowed = f"HEADSxDIM:LAYOUT:PAGE_SIZE, LAYOUT {' or '.join(LAYOUTS)}, such as {PLACES[0]}"
            raise click.BadParameter(f"{text!r}; allowed: {allowed}") from error

    def __str__(self) -> str:
        return f"{self.heads}x{self.dim}:{self.layout}:{self.page_size}"


@frozen
class Setting:
    """One configuration in which all contenders meet."""

    place: str
    order: str
    tokens: int


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
        constants: of hiqcache/transfer while it runs, where they are not the usual ones.
    """

    name: str
    bytes_per_token: int
    pool: object
    backup_slots_on: torch.device
    restore_slots_on: torch.device
    constants: Mapping[str, object] = {}


def parse_variant(text: str) -> dict[str, object]:
    """Read `FIRST_GROUP=16M,LATER_GROUPS=0.7/0.3`.

    Raises:
        click.BadParameter: it is anything else, or there is no such constant.
    """
    values: dict[str, object] = {}
    for item in text.split(","):
        name, _, value = item.partition("=")
        try:
            owner_of(name)
            if "/" in value or "." in value:
                values[name] = tuple(map(float, value.split("/")))
            else:
                values[name] = int(value.rstrip("KM")) << {"K": 10, "M": 20}.get(value[-1:], 0)
        except (ValueError, LookupError) as error:
            raise click.BadParameter(f"{item!r} in {text!r}; allowed: CONSTANT=VALUE ({error})") from error
    return values


def owner_of(name: str) -> object:
    """The module or class of hiqcache/transfer that a constant belongs to."""
    from hiqcache.transfer import cuda, movers

    for owner in (cuda, chunks, copy_engine, movers, movers.CopyEngineMover):
        if name.isupper() and name in vars(owner):
            return owner
    raise LookupError(f"hiqcache/transfer has no constant {name!r}")


@contextlib.contextmanager
def constants(values: Mapping[str, object]) -> Iterator[None]:
    """Constants of hiqcache/transfer with other values meanwhile."""
    owners = {name: owner_of(name) for name in values}
    before = {name: vars(owner)[name] for name, owner in owners.items()}
    for name, owner in owners.items():
        setattr(owner, name, values[name])
    try:
        yield
    finally:
        for name, owner in owners.items():
            setattr(owner, name, before[name])


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
    """All pools of one place, and a device pool that they share.

    Args:
        place: geometry and arrangement.
        layers: of the model.
        slots: tokens that each pool holds.
        names: representations.
        variants: constants of further contenders, by name.
        pytorch: whether the plain-PyTorch transfer takes part.
        own_staging: whether transfers have no other staging than they allocate, as where `--max-total-tokens` is given.
    """

    def __init__(
        self, place: Place, layers: int, slots: int, names: Sequence[str],
        variants: Mapping[str, Mapping[str, object]], pytorch: bool, own_staging: bool,
    ):  # fmt: skip
        geometry = KVGeometry(
            layers=layers, heads=place.heads, head_dim=place.dim, v_head_dim=place.dim, page_size=place.page_size
        )
        layout = place.layout
        self.place, self.geometry, self.slots = place, geometry, slots
        self.engine = L2TransferEngine("kernel")
        self.device_pool = MHATokenToKVPool(
            slots, geometry.page_size, torch.bfloat16, geometry.heads, geometry.head_dim, geometry.layers, "cuda", False
        )
        info = self.device_pool._mha_buffer_info()
        self.rows = rows = DeviceRows(info.buffers.k, info.buffers.v)
        for layer in (*rows.k, *rows.v):
            layer.normal_()
        bf16 = MHATokenToKVPoolHost(
            info, 1.0, 0, geometry.page_size, layout,
            device_capacity_tokens=slots, start_layer=0, end_layer=geometry.layers - 1, host_token_capacity=slots,
        )  # fmt: skip
        self.arenas: dict[str, HostArena] = {}
        staging = [tensor for tensor in (bf16.staging_k_buffer, bf16.staging_v_buffer) if tensor is not None]
        staging = [] if own_staging else staging
        cpu, cuda = torch.device("cpu"), rows.device
        self.contenders = [
            Contender(
                BASELINE, geometry.device_bytes_per_token, bf16, cpu if bf16.can_use_write_back_jit else cuda, cuda
            )
        ]

        def add(name: str, bytes_per_token: int, transfer: Transfer, values: Mapping[str, object]) -> None:
            where, pool = transfer.host_indices_device, TransferPool(transfer)
            self.contenders.append(Contender(name, bytes_per_token, pool, where, where, values))

        for name in names:
            representation = get(name)(geometry)
            shape = ArenaShape.of(representation, slots // geometry.page_size, layout)
            buffer = alloc_with_host_register((shape.total_bytes,), torch.uint8, "cpu", True, HostTensorAllocator())
            arena = self.arenas[name] = HostArena(shape, buffer)
            size = representation.bytes_per_token()
            if pytorch:
                add(f"{name}, PyTorch", size, EagerTransfer(representation, arena, rows), {})
            for text, values in {"": {}, **variants}.items():
                with constants(values):
                    add(f"{name}, {text}" if text else name, size,
                        make_transfer(representation, arena, rows, staging), values)  # fmt: skip
        self._bf16 = bf16
        # Real data everywhere, so that no restore reads pages that nobody wrote.
        everything = torch.arange(slots)
        for contender in self.contenders:
            with constants(contender.constants):
                self._time(contender, "backup", everything, everything.cuda())

    def close(self) -> None:
        """Unpin the host pools."""
        self._bf16.destroy()
        for arena in self.arenas.values():
            _cuda_host_unregister(arena.buffer)

    def codecs(self) -> Iterator["Codec"]:
        """The kernels of each representation alone, over `CODEC_TOKENS` of all layers at once."""
        geometry, pages = self.geometry, CODEC_TOKENS // self.geometry.page_size
        layers, stream = range(geometry.layers), torch.cuda.current_stream()
        for name, arena in self.arenas.items():
            codec = BlockCodec(get(name)(geometry), arena.shape, self.rows)
            staging = torch.empty(
                pages * len(layers) * arena.shape.cell_bytes, dtype=torch.uint8, device=self.rows.device
            )
            took: dict[str, list[float]] = {"backup": [], "restore": []}
            for repeat in range(-WARM_UPS, CODEC_REPEATS):
                slots = self._slots(CODEC_TOKENS, "shuffled").cuda().view(pages, -1)
                for direction, code in (("backup", codec.encode), ("restore", codec.decode)):
                    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    start.record()
                    code(slots, layers, staging, stream)
                    end.record()
                    torch.cuda.synchronize()
                    if repeat >= 0:
                        took[direction].append(start.elapsed_time(end))
            size = get(name)(geometry).bytes_per_token()
            for direction, times in took.items():
                yield Codec(str(self.place), name, direction, size, statistics.median(times))

    def run(self, order: str, tokens: int, repeats: int) -> Iterator[Sample]:
        """Backups and restores of `tokens` by every contender, shuffled; the first `WARM_UPS` rounds are dropped."""
        setting = Setting(str(self.place), order, tokens)
        turns = list(itertools.product(self.contenders, ("backup", "restore")))
        dice = random.Random(0)
        for repeat in range(-WARM_UPS, repeats):
            host, device = self._slots(tokens, order), self._slots(tokens, "shuffled").cuda()
            dice.shuffle(turns)  # so that nobody always follows the same other, whose code fills the caches
            for contender, direction in turns:
                with constants(contender.constants):
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
        for event in events:  # the first record creates it, and SGLang keeps its own
            event.record()
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


@frozen
class Codec:
    """How long encoding (backup) or decoding (restore) takes `CODEC_TOKENS`, in ms of the GPU."""

    place: str
    representation: str
    direction: str
    bytes_per_token: int
    ms: float

    def share_of_link(self, ceiling: Mapping[str, float]) -> float:
        """Of the time that the link needs for the same tokens, at so many GB/s for each direction."""
        return self.ms / (CODEC_TOKENS * self.bytes_per_token / ceiling[self.direction] / 1e6)


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
    """What one contender did in one setting and direction: medians over repetitions, and ranges.

    Attributes:
        ratio: the baseline's time over its own, of the same repetitions.
        host_ratio: its own host's time over the baseline's, likewise.
    """

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
    bytes_per_token: int
    host_ratio: float


def summarise(
    samples: Sequence[Sample], bytes_per_token: Mapping[tuple[str, str], int], ceiling: Mapping[str, float]
) -> list[Row]:
    """Ratios compare a contender with the baseline in the same repetition.

    Args:
        samples: all.
        bytes_per_token: (place, contender) -> bytes that cross the link.
        ceiling: direction -> the link's GB/s.
    """

    def key(sample: Sample):
        return sample.setting, sample.direction, sample.contender

    groups: dict[tuple, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(key(sample), []).append(sample)
    rows = []
    for (setting, direction, contender), group in groups.items():
        rates = [setting.tokens / sample.last_layer_ms * 1e3 for sample in group]
        pairs = list(zip(groups[setting, direction, BASELINE], group, strict=True))
        ratios = [base.last_layer_ms / sample.last_layer_ms for base, sample in pairs]
        rate, size = statistics.median(rates), bytes_per_token[setting.place, contender]
        gb_per_s = rate * size / 1e9
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
                size,
                statistics.median(sample.host_ms / base.host_ms for base, sample in pairs),
            )
        )
    return rows


def table(rows: Sequence[Row], ceiling: dict[str, float]) -> Table:
    links = ", ".join(f"{direction} {rate:.1f} GB/s" for direction, rate in ceiling.items())
    result = Table(title=f"Transfers between L1 and L2; link ceiling: {links}")
    for heading in ("place", "pages", "tokens", "direction", "path"):
        result.add_column(heading)
    for heading in ("Mtok/s", "GB/s", "of ceiling", "first ms", "last ms", "host ms", "x BF16", "range"):
        result.add_column(heading, justify="right")
    previous = None
    for row in rows:
        setting = row.setting
        group = (setting.place, setting.order, str(setting.tokens), row.direction)
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


def codec_table(codecs: Sequence[Codec], ceiling: Mapping[str, float]) -> Table:
    result = Table(title=f"The codec's kernels alone, {CODEC_TOKENS} tokens")
    for heading in ("place", "representation", "direction"):
        result.add_column(heading)
    for heading in ("ms", "of the link's time"):
        result.add_column(heading, justify="right")
    for codec in codecs:
        share = f"{codec.share_of_link(ceiling):.0%}"
        result.add_row(codec.place, codec.representation, codec.direction, f"{codec.ms:.3f}", share)
    return result


def plot(rows: Sequence[Row], ceiling: Mapping[str, float], path: Path) -> None:
    """Tokens a second over the size of the transfer; dashed: the link's ceiling at each path's bytes a token."""
    from matplotlib import pyplot as plt

    places = list(dict.fromkeys((row.setting.place, row.setting.order) for row in rows))
    contenders = list(dict.fromkeys(row.contender for row in rows))
    figure, axes = plt.subplots(
        2, len(places), figsize=(4 * len(places), 6.4), sharex=True, squeeze=False, layout="constrained"
    )
    for (line, direction), (column, place) in itertools.product(enumerate(("restore", "backup")), enumerate(places)):
        axis = axes[line][column]
        for number, contender in enumerate(contenders):
            found = [
                row
                for row in rows
                if (row.direction, row.contender) == (direction, contender)
                and (row.setting.place, row.setting.order) == place
            ]
            points = sorted((row.setting.tokens, row.tokens_per_s / 1e6) for row in found)
            axis.plot(*zip(*points, strict=True), marker="o", color=f"C{number}", label=contender)
            if not contender.endswith("PyTorch"):
                limit = ceiling[direction] * 1e3 / found[0].bytes_per_token
                axis.axhline(limit, linestyle="--", linewidth=1, color=f"C{number}")
        axis.set(title="{}, {}, {}".format(direction, *place), xscale="log", ylim=(0, None))
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("tokens in the transfer")
    for axis in axes[:, 0]:
        axis.set_ylabel("million tokens a second")
    axes[0][0].legend(fontsize="small")
    save(figure, path)


@click.command(help=__doc__)
@click.option(
    "--place",
    "places",
    multiple=True,
    default=PLACES,
    show_default=True,
    callback=lambda _, __, each: tuple(map(Place.parse, each)),
    help="HEADSxDIM:LAYOUT:PAGE_SIZE, heads being local ones.",
)
@click.option(
    "--representation",
    "names",
    multiple=True,
    default=("int8", "k6v4", "int4"),
    show_default=True,
    type=click.Choice(registered()),
)
@click.option("--layers", default=36, show_default=True)
@click.option("--tokens", "sizes", type=int, multiple=True, default=(512, 4096, 16384, 32768), show_default=True)
@click.option("--order", "orders", type=click.Choice(ORDERS), multiple=True, default=("shuffled",), show_default=True)
@click.option("--repeats", default=15, show_default=True, help="Interleaved rounds of each setting.")
@click.option(
    "--variant",
    "variants",
    multiple=True,
    callback=lambda _, __, each: {text: parse_variant(text) for text in each},
    help="CONSTANT=VALUE,...: one more contender.",
)
@click.option("--pytorch", is_flag=True, help="The plain-PyTorch transfer takes part too.")
@click.option("--own-staging", is_flag=True, help="As where SGLang has none to lend: --max-total-tokens is given.")
@click.option(
    "--out", type=click.Path(path_type=Path), callback=writable, help="JSON to write; the plot goes beside it as .png."
)
def main(places, names, layers, sizes, orders, repeats, variants, pytorch, own_staging, out: Path | None) -> None:
    torch.manual_seed(0)
    ceiling, samples, codecs, bytes_per_token = Ceiling(), [], [], {}
    began = time.monotonic()
    for place in places:
        bench = Bench(place, layers, 2 * max(sizes), names, variants, pytorch, own_staging)
        bytes_per_token |= {(str(place), each.name): each.bytes_per_token for each in bench.contenders}
        for order, tokens in itertools.product(orders, sizes):
            ceiling.measure()
            samples += bench.run(order, tokens, repeats)
            click.echo(f"{time.monotonic() - began:5.0f} s  {place}, {order}, {tokens} tokens", err=True)
        codecs += bench.codecs()
        bench.close()
        del bench
        torch.cuda.empty_cache()
    limits = {direction: statistics.median(rates) for direction, rates in ceiling.gb_per_s.items()}
    rows = summarise(samples, bytes_per_token, limits)
    Console(width=None if sys.stdout.isatty() else 180).print(table(rows, limits), codec_table(codecs, limits))
    if out:
        versions = {name: version(name) for name in ("hiqcache", "torch", "triton", "sglang")}
        record = {
            "command": command_line(),
            "gpu": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "versions": versions,
            "layers": layers,
            "repeats": repeats,
            "staging": "its own" if own_staging else "SGLang's, where there is one",
            "ceiling_gb_per_s": limits,
            "rows": [asdict(row) for row in rows],
            "codecs": [{**asdict(each), "share_of_link": each.share_of_link(limits)} for each in codecs],
        }
        out.write_text(json.dumps(record, indent=1) + "\n")
        plot(rows, limits, out.with_suffix(".png"))


if __name__ == "__main__":
    main()
