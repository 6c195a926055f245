"""Move pages between L1 and L2 both ways at once and compare every value with the reference codec.

    python tools/stress_transfer.py --out docs/results/stress-h200.json

Backups and restores of random sizes run on two streams, behind streams that are kept busy. Nothing waits for more than
the events that a host pool is promised:

\b
* each layer of a restore is compared as its event fires, and its rows are overwritten at once;
* the bytes of a backup are compared as its event fires, and its rows are overwritten at once;
* the next backups and restores take the same host pages, rows and memory as soon as these are free.

Rows are poison before a restore and host pages hold another page before a backup, so a value that is not written shows.
Every two seconds everything stands still, and the whole arena and all rows are compared: nothing else may have changed.
What is expected comes from the representation's plain-PyTorch `encode` and `decode`. Exits with status 1 if a
bit differs. Without a GPU it runs at a small size on the CPU, where nothing is concurrent.
"""

import json
import math
import platform
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import torch
from attrs import asdict, define, evolve, frozen
from results import command_line, writable
from rich.table import Column

from hiqcache.arena import ArenaShape, HostArena
from hiqcache.commands._table import print_table
from hiqcache.geometry import KVGeometry, Part
from hiqcache.registry import get
from hiqcache.representation import HostRepresentation
from hiqcache.transfer import DeviceRows, make_transfer
from hiqcache.transfer.eager import device_alias

ROW_POISON = 0x7FA5
"""BF16 bits of a NaN that no page holds and no codec gives back."""
BYTE_POISON = 0x5A
GIVEN_STAGING = 128 << 20
"""Bytes of each staging tensor that is given to a transfer on a GPU."""
IN_FLIGHT = 4
"""Rounds that the host may be ahead of the device."""
AUDIT_SECONDS = 2.0
LEAST_ROUNDS = 10
"""Rounds of each configuration, however slow the machine."""


@frozen
class Setting:
    """One configuration."""

    page_size: int
    layout: str
    representation: str
    heads: int
    head_dim: int
    layers: int
    staging: str

    def __str__(self) -> str:
        return (
            f"{self.representation} {self.heads}x{self.head_dim}, {self.layers} layers, page size {self.page_size}, "
            f"{self.layout}, {self.staging} staging"
        )

    @property
    def geometry(self) -> KVGeometry:
        return KVGeometry(
            layers=self.layers,
            heads=self.heads,
            head_dim=self.head_dim,
            v_head_dim=self.head_dim,
            page_size=self.page_size,
        )


SETTINGS = (
    Setting(1, "page_first", "int8", 8, 128, 36, "own"),
    Setting(1, "layer_first", "bf16", 3, 64, 30, "given"),
    Setting(16, "page_first", "int8", 4, 128, 36, "given"),
    Setting(16, "layer_first", "int8", 3, 64, 30, "own"),
    Setting(64, "page_first", "int8", 8, 128, 36, "own"),
    Setting(64, "layer_first", "int8", 8, 128, 36, "given"),
    Setting(128, "page_first", "bf16", 8, 128, 36, "given"),
    Setting(128, "layer_first", "int8", 2, 128, 36, "own"),
    Setting(7, "page_first", "int8", 3, 64, 30, "own"),
    Setting(7, "layer_first", "bf16", 5, 80, 12, "own"),  # blocks that only the PyTorch transfer moves
)
"""Every page size in both layouts; representations, heads and staging in turn."""


@frozen
class Scale:
    """How large everything is.

    Attributes:
        transfer_bytes: encoded bytes of the largest transfer, which has some pages at least.
        bank_tokens: tokens of known pages, of which there are some at least.
        layers: of a model, at most.
    """

    transfer_bytes: int
    bank_tokens: int
    layers: int


SCALES = {"cuda": Scale(256 << 20, 4096, 36), "cpu": Scale(1 << 20, 256, 4)}
"""By device type. On a GPU transfers are larger than what takes another path, and than staging."""


class Device:
    """A device's streams and events; on a CPU they do nothing, and work is done when its call returns."""

    def __init__(self, kind: str):
        self.kind = kind
        self._module: Any = torch.get_device_module(kind)

    def stream(self) -> Any:
        return self._module.Stream()

    def event(self, stream: Any) -> Any:
        """An event that fires when all has been done that was enqueued on `stream`."""
        event = self._module.Event()
        event.record(stream)
        return event

    def current(self, stream: Any) -> AbstractContextManager:
        """Inside, `stream` is the current one."""
        return self._module.stream(stream)

    def enqueue(self, stream: Any, work: Callable[..., None], *arguments: object) -> None:
        with self.current(stream):
            work(*arguments)

    def spin(self, microseconds: float) -> None:
        """Keep the current stream busy."""
        if self.kind == "cuda":
            torch.cuda._sleep(int(microseconds * 1800))  # cycles

    def synchronize(self) -> None:
        self._module.synchronize()


class Bank:
    """Pages of known content.

    Attributes:
        values, decoded: `[parts, layers, tokens, heads * dim]` BF16 bits, before and after the codec.
        blocks: for each part `[layers, pages, block_bytes]` uint8.
    """

    def __init__(self, representation: HostRepresentation, pages: int, device: str, seed: int):
        geometry = representation.geometry
        generator = torch.Generator(device).manual_seed(seed)
        shape = (pages, geometry.page_size, geometry.heads, geometry.head_dim)
        rows = (len(Part), geometry.layers, pages * geometry.page_size, geometry.heads * geometry.head_dim)
        self.pages = pages
        self.values = torch.empty(rows, dtype=torch.int16, device=device)
        self.decoded = torch.empty_like(self.values)
        self.blocks: dict[Part, torch.Tensor] = {}
        for values, decoded, part in zip(self.values, self.decoded, Part, strict=True):
            block_bytes = representation.layouts[part].block_bytes
            self.blocks[part] = torch.empty((geometry.layers, pages, block_bytes), dtype=torch.uint8, device=device)
            for layer, blocks in enumerate(self.blocks[part]):
                values[layer] = _random_bits(shape, generator).view(rows[2:])
                representation.encode(values[layer].view(torch.bfloat16).view(shape), part, blocks)
                representation.decode(blocks, part, decoded[layer].view(torch.bfloat16).view(shape))


def _random_bits(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """BF16 bits of heads that differ in magnitude; of one head in eight any bits, NaN and infinity among them."""
    device, heads = generator.device, (*shape[:-1], 1)
    exponents = torch.randint(-120, 120, heads, generator=generator, device=device)
    numbers = (torch.randn(shape, generator=generator, device=device) * 2.0**exponents).bfloat16().view(torch.int16)
    anything = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator, device=device)
    anything[anything == ROW_POISON] = 0
    return torch.where(torch.randint(8, heads, generator=generator, device=device) == 0, anything, numbers)


class Users:
    """The last operation of one kind that used each page. Operations of a kind end in their order."""

    def __init__(self, pages: int):
        self._last = torch.zeros(pages, dtype=torch.int64)
        self._events: dict[int, Any] = {}
        self._number = 0

    def add(self, pages: torch.Tensor, event: Any) -> None:
        """Another operation uses `pages` until `event`."""
        self._number += 1
        self._last[pages] = self._number
        self._events[self._number] = event
        self._events.pop(self._number - 2 * IN_FLIGHT, None)  # the host has waited for it

    def await_last(self, stream: Any, pages: torch.Tensor) -> None:
        """Let `stream` wait until none of `pages` is in use."""
        if event := self._events.get(int(self._last[pages].max())):
            stream.wait_event(event)


@define
class Tally:
    """What was moved and compared, and what was wrong."""

    rounds: int = 0
    pages_backed_up: int = 0
    pages_restored: int = 0
    bytes_checked: int = 0
    values_checked: int = 0
    wrong_bytes: int = 0
    wrong_values: int = 0
    wrong_elsewhere: int = 0
    """Bytes of the arena and values of the rows that were wrong when everything stood still."""

    @property
    def wrong(self) -> int:
        return self.wrong_bytes + self.wrong_values + self.wrong_elsewhere


@frozen
class Indices:
    """The pages of one transfer, on the CPU and on the device.

    Attributes:
        host, rows, known: numbers of host pages, of pages of rows and of pages of the bank, on the CPU.
        on_device: the same three, as pages.
        host_slots, row_slots, known_tokens: on the device, one for each token.
        ready: fires when what is on the device is there.
    """

    host: torch.Tensor
    rows: torch.Tensor
    known: torch.Tensor
    on_device: torch.Tensor
    host_slots: torch.Tensor
    row_slots: torch.Tensor
    known_tokens: torch.Tensor
    ready: Any


class Stress:
    """A transfer, what it moves between, and what should come of that.

    Args:
        setting: the configuration.
        device: where rows are.
        scale: how large everything is.
        seed: of all that is random.
    """

    def __init__(self, setting: Setting, device: Device, scale: Scale, seed: int):
        self.setting, self._device, self._geometry = setting, device, setting.geometry
        self.tally = Tally()
        self._dice, self._generator = random.Random(seed), torch.Generator().manual_seed(seed)
        representation = get(setting.representation)(self._geometry)
        page_bytes = representation.bytes_per_token() * setting.page_size
        self._most = max(4, scale.transfer_bytes // page_bytes)
        self._bank = Bank(representation, max(16, scale.bank_tokens // setting.page_size), device.kind, seed)
        self._content = torch.full((3 * self._most,), -1)
        """For each host page, the page of the bank that it holds once all is done; -1: nothing yet."""
        on_gpu = device.kind == "cuda"
        shape = ArenaShape.of(representation, len(self._content), setting.layout)
        buffer = torch.full((shape.total_bytes,), BYTE_POISON, dtype=torch.uint8)
        buffer = buffer.pin_memory() if on_gpu else buffer
        self._arena = HostArena(shape, buffer)
        reachable = HostArena(shape, device_alias(buffer, torch.device(device.kind)))
        self._reachable = {part: reachable.blocks(part) for part in Part}
        self._row_pages = row_pages = 2 * self._most + 1
        parts, layers, _, width = self._bank.values.shape
        self._rows = torch.full(
            (parts, layers, row_pages * setting.page_size, width), ROW_POISON, dtype=torch.int16, device=device.kind
        )
        values = self._rows.view(torch.bfloat16).unflatten(-1, (setting.heads, setting.head_dim))
        given = on_gpu and setting.staging == "given"
        staging = [
            torch.full((GIVEN_STAGING,), BYTE_POISON, dtype=torch.uint8, device="cuda") for _ in range(2 * given)
        ]
        self._transfer = make_transfer(representation, self._arena, DeviceRows(*map(list, values)), staging)
        self._tokens = torch.arange(setting.page_size, device=device.kind)
        self._wrong_values, self._wrong_bytes = (
            torch.zeros((), dtype=torch.int64, device=device.kind) for _ in range(2)
        )
        self._feeder, self._writer, self._down, self._up, self._reader, self._inspector = (
            device.stream() for _ in range(6)
        )
        self._backed_up, self._inspected, self._restored = (Users(len(self._content)) for _ in range(3))
        """Users of host pages: backups, comparisons of their bytes, and restores."""
        self._erased, self._read = Users(row_pages), Users(row_pages)
        """Users of rows: backups and restores, until their rows are poison again."""
        none = torch.empty(0, dtype=torch.int64)
        self._last = (none, none), (none, none)
        """Host pages and pages of rows of the latest backup, and of the latest restore."""
        self._in_flight: deque[tuple[list[Any], list[Indices]]] = deque()
        """Of each round, the events at which it ends, and what must not be freed before."""
        device.synchronize()

    @property
    def transfer(self) -> str:
        """The class of the transfer."""
        return type(self._transfer).__name__

    def run(self, seconds: float, progress: Callable[[float], None]) -> None:
        """Move pages for a time; `progress` is told the seconds so far whenever everything was compared."""
        begin = audited = time.monotonic()
        while (now := time.monotonic()) < begin + seconds or self.tally.rounds < LEAST_ROUNDS:
            self.round()
            if now > audited + AUDIT_SECONDS:
                self.audit()
                progress(now - begin)
                audited = time.monotonic()
        self.audit()
        progress(time.monotonic() - begin)

    def round(self) -> None:
        """Enqueue a backup and a restore of other pages, one or the other first."""
        last_down, last_up = self._last
        unused, unused_rows = (torch.ones(count, dtype=torch.bool) for count in (len(self._content), self._row_pages))
        count = self._size()
        host, rows = self._pick(count, unused, last_up[0]), self._pick(count, unused_rows, last_up[1])
        # What a page will hold must differ from what it holds.
        known = torch.randint(self._bank.pages - 1, (count,), generator=self._generator)
        moves = [(self._backup, self._indices(host, rows, (self._content[host] + 1 + known) % self._bank.pages))]
        unused[host] = unused_rows[rows] = False
        unused[self._content < 0] = False
        self._last = (host, rows), last_up
        if count := min(self._size(), int(unused.sum())):
            host, rows = self._pick(count, unused, last_down[0]), self._pick(count, unused_rows, last_down[1])
            moves.append((self._restore, self._indices(host, rows, self._content[host])))
            self._last = self._last[0], (host, rows)

        self._dice.shuffle(moves)
        self._in_flight.append(([move(indices) for move, indices in moves], [indices for _, indices in moves]))
        self.tally.rounds += 1
        if len(self._in_flight) > IN_FLIGHT:
            ends, _ = self._in_flight.popleft()
            for end in ends:
                end.synchronize()

    def _pick(self, count: int, allowed: torch.Tensor, latest: torch.Tensor) -> torch.Tensor:
        """Some of the allowed pages at random; half of the time, those of the latest transfer the other way first."""
        order = torch.rand(len(allowed), generator=self._generator)
        if self._dice.random() < 0.5:
            order[latest] += 1
        order[~allowed] = -1
        return order.topk(count).indices

    def audit(self) -> None:
        """Let everything end, and compare the whole arena and all rows."""
        self._device.synchronize()
        self._in_flight.clear()
        arena = HostArena(self._arena.shape, self._arena.buffer.to(self._device.kind))
        content = self._content.to(self._device.kind)
        for part in Part:
            for seen, known in zip(arena.blocks(part), self._bank.blocks[part], strict=True):
                expected = known[content.clamp(min=0)]
                expected[content < 0] = BYTE_POISON
                self.tally.wrong_elsewhere += int((seen != expected).sum())
        self.tally.wrong_elsewhere += int((self._rows != ROW_POISON).sum())
        self._rows.fill_(ROW_POISON)  # so that a stray value is counted once
        self.tally.wrong_bytes, self.tally.wrong_values = int(self._wrong_bytes), int(self._wrong_values)
        self._device.synchronize()

    def _size(self) -> int:
        """Pages of a transfer, from 1 to the most: as often between 1 and 10 as between 100 and 1,000."""
        return int(math.exp(self._dice.uniform(0, math.log(self._most + 1))))

    def _indices(self, host: torch.Tensor, rows: torch.Tensor, known: torch.Tensor) -> Indices:
        """Put numbers of pages on the device, without waiting for any stream but the feeder's."""
        pages = torch.stack([host, rows, known])
        if self._device.kind == "cuda":
            pages = pages.pin_memory()
        with self._device.current(self._feeder):
            on_device = pages.to(self._device.kind, non_blocking=True)
            slots = on_device[..., None] * self.setting.page_size + self._tokens
            host_slots, row_slots, known_tokens = slots.flatten(1)
        ready = self._device.event(self._feeder)
        return Indices(host, rows, known, on_device, host_slots, row_slots, known_tokens, ready)

    def _backup(self, indices: Indices) -> Any:
        """Fill rows, back them up, compare the bytes and poison the rows; the event of all that."""
        for users in (self._read, self._erased):
            users.await_last(self._writer, indices.rows)
        self._writer.wait_event(indices.ready)
        self._keep_busy(self._writer, 500)
        self._device.enqueue(self._writer, self._fill, indices)
        self._down.wait_event(self._device.event(self._writer))
        for users in (self._restored, self._inspected):
            users.await_last(self._down, indices.host)
        self._keep_busy(self._down, 1000)
        with self._device.current(self._down):
            self._transfer.backup(self._host_slots(indices), indices.row_slots)
        self._device.enqueue(self._down, self._litter, indices)
        finished = self._device.event(self._down)

        self._backed_up.add(indices.host, finished)
        self._inspector.wait_event(finished)
        self._device.enqueue(self._inspector, self._erase, indices)
        self._erased.add(indices.rows, self._device.event(self._inspector))
        self._device.enqueue(self._inspector, self._inspect, indices)
        inspected = self._device.event(self._inspector)
        self._inspected.add(indices.host, inspected)
        self._content[indices.host] = indices.known
        self.tally.pages_backed_up += len(indices.host)
        self.tally.bytes_checked += len(indices.host) * sum(
            blocks.shape[0] * blocks.shape[2] for blocks in self._bank.blocks.values()
        )
        return inspected

    def _restore(self, indices: Indices) -> Any:
        """Restore, compare and poison the rows of each layer as its event fires; the event of all that."""
        self._up.wait_event(indices.ready)
        self._backed_up.await_last(self._up, indices.host)
        for users in (self._read, self._erased):
            users.await_last(self._up, indices.rows)
        self._keep_busy(self._up, 1000)
        slots = self._host_slots(indices)
        for layer in range(self.setting.layers):
            with self._device.current(self._up):
                self._transfer.restore(layer, slots, indices.row_slots)
            self._reader.wait_event(self._device.event(self._up))
            self._device.enqueue(self._reader, self._read_layer, layer, indices)
            if self._dice.random() < 0.05:
                self._keep_busy(self._up, 2000)
        self._restored.add(indices.host, self._device.event(self._up))
        self._device.enqueue(self._up, self._litter, indices)
        read = self._device.event(self._reader)
        self._read.add(indices.rows, read)
        self.tally.pages_restored += len(indices.host)
        self.tally.values_checked += len(indices.host) * self.setting.page_size * self._bank.values[:, :, 0].numel()
        return read

    def _host_slots(self, indices: Indices) -> torch.Tensor:
        """On the CPU or on the device: they take different paths."""
        if self._dice.random() < 0.5:
            return indices.host_slots
        return (indices.host[:, None] * self.setting.page_size + torch.arange(self.setting.page_size)).flatten()

    def _keep_busy(self, stream: Any, microseconds: float) -> None:
        if self._dice.random() < 0.5:
            self._device.enqueue(stream, self._device.spin, self._dice.uniform(0, microseconds))

    # What runs on the device's streams.

    def _fill(self, indices: Indices) -> None:
        self._rows[:, :, indices.row_slots] = self._bank.values[:, :, indices.known_tokens]

    def _erase(self, indices: Indices) -> None:
        self._rows.index_fill_(2, indices.row_slots, ROW_POISON)

    def _inspect(self, indices: Indices) -> None:
        host, _, known = indices.on_device
        for part in Part:
            # By words, since these are read over the link.
            word = torch.int64 if self._bank.blocks[part].shape[-1] % 8 == 0 else torch.uint8
            seen = self._reachable[part].view(word)[:, host]
            expected = self._bank.blocks[part].view(word)[:, known]
            self._wrong_bytes += (seen.view(torch.uint8) != expected.view(torch.uint8)).sum()

    def _read_layer(self, layer: int, indices: Indices) -> None:
        rows, expected = self._rows[:, layer], self._bank.decoded[:, layer]
        self._wrong_values += (rows[:, indices.row_slots] != expected[:, indices.known_tokens]).sum()
        rows.index_fill_(1, indices.row_slots, ROW_POISON)

    def _litter(self, indices: Indices) -> None:
        """Overwrite memory that a transfer has given back, slots of its own for one: nothing may be using it."""
        for like in (indices.row_slots, indices.on_device[0]):
            torch.zeros_like(like)


def stress(
    settings: Sequence[Setting], seconds: float, seed: int, device: Device, scale: Scale
) -> Iterator[tuple[Setting, str, Tally]]:
    """Each configuration, the class of its transfer, and what came of it; progress goes to stderr."""
    for setting in settings:
        setting = evolve(setting, layers=min(setting.layers, scale.layers))
        one = Stress(setting, device, scale, seed)

        def progress(seconds: float, one: Stress = one) -> None:
            pages = one.tally.pages_backed_up + one.tally.pages_restored
            click.echo(f"{one.setting}: {seconds:.0f} s, {pages:,} pages, {one.tally.wrong:,} wrong", err=True)

        one.run(seconds, progress)
        yield setting, one.transfer, one.tally


def show(found: Sequence[tuple[Setting, str, Tally]]) -> None:
    """Print the table."""
    titles = (
        "rounds",
        "pages down",
        "bytes checked",
        "wrong",
        "pages up",
        "values checked",
        "wrong",
        "wrong elsewhere",
    )
    rows = []
    for setting, transfer, tally in found:
        figures = (
            tally.rounds,
            tally.pages_backed_up,
            tally.bytes_checked,
            tally.wrong_bytes,
            tally.pages_restored,
            tally.values_checked,
            tally.wrong_values,
            tally.wrong_elsewhere,
        )
        rows.append((str(setting), transfer, *(f"{figure:,}" for figure in figures)))
    print_table(["configuration", "transfer", *(Column(title, justify="right") for title in titles)], rows)


@click.command(help=__doc__)
@click.option("--seconds", default=20.0, show_default=True, help="For each of the configurations.")
@click.option("--seed", default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), callback=writable, help="JSON file to write.")
def main(seconds: float, seed: int, out: Path | None) -> None:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    found = list(stress(SETTINGS, seconds, seed, Device(kind), SCALES[kind]))
    show(found)
    wrong = sum(tally.wrong for _, _, tally in found)
    if out:
        result = {
            "what": "pages moved both ways at once, every value compared with the reference codec",
            "command": command_line(),
            "hardware": torch.cuda.get_device_name() if kind == "cuda" else f"CPU, {platform.machine()}",
            "versions": {name: version(name) for name in ("hiqcache", "torch", "triton")},
            "seconds": seconds,
            "seed": seed,
            "configurations": [
                {**asdict(setting), "transfer": transfer, **asdict(tally)} for setting, transfer, tally in found
            ],
            "wrong": wrong,
        }
        out.write_text(json.dumps(result, indent=1) + "\n")
    pages = sum(tally.pages_backed_up + tally.pages_restored for _, _, tally in found)
    click.echo(f"{pages:,} pages moved, {wrong:,} wrong values and bytes")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
