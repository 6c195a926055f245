"""The CUDA transfer on the CPU, its kernels in Triton's interpreter: bytes, rows and what must stay as it is.

A script, because TRITON_INTERPRET=1 must be set before the import. Streams and events are stand-ins, so everything runs
as soon as it is enqueued; the copy engine is a loop of memmoves.

    TRITON_INTERPRET=1 python tests/interpreted_kernels.py [sweep]
"""

import contextlib
import ctypes
import itertools
import os
import sys
from unittest import mock

import numpy as np
import torch
import transfers
from attrs import frozen

from hiqcache.arena import ArenaShape, HostArena
from hiqcache.geometry import Part, UnsupportedGeometry
from hiqcache.registry import get
from hiqcache.transfer import chunks, copy_engine, cuda, movers

LAYERS = 7
MOVERS = {
    "copy engine": {movers.CopyEngineMover},
    "kernel": {movers.KernelMover},
    "both": {movers.CopyEngineMover, movers.KernelMover},
}
"""Path -> what moves the groups of layers of a restore."""


class Memmoves:
    """The copy engine: what it is given is what a driver would see."""

    calls = 0

    def __init__(self, device: torch.device, to_host: bool):
        pass

    def copy(self, copies: np.ndarray, stream: object) -> None:
        assert copies.dtype == np.int64
        assert copies.strides[1] == 8, "the driver reads rows of addresses"
        Memmoves.calls += copies.shape[1]
        for to, source, size in copies.T.tolist():
            ctypes.memmove(to, source, size)


@contextlib.contextmanager
def on_the_cpu(path: str, staging: int, cell_bytes: int):
    """What `CudaTransfer` needs of a GPU, and constants that make a small transfer take one path in many chunks."""
    with contextlib.ExitStack() as stack:
        for name in ("Stream", "Event", "current_stream", "device"):
            stack.enter_context(mock.patch.object(torch.cuda, name, mock.MagicMock()))
        stack.enter_context(mock.patch.object(movers, "CopyEngine", Memmoves))
        stack.enter_context(mock.patch.object(copy_engine, "available", return_value=True))
        constants = {
            (cuda, "BACKUP_STAGING"): staging,
            (cuda, "RESTORE_STAGING"): staging,
            (chunks, "FIRST_GROUP"): 1,
            (chunks, "FIRST_CHUNK"): 1,
            (chunks, "SHORT"): chunks.SHORT if path == "both" else 0,
            (movers, "PROGRAMS"): 2,
            (movers, "LINES"): 64,
            (movers.KernelMover, "WANTED_RUN"): 1 if path == "both" else movers.KernelMover.WANTED_RUN,
            (movers.CopyEngineMover, "WANTED_RUN"): {"copy engine": 1, "kernel": 1 << 40, "both": cell_bytes + 1}[path],
        }
        for (owner, name), value in constants.items():
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


@frozen
class Case:
    """One transfer.

    Attributes:
        path: what moves: `copy engine`, `kernel`, or `both`, the kernel the first group of layers of a restore.
        staged: cells that half the staging of a direction holds.
        trailer: bytes behind each page.
        scaled: whether K's channels have exponents.
    """

    name: str
    arrangement: str
    shape: tuple[int, int]
    page_size: int
    path: str = "kernel"
    pages: int = 5
    layers: int = LAYERS
    staged: int = 4
    trailer: int = 0
    scaled: bool = False


def check(case: Case) -> None:
    generator = torch.Generator().manual_seed(1)
    page_size, layers = case.page_size, range(case.layers)
    geometry = transfers.geometry(case.shape, page_size, case.layers)
    representation = get(case.name)(geometry)
    shape = ArenaShape(representation.layouts, case.layers, case.pages + 2, case.arrangement, case.trailer)
    noise = torch.randint(0, 256, (shape.total_bytes,), dtype=torch.uint8, generator=generator)
    arena = HostArena(shape, noise)
    rows = transfers.random_rows(geometry, (case.pages + 3) * page_size, generator)
    Memmoves.calls = 0
    with on_the_cpu(case.path, 2 * case.staged * shape.cell_bytes, shape.cell_bytes):
        transfer = cuda.CudaTransfer(representation, arena, rows)
        exponents = transfers.random_exponents(geometry, generator) if case.scaled else None
        if exponents is not None:
            transfer.scale_keys(exponents)
        for lane in (transfer._backup_lane, transfer._restore_lane):
            for half in lane.halves:
                half.random_(generator=generator)

        host = transfers.random_slots(case.pages, case.pages + 2, page_size, generator)
        device = transfers.random_slots(case.pages, case.pages + 3, page_size, generator)
        expected = transfers.after_backup(representation, arena, rows, host, device, exponents)
        transfer.backup(host, device)
        assert torch.equal(arena.buffer, expected), "backup"

        device = transfers.random_slots(case.pages, case.pages + 3, page_size, generator)
        restored = transfers.after_restore(representation, arena, rows, host, device, exponents)
        for layer in layers:
            transfer.restore(layer, host, device)
            for part in Part:
                assert transfers.same_bits(rows.of(part)[layer], restored.of(part)[layer]), f"restore, {part}, {layer}"
        for part, layer in itertools.product(Part, layers):
            assert transfers.same_bits(rows.of(part)[layer], restored.of(part)[layer]), f"after all, {part}, {layer}"
        assert torch.equal(arena.buffer, expected), "a restore writes nothing to the host"
    assert bool(Memmoves.calls) == (case.path != "kernel"), "it took another path"
    by = {type(mover) for mover, _ in transfer._restoring.groups.values()}
    assert by == MOVERS[case.path], "a restore took another path"


CASES = [
    Case("int8", "page_first", (8, 128), 4, "copy engine"),
    Case("int8", "page_first", (8, 128), 4, "both", staged=100),
    Case("int8", "page_first", (8, 128), 1, "kernel", pages=7),
    Case("int8", "layer_first", (3, 64), 4, "kernel"),
    Case("int8", "layer_first", (2, 128), 1, "kernel", pages=7),
    Case("int8", "page_first", (1, 128), 16, "both", trailer=128),
    Case("int8", "page_first", (5, 80), 2, "kernel", staged=1, trailer=256),
    Case("int8", "page_first", (3, 129), 2, "copy engine", pages=3),
    Case("int8", "page_first", (8, 128), 4, "both", staged=100, scaled=True),
    Case("int8", "layer_first", (3, 80), 2, "kernel", scaled=True),
    Case("k6v4", "page_first", (3, 64), 4, "copy engine", pages=3, layers=2, scaled=True),
    Case("bf16", "page_first", (3, 64), 4, "copy engine"),
    Case("int4", "page_first", (8, 128), 4, "kernel", pages=3, layers=2),
    Case("int4", "page_first", (2, 80), 8, "copy engine", pages=3, layers=2),
    Case("int4", "layer_first", (3, 192), 2, "kernel", pages=3, layers=2),
    Case("k6v4", "page_first", (8, 128), 2, "copy engine", pages=3, layers=2),
    Case("k6v4", "layer_first", (3, 64), 4, "kernel", pages=3, layers=2),
    Case("k6v4", "page_first", (2, 112), 8, "kernel", pages=3, layers=2),
    Case("bf16", "layer_first", (1, 64), 1, "kernel", pages=3),
]


def sweep() -> list[Case]:
    """Every page size, number of heads and width, by a path that differs from one to the next."""
    paths = itertools.cycle([("page_first", "copy engine"), ("layer_first", "kernel"), ("page_first", "both")])
    geometries = itertools.product((1, 2, 3, 5, 8, 9), (64, 80, 96, 128, 256), [2**power for power in range(8)])
    cases = []
    for (heads, dim, page_size), (arrangement, path) in zip(geometries, paths, strict=False):
        with contextlib.suppress(UnsupportedGeometry):
            get("int8")(transfers.geometry((heads, dim), page_size, layers=1))
            pages = 3 if page_size < 16 else 1
            cases.append(Case("int8", arrangement, (heads, dim), page_size, path, pages=pages, layers=3))
    return cases


def main() -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    cases = sweep() if sys.argv[1:] == ["sweep"] else CASES
    for case in cases:
        try:
            check(case)
        except Exception as error:
            raise AssertionError(f"{case}") from error
    print(f"{len(cases)} cases agree with the reference codec")


if __name__ == "__main__":
    main()
