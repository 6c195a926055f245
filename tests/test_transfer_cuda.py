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
from hiqcache.geometry import KVGeometry, Part
from hiqcache.registry import get
from hiqcache.representation import HostRepresentation
from hiqcache.transfer import DeviceRows, EagerTransfer, Transfer, clock, make_transfer

TESTS = Path(__file__).parent
ROADS = ("copy engine", "kernel", "eager")
WANTED_RUNS = {"copy engine": 1, "kernel": 1 << 40, "both": 2 * 16 * 1152}
"""Road -> the run from which the copy engine is taken; "both": by 16-token pages' restores after their first layer."""


def test_kernels_agree_with_the_reference_codec_in_tritons_interpreter():
    result = subprocess.run(
        [sys.executable, TESTS / "interpreted_kernels.py"],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "agree" in result.stdout


def test_importing_hiqcache_does_not_import_triton():
    modules = "hiqcache.transfer, hiqcache.backends.int8, hiqcache.backends.bf16"
    code = f"import sys; sys.modules['triton'] = None; import {modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_a_gpu_the_transfer_is_the_pytorch_one():
    case = Case.build("int8", "page_first", (8, 128), 4, device="cpu")
    assert isinstance(make_transfer(case.representation, case.arena, case.rows), EagerTransfer)


@pytest.mark.parametrize("to_host", [True, False])
def test_the_copy_engine_is_given_one_run_for_each_page_and_part(to_host, monkeypatch):
    from hiqcache.transfer import movers

    given = []

    class Recorder:
        def __init__(self, device, to_host):
            self.to_host = to_host

        def copy(self, copies, stream):
            given.append((copies, stream, self.to_host))

    monkeypatch.setattr(movers, "CopyEngine", Recorder)
    case = Case.build("int8", "page_first", (8, 128), 4, device="cpu")
    mover = movers.CopyEngineMover(case.arena, 4, torch.device("cuda"))
    staging, shape, stream = torch.empty(1 << 20, dtype=torch.uint8), case.arena.shape, Mock()
    mover.move(mover.locate(case.host)[1:4], range(2, 5), to_host, staging, stream)

    [(copies, on, direction)] = given
    far, near, size = copies if to_host else copies[[1, 0, 2]]
    run, pages = 3 * 4 * 1152, case.host[4:16:4] // 4
    expected = {
        (case.arena.buffer.data_ptr() + shape.offset(part, 2, page), staging.data_ptr() + place * run, run)
        for place, (part, page) in enumerate(itertools.product(Part, pages.tolist()))
    }
    assert set(zip(far.tolist(), near.tolist(), size.tolist(), strict=True)) == expected
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
        expected = transfers.after_backup(self.representation, self.arena, self.rows, self.host, self.device)
        transfer.backup(self.host.to(host_on), self.device.cuda())
        torch.cuda.synchronize()
        assert torch.equal(self.arena.buffer, expected)

    def check_restore(self, transfer: Transfer, host_on: str) -> None:
        expected = transfers.after_restore(self.representation, self.arena, self.rows, self.host, self.device)
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


def cuda_transfer(case: Case, road: str, monkeypatch: pytest.MonkeyPatch) -> Transfer:
    """A transfer made to take one road, whatever the sizes."""
    if road == "eager":
        return EagerTransfer(case.representation, case.arena, case.rows)
    from hiqcache.transfer import cuda
    from hiqcache.transfer.movers import CopyEngineMover

    monkeypatch.setattr(cuda, "SMALL", 0)
    monkeypatch.setattr(CopyEngineMover, "WANTED_RUN", WANTED_RUNS[road])
    transfer = make_transfer(case.representation, case.arena, case.rows)
    on_cpu = road != "kernel" and case.arena.shape.arrangement == "page_first"
    assert transfer.host_indices_device.type == ("cpu" if on_cpu else "cuda")
    return transfer


@pytest.mark.gpu
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("arrangement", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "shape", "page_size"),
    [
        *itertools.product(["int8"], transfers.SHAPES, [1, 64]),
        *[(name, (3, 64), page_size) for name, page_size in (("int8", 16), ("bf16", 1), ("bf16", 64))],
    ],
)
def test_bytes_and_rows_are_those_of_the_reference_codec(name, shape, page_size, arrangement, road, monkeypatch):
    case = Case.build(name, arrangement, shape, page_size, pages=37 if page_size == 1 else 5)
    transfer = cuda_transfer(case, road, monkeypatch)
    case.check_backup(transfer, "cpu")
    case.reshuffle()
    case.check_restore(transfer, "cuda")
    case.reshuffle()
    case.check_restore(transfer, "cpu")
    case.reshuffle()
    case.check_backup(transfer, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("road", WANTED_RUNS)
@pytest.mark.parametrize(("lane_pages", "first_pages"), [(7, 0), (7, 1), (2, 100), (1, 1)])
def test_a_transfer_larger_than_its_staging_is_split(lane_pages, first_pages, road, monkeypatch):
    from hiqcache.transfer import cuda

    case = Case.build("int8", "page_first", (8, 128), 16, pages=11)
    page_bytes = case.representation.bytes_per_token() * 16
    for direction in ("BACKUP", "RESTORE"):
        monkeypatch.setattr(cuda, f"{direction}_STAGING", lane_pages * page_bytes)
    monkeypatch.setattr(cuda, "FIRST_BYTES", max(1, first_pages * page_bytes))
    transfer = cuda_transfer(case, road, monkeypatch)
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
@pytest.mark.parametrize("road", ROADS)
def test_the_clocks_measure_a_transfer_and_wait_for_none(road, monkeypatch):
    """On a stream that is asleep, nothing is known yet when a transfer has been enqueued, nor does anybody wait."""
    monkeypatch.setattr(clock, "SAMPLE_EVERY", 1)
    case = Case.build("int8", "page_first", (8, 128), 64, pages=32, layers=12)
    transfer = cuda_transfer(case, road, monkeypatch)
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
@pytest.mark.parametrize("road", ROADS)
def test_backup_and_restore_at_once_on_two_streams(road, monkeypatch):
    """Half of the pages go down while the other half come up, over and over, each half checked at the end."""
    case = Case.build("int8", "page_first", (8, 128), 64, pages=80, layers=12)
    transfer = cuda_transfer(case, road, monkeypatch)
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
