"""The CUDA transfer against the reference codec: on a GPU in full, and its kernels without one."""

import itertools
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import transfers
from attrs import define

from hiqcache.arena import LAYOUTS, HostArena
from hiqcache.exponents import KeyExponents
from hiqcache.geometry import KVGeometry, Part
from hiqcache.registry import get
from hiqcache.representation import HostRepresentation
from hiqcache.transfer import DeviceRows, EagerTransfer, Transfer, chunks, clock, make_transfer

TESTS = Path(__file__).parent
PATHS = ("copy engine", "kernel", "eager")
WANTED_RUNS = {"copy engine": 1, "kernel": 1 << 40, "both": 2 * 2 * 16 * 1040}
"""Path -> the run from which the copy engine is taken; "both": by 16-token pages' restores after their first layer."""


def run_interpreter(*words: str) -> None:
    result = subprocess.run(
        [sys.executable, TESTS / "interpreted_kernels.py", *words],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "agree" in result.stdout


def test_kernels_agree_with_the_reference_codec_in_tritons_interpreter():
    run_interpreter()


@pytest.mark.sweep
def test_kernels_agree_in_every_geometry_in_tritons_interpreter():
    run_interpreter("sweep")


@pytest.mark.parametrize("layers", [1, 2, 5, 36, 80])
@pytest.mark.parametrize("layer_bytes", [1, 1 << 20, 8_519_680, 1 << 30])
@pytest.mark.parametrize(("fewest", "most"), [(1, 1000), (2, 1000), (1, 3), (1, 1)])
def test_groups_cover_each_layer_once_and_in_order(layers, layer_bytes, fewest, most):
    groups = chunks.layer_groups(layers, layer_bytes, fewest, most)
    assert [layer for group in groups for layer in group] == list(range(layers))
    assert all(1 <= len(group) <= most for group in groups)
    assert len(groups[0]) >= min(fewest, most, layers)


def test_groups_of_qwen3_8b():
    # 64 tokens x 2,080 bytes a page and layer: 6 MiB are less than a layer of 4,096 tokens, and more than 5 of 512.
    assert [len(group) for group in chunks.layer_groups(36, 64 * 133_120, 1, 1000)] == [1, 24, 11]
    assert [len(group) for group in chunks.layer_groups(36, 16 * 133_120, 1, 1000)] == [3, 23, 10]
    assert [len(group) for group in chunks.layer_groups(36, 512 * 133_120, 1, 1000)] == [1, 5, 13, 12, 5], "32,768"
    assert [len(group) for group in chunks.layer_groups(36, 8 * 133_120, 1, 1000)] == [6, 30], "small: fewer groups"


@pytest.mark.parametrize("spans", [chunks.even_spans, chunks.growing_spans])
@pytest.mark.parametrize("pages", [0, 1, 2, 7, 64, 1000])
@pytest.mark.parametrize("limit", [1, 10 << 20, 40 << 20, 1 << 40])
def test_spans_cover_each_page_once_within_the_limit(spans, pages, limit):
    page_bytes = 5 << 20
    found = list(spans(pages, page_bytes, limit))
    assert [page for span in found for page in range(span.start, span.stop)] == list(range(pages))
    assert all(1 <= span.stop - span.start <= max(1, limit // page_bytes) for span in found)


def test_importing_hiqcache_does_not_import_triton():
    modules = "hiqcache.transfer, hiqcache.backends.int8, hiqcache.backends.bf16"
    code = f"import sys; sys.modules['triton'] = None; import {modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_a_gpu_the_transfer_is_the_pytorch_one():
    case = Case.build("int8", "page_first", (8, 128), 4, device="cpu")
    assert isinstance(make_transfer(case.representation, case.arena, case.rows), EagerTransfer)


@pytest.mark.parametrize("to_host", [True, False])
def test_the_copy_engine_is_given_one_run_for_each_page(to_host, monkeypatch):
    from hiqcache.transfer import movers

    given = []

    class Recorder:
        def __init__(self, device, to_host):
            self.to_host = to_host

        def copy(self, copies, stream):
            given.append((copies.copy(), stream, self.to_host))

    monkeypatch.setattr(movers, "CopyEngine", Recorder)
    case = Case.build("int8", "page_first", (8, 128), 4, device="cpu")
    mover = movers.CopyEngineMover(case.arena, 4, torch.device("cuda"), to_host)
    staging, shape, stream = torch.empty(1 << 20, dtype=torch.uint8), case.arena.shape, Mock()
    mover.locate(case.host)
    mover.move(slice(1, 4), range(2, 5), staging, stream)

    [(copies, on, direction)] = given
    far, near, size = copies if to_host else copies[[1, 0, 2]]
    run, pages = 3 * 2 * 4224, case.host[4:16:4] // 4  # 3 layers of K and V; 4 x 1,040 bytes are padded to 4,224
    assert far.tolist() == [case.arena.buffer.data_ptr() + shape.offset(Part.K, 2, page) for page in pages.tolist()]
    assert near.tolist() == [staging.data_ptr() + place * run for place in range(3)]
    assert size.tolist() == [run] * 3
    assert (on, direction) == (stream, to_host)


@define
class Case:
    """A pool, an arena full of noise, and the slots of a transfer, on the CPU."""

    representation: HostRepresentation
    arena: HostArena
    rows: DeviceRows
    host: torch.Tensor
    device: torch.Tensor
    generator: torch.Generator
    exponents: KeyExponents | None = None

    @classmethod
    def build(cls, name: str, arrangement: str, shape: tuple[int, int], page_size: int, pages: int = 5, layers: int = 5,
              device: str = "cuda", seed: int = 0) -> "Case":  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        geometry = transfers.geometry(shape, page_size, layers)
        representation = get(name)(geometry)
        arena = transfers.random_arena(representation, pages + 3, arrangement, generator, pin=device == "cuda")
        rows = transfers.random_rows(geometry, (pages + 2) * page_size, generator, device)
        host, slots = (transfers.random_slots(pages, pages + extra, page_size, generator) for extra in (3, 2))
        return cls(representation, arena, rows, host, slots, generator)

    @property
    def geometry(self) -> KVGeometry:
        return self.representation.geometry

    def reshuffle(self) -> None:
        """Other device slots for the same host pages."""
        slots = len(self.rows.k[0]) // self.geometry.page_size
        self.device = transfers.random_slots(
            len(self.host) // self.geometry.page_size, slots, self.geometry.page_size, self.generator
        )

    def check_backup(self, transfer: Transfer, host_on: str) -> None:
        expected = transfers.after_backup(
            self.representation, self.arena, self.rows, self.host, self.device, self.exponents
        )
        transfer.backup(self.host.to(host_on), self.device.cuda())
        torch.cuda.synchronize()
        assert torch.equal(self.arena.buffer, expected)

    def check_restore(self, transfer: Transfer, host_on: str) -> None:
        expected = transfers.after_restore(
            self.representation, self.arena, self.rows, self.host, self.device, self.exponents
        )
        host, device = self.host.to(host_on), self.device.cuda()
        in_place = []
        for layer in range(self.geometry.layers):
            transfer.restore(layer, host, device)
            in_place.append([self.rows.of(part)[layer].clone() for part in Part])
        torch.cuda.synchronize()
        for layer, rows in enumerate(in_place):
            for part, row in zip(Part, rows, strict=True):
                assert transfers.same_bits(row, expected.of(part)[layer]), f"{part}, layer {layer}, as its event fires"
                assert transfers.same_bits(self.rows.of(part)[layer], expected.of(part)[layer])


def cuda_transfer(case: Case, path: str, monkeypatch: pytest.MonkeyPatch) -> Transfer:
    """A transfer made to take one path, whatever the sizes."""
    if path == "eager":
        return EagerTransfer(case.representation, case.arena, case.rows)
    from hiqcache.transfer import cuda
    from hiqcache.transfer.movers import CopyEngineMover

    monkeypatch.setattr(chunks, "FIRST_GROUP", 1)
    monkeypatch.setattr(CopyEngineMover, "WANTED_RUN", WANTED_RUNS[path])
    transfer = make_transfer(case.representation, case.arena, case.rows)
    assert transfer.host_indices_device.type == "cpu"
    assert isinstance(transfer, cuda.CudaTransfer)
    by_copies = path != "kernel" and case.arena.shape.arrangement == "page_first"
    assert (transfer._restore_lane.copies is not None) == by_copies
    return transfer


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("arrangement", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "shape", "page_size"),
    [
        *itertools.product(["int8"], transfers.SHAPES, [1, 64]),
        ("int8", (1, 128), 64),
        ("int8", (1, 128), 2),
        ("int8", (5, 80), 8),
        ("int8", (9, 96), 128),
        *[(name, (3, 64), page_size) for name, page_size in (("int8", 16), ("bf16", 1), ("bf16", 64))],
        *itertools.product(["k6v4", "int4"], [(8, 128)], [1, 64]),
        *[("k6v4", (3, 64), 2), ("k6v4", (1, 192), 32), ("int4", (5, 80), 8), ("int4", (2, 256), 16)],
    ],
)
def test_bytes_and_rows_are_those_of_the_reference_codec(name, shape, page_size, arrangement, path, monkeypatch):
    case = Case.build(name, arrangement, shape, page_size, pages=37 if page_size == 1 else 5)
    transfer = cuda_transfer(case, path, monkeypatch)
    case.check_backup(transfer, "cpu")
    case.reshuffle()
    case.check_restore(transfer, "cuda")
    case.reshuffle()
    case.check_restore(transfer, "cpu")
    case.reshuffle()
    case.check_backup(transfer, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("arrangement", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "shape", "page_size"),
    [("int8", (8, 128), 64), ("int8", (3, 80), 4), ("k6v4", (3, 64), 2), ("int4", (8, 128), 1)],
)
def test_channels_of_k_are_divided_before_and_multiplied_after(name, shape, page_size, arrangement, path, monkeypatch):
    case = Case.build(name, arrangement, shape, page_size, pages=7)
    case.exponents = transfers.random_exponents(case.geometry, case.generator)
    transfer = cuda_transfer(case, path, monkeypatch)
    transfer.scale_keys(case.exponents)
    case.check_backup(transfer, "cpu")
    case.reshuffle()
    case.check_restore(transfer, "cpu")


@pytest.mark.gpu
@pytest.mark.sweep
@pytest.mark.parametrize("number", range(30))
def test_every_head_count_and_width_at_two_page_sizes(number, monkeypatch):
    shape = list(itertools.product((1, 2, 3, 5, 8, 9), (64, 80, 96, 128, 256)))[number]
    for page_size, path in ((2 ** (1 + number % 7), "kernel"), (2 ** (1 + (number + 3) % 7), "copy engine")):
        while any(get("int8").requirements(transfers.geometry(shape, page_size, 5))):  # padding would eat the gain
            page_size *= 2
        case = Case.build("int8", LAYOUTS[number % 2], shape, page_size, pages=11 if page_size < 16 else 3)
        transfer = cuda_transfer(case, path, monkeypatch)
        case.check_backup(transfer, "cpu")
        case.reshuffle()
        case.check_restore(transfer, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("path", WANTED_RUNS)
@pytest.mark.parametrize(("lane_pages", "first_pages"), [(7, 0), (7, 1), (2, 100), (1, 1)])
def test_a_transfer_larger_than_its_staging_is_split(lane_pages, first_pages, path, monkeypatch):
    from hiqcache.transfer import cuda

    case = Case.build("int8", "page_first", (8, 128), 16, pages=11)
    page_bytes = case.representation.bytes_per_token() * 16
    for direction in ("BACKUP", "RESTORE"):
        monkeypatch.setattr(cuda, f"{direction}_STAGING", lane_pages * page_bytes)
    monkeypatch.setattr(chunks, "FIRST_CHUNK", max(1, first_pages * page_bytes))
    transfer = cuda_transfer(case, path, monkeypatch)
    assert transfer.staging_bytes == 2 * lane_pages * page_bytes
    for _ in range(3):
        case.check_backup(transfer, "cpu")
        case.reshuffle()
        case.check_restore(transfer, "cpu")


@pytest.mark.gpu
def test_staging_given_is_used_and_the_rest_is_bounded():
    case = Case.build("int8", "page_first", (8, 128), 64)
    large = [torch.empty(96 << 20, dtype=torch.uint8, device="cuda") for _ in range(2)]
    small = [tensor[:1024] for tensor in large]
    taken = {
        given: make_transfer(case.representation, case.arena, case.rows, tensors).staging_bytes
        for given, tensors in {"none": [], "small": small, "one": large[:1], "both": large}.items()
    }
    assert taken == {"none": 128 << 20, "small": 128 << 20, "one": 96 << 20, "both": 0}


@pytest.mark.gpu
def test_layers_asked_for_out_of_order_are_refused():
    case = Case.build("int8", "page_first", (8, 128), 16)
    transfer = make_transfer(case.representation, case.arena, case.rows)
    host, device = case.host, case.device.cuda()
    with pytest.raises(ValueError, match="layer 1; allowed: 0"):
        transfer.restore(1, host, device)
    transfer.restore(0, host, device)
    with pytest.raises(ValueError, match="layer 2; allowed: 1"):
        transfer.restore(2, host, device)


@pytest.mark.gpu
def test_no_slots_is_no_work():
    case = Case.build("int8", "page_first", (8, 128), 16)
    case.host, case.device = case.host[:0], case.device[:0]
    transfer = make_transfer(case.representation, case.arena, case.rows)
    case.check_backup(transfer, "cpu")
    case.check_restore(transfer, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS)
def test_the_clocks_measure_a_transfer_and_wait_for_none(path, monkeypatch):
    """On a stream that is asleep, nothing is known yet when a transfer has been enqueued, nor does anybody wait."""
    monkeypatch.setattr(clock, "SAMPLE_EVERY", 1)
    case = Case.build("int8", "page_first", (8, 128), 64, pages=32, layers=12)
    transfer = cuda_transfer(case, path, monkeypatch)
    host, device = case.host.to(transfer.host_indices_device), case.device.cuda()

    def restore() -> None:
        for layer in range(case.geometry.layers):
            transfer.restore(layer, host, device)

    for timed, move in (
        (transfer.encode_clock, lambda: transfer.backup(host, device)),
        (transfer.decode_clock, restore),
    ):
        move()
        torch.cuda.synchronize()
        timed.take()
        torch.cuda._sleep(2_000_000_000)  # cycles: about a second
        move()
        assert timed.take() == (0, 0)
        assert not torch.cuda.current_stream().query(), "the stream was to be asleep still"
        torch.cuda.synchronize()
        seconds, tokens = timed.take()
        assert 0 < tokens <= 32 * 64
        assert 0 < seconds < 0.1, "the sleep is not part of it"


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS)
def test_backup_and_restore_at_once_on_two_streams(path, monkeypatch):
    """Half of the pages go down while the other half come up, over and over, each half checked at the end."""
    case = Case.build("int8", "page_first", (8, 128), 64, pages=80, layers=12)
    transfer = cuda_transfer(case, path, monkeypatch)
    host, device = case.host.split(40 * 64), case.device.split(40 * 64)
    case.arena.buffer.copy_(transfers.after_backup(case.representation, case.arena, case.rows, host[1], device[1]))
    down_expected = transfers.after_backup(case.representation, case.arena, case.rows, host[0], device[0])
    up_expected = transfers.after_restore(case.representation, case.arena, case.rows, host[1], device[1])
    down, up = torch.cuda.Stream(), torch.cuda.Stream()
    on_gpu = [slots.cuda() for slots in device]
    torch.cuda.synchronize()
    for _ in range(20):
        with torch.cuda.stream(down):
            transfer.backup(host[0], on_gpu[0])
        with torch.cuda.stream(up):
            for layer in range(case.geometry.layers):
                transfer.restore(layer, host[1], on_gpu[1])
    torch.cuda.synchronize()
    assert torch.equal(case.arena.buffer, down_expected)
    for part in Part:
        for actual, expected in zip(case.rows.of(part), up_expected.of(part), strict=True):
            assert transfers.same_bits(actual, expected)
