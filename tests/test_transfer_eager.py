"""The plain-PyTorch transfer on the CPU against the reference codec, byte for byte."""

import itertools

import pytest
import torch
import transfers

from hiqcache.arena import LAYOUTS, ArenaShape, HostArena
from hiqcache.geometry import Part, UnsupportedGeometry
from hiqcache.registry import get
from hiqcache.transfer import EagerTransfer, eager


def check(name: str, arrangement: str, shape: tuple[int, int], page_size: int, pages: int = 5, layers: int = 3,
          trailer: int = 0, scaled: bool = False) -> None:  # fmt: skip
    """Back up into an arena full of noise, and restore into other slots; nothing else may change."""
    generator = torch.Generator().manual_seed(page_size)
    geometry = transfers.geometry(shape, page_size, layers)
    representation = get(name)(geometry)
    arena_shape = ArenaShape(representation.layouts, layers, pages + 3, arrangement, trailer)
    noise = torch.randint(0, 256, (arena_shape.total_bytes,), dtype=torch.uint8, generator=generator)
    arena = HostArena(arena_shape, noise)
    rows = transfers.random_rows(geometry, (pages + 2) * page_size, generator)
    transfer = EagerTransfer(representation, arena, rows)
    exponents = transfers.random_exponents(geometry, generator) if scaled else None
    if exponents is not None:
        transfer.scale_keys(exponents)

    host, device = (transfers.random_slots(pages, pages + more, page_size, generator) for more in (3, 2))
    expected = transfers.after_backup(representation, arena, rows, host, device, exponents)
    transfer.backup(host, device)
    assert torch.equal(arena.buffer, expected)

    device = transfers.random_slots(pages, pages + 2, page_size, generator)
    restored = transfers.after_restore(representation, arena, rows, host, device, exponents)
    for layer in range(layers):
        transfer.restore(layer, host, device)
    for part, layer in itertools.product(Part, range(layers)):
        assert transfers.same_bits(rows.of(part)[layer], restored.of(part)[layer])
    assert torch.equal(arena.buffer, expected), "a restore writes nothing to the host"


@pytest.mark.parametrize("arrangement", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "shape", "page_size"),
    [("int8", (8, 128), 1), ("int8", (1, 128), 16), ("int8", (3, 80), 4), ("int8", (3, 129), 2), ("bf16", (3, 64), 4)],
)
def test_bytes_and_rows_are_those_of_the_reference_codec(name, shape, page_size, arrangement):
    check(name, arrangement, shape, page_size)


@pytest.mark.parametrize("name", ["int8", "int4", "k6v4"])
def test_keys_are_divided_before_they_are_encoded_and_multiplied_after(name):
    check(name, "page_first", (3, 64), 16, scaled=True)


def test_a_trailer_stays_as_it_is():
    check("int8", "page_first", (3, 64), 4, trailer=128)


@pytest.mark.parametrize("arrangement", LAYOUTS)
def test_a_transfer_larger_than_its_staging_is_split(arrangement, monkeypatch):
    monkeypatch.setattr(eager, "CHUNK_TOKENS", 2 * 4)
    check("int8", arrangement, (3, 64), 4, pages=7)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("heads", "dim", "page_size"),
    list(itertools.product((1, 2, 3, 5, 8, 9), (64, 80, 96, 128, 256), [2**power for power in range(8)])),
)
def test_every_geometry(heads, dim, page_size):
    try:
        get("int8")(transfers.geometry((heads, dim), page_size, layers=1))
    except UnsupportedGeometry:
        pytest.skip("saves nothing")
    for arrangement in LAYOUTS:
        check("int8", arrangement, (heads, dim), page_size, pages=1 if page_size > 16 else 3, layers=1)
