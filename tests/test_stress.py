"""tools/stress_transfer.py: it finds nothing wrong with the transfers, and finds what is planted."""

import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import pytest
import stress_transfer
import torch
from click.testing import CliRunner
from stream_faults import FAULTS, plant
from stress_transfer import SCALES, SETTINGS, Device, Scale, Setting, Stress

from hiqcache.arena import HostArena
from hiqcache.geometry import Part
from hiqcache.transfer import EagerTransfer

TESTS = pathlib.Path(__file__).parent
SMALL = Scale(transfer_bytes=64 << 10, bank_tokens=32, layers=2)


@pytest.fixture(autouse=True)
def _one_thread():
    """Tensors this small gain nothing from more, and lose much where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def simulated(*arguments: str) -> str:
    """What tests/simulated_gpu.py prints."""
    result = subprocess.run(
        [sys.executable, TESTS / "simulated_gpu.py", *arguments],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(TESTS.parent / "tools"), os.environ.get("PYTHONPATH", "")]),
            "TRITON_INTERPRET": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_whatever_order_streams_run_in_nothing_is_wrong():
    assert "nothing wrong" in simulated()


def test_each_wait_of_the_cuda_transfer_is_missed_where_it_is_left_out():
    assert "10 faults found" in simulated("faults")


def test_the_tool_runs_every_configuration(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(SCALES, "cpu", SMALL)
    monkeypatch.setitem(SCALES, "cuda", SMALL)
    out = tmp_path / "stress.json"
    arguments = ["--seconds", "0.2", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["tools/stress_transfer.py", *arguments])
    answer = CliRunner().invoke(stress_transfer.main, arguments)
    assert answer.exit_code == 0, answer.output
    result = json.loads(out.read_text())
    assert result["command"] == "python tools/stress_transfer.py --seconds 0.2 --out stress.json"
    assert {"what", "hardware", "versions", "seed", "seconds"} <= result.keys()
    assert len(result["configurations"]) == len(SETTINGS)
    places = {(one["page_size"], one["layout"]) for one in result["configurations"]}
    assert places == {(size, layout) for size in (1, 7, 16, 64, 128) for layout in ("page_first", "layer_first")}
    for one in result["configurations"]:
        values = 2 * one["layers"] * one["page_size"] * one["heads"] * one["head_dim"]
        assert one["values_checked"] == one["pages_restored"] * values > 0
        assert one["bytes_checked"] >= one["pages_backed_up"] * values > 0
        assert one["wrong_bytes"] == one["wrong_values"] == one["wrong_elsewhere"] == 0
    assert all(str(one["pages_backed_up"]) in answer.output.replace(",", "") for one in result["configurations"])
    assert ", 0 wrong" in answer.stderr, "progress"


class LateRestore(EagerTransfer):
    """A layer is in place one call after it was promised; so the last never is."""

    def restore(self, layer: int, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        if layer:
            super().restore(layer - 1, host_indices, device_indices)


class LateBackup(EagerTransfer):
    """Rows are read after the backup was said to be done."""

    late: tuple[torch.Tensor, torch.Tensor] | None = None

    def backup(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        if self.late:
            super().backup(*self.late)
        self.late = host_indices, device_indices


class OnePageLess(EagerTransfer):
    def backup(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        super().backup(host_indices[: -self._page_size], device_indices[: -self._page_size])


class SwappedPages(EagerTransfer):
    def restore(self, layer: int, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        super().restore(layer, host_indices.view(-1, self._page_size).flip(0).flatten(), device_indices)


class OtherSignOfZero(EagerTransfer):
    """Equal as numbers, and not in their bits."""

    def restore(self, layer: int, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        super().restore(layer, host_indices, device_indices)
        for part in Part:
            rows = self._rows.of(part)[layer]
            values = rows[device_indices]
            rows[device_indices] = torch.where(values == 0, -values, values)


class StrayRows(EagerTransfer):
    """Writes rows that it was not told to write."""

    def restore(self, layer: int, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        super().restore(layer, host_indices, device_indices)
        others = torch.ones(len(self._rows.v[layer]), dtype=torch.bool).index_fill_(0, device_indices, False)
        self._rows.v[layer][others] = 1


class StrayBlock(EagerTransfer):
    """Writes a block of a page that it was not told to write."""

    def backup(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        super().backup(host_indices, device_indices)
        pages = self._blocks[Part.K].shape[1]
        page = next(page for page in range(pages) if page * self._page_size not in host_indices)
        self._blocks[Part.K][0, page] = 0x11


@pytest.mark.parametrize(
    ("faulty", "seen_as"),
    [
        (LateRestore, "wrong_values"),
        (LateBackup, "wrong_bytes"),
        (OnePageLess, "wrong_bytes"),
        (SwappedPages, "wrong_values"),
        (OtherSignOfZero, "wrong_values"),
        (StrayRows, "wrong_elsewhere"),
        (StrayBlock, "wrong_elsewhere"),
    ],
)
def test_what_a_faulty_transfer_does_is_found(
    faulty: type[EagerTransfer], seen_as: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
):
    setting = Setting(4, "page_first", "int8", 3, 64, 2, "own")
    monkeypatch.setattr(stress_transfer, "make_transfer", lambda representation, arena, rows, staging: faulty(
        representation, HostArena(arena.shape, arena.buffer), rows
    ))  # fmt: skip
    monkeypatch.setattr(stress_transfer, "SETTINGS", (setting,))
    monkeypatch.setitem(SCALES, "cpu", SMALL)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "stress.json"
    answer = CliRunner().invoke(stress_transfer.main, ["--seconds", "0.2", "--out", str(out)])
    assert answer.exit_code == 1
    result = json.loads(out.read_text())
    (one,) = result["configurations"]
    assert one[seen_as] > 0
    assert result["wrong"] == one["wrong_bytes"] + one["wrong_values"] + one["wrong_elsewhere"]


@pytest.mark.gpu
@pytest.mark.parametrize("setting", [SETTINGS[0], SETTINGS[2], SETTINGS[-1]], ids=str)
def test_nothing_is_wrong_on_a_gpu(setting: Setting):
    one = Stress(setting, Device("cuda"), SCALES["cuda"], seed=1)
    one.run(1, lambda seconds: None)
    assert one.tally.wrong == 0
    assert one.tally.values_checked > 0


class UnrecordedEvent(torch.cuda.Event):
    """Waiting for it is not waiting."""

    def record(self, stream: Any = None) -> None:
        pass


@pytest.mark.gpu
@pytest.mark.parametrize(
    "fault",
    # Copies that are not awaited show only where they end last, which is for the simulated GPU.
    [fault for fault in FAULTS if not fault.endswith("are not awaited")],
)
def test_a_wait_that_is_left_out_is_missed_on_a_gpu(fault: str):
    setting = Setting(16, "page_first", "int8", 4, 128, 36, "given")
    one = Stress(setting, Device("cuda"), SCALES["cuda"], seed=1)
    plant(fault, one._transfer, UnrecordedEvent)
    end = time.monotonic() + 20
    while one.tally.wrong == 0 and time.monotonic() < end:
        for _ in range(20):
            one.round()
        one.audit()
    assert one.tally.wrong > 0
