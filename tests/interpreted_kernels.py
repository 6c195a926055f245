"""The GPU kernels in Triton's interpreter, on the CPU. A script: TRITON_INTERPRET=1 must be set before the import."""

import itertools
import os

import torch
import transfers

from hiqcache.arena import LAYOUTS
from hiqcache.registry import get
from hiqcache.transfer.codec import BlockCodec
from hiqcache.transfer.movers import KernelMover

LAYERS = range(1, 3)
"""Neither the first nor the last one."""


def check(name: str, arrangement: str, shape: tuple[int, int], page_size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    geometry = transfers.geometry(shape, page_size, layers=4)
    representation = get(name)(geometry)
    arena = transfers.random_arena(representation, 7, arrangement, generator)
    rows = transfers.random_rows(geometry, 9 * page_size, generator)
    host, device = (transfers.random_slots(5, pages, page_size, generator) for pages in (7, 9))
    codec, mover = BlockCodec(representation, rows), KernelMover(arena, page_size, torch.device("cpu"))
    staging = torch.randint(0, 256, (arena.shape.total_bytes,), dtype=torch.uint8, generator=generator)

    before = arena.buffer.clone()
    expected = transfers.after_backup(representation, arena, rows, host, device)
    codec.encode(device.view(-1, page_size), LAYERS, staging, None)
    mover.move(mover.locate(host), LAYERS, True, staging, None)
    for part, layer in itertools.product(arena.shape.layouts, range(geometry.layers)):
        reference = type(arena)(arena.shape, expected if layer in LAYERS else before)
        assert torch.equal(arena.blocks(part)[layer], reference.blocks(part)[layer]), f"backup, {part}, layer {layer}"

    device = transfers.random_slots(5, 9, page_size, generator)
    untouched = [[layer.clone() for layer in rows.of(part)] for part in arena.shape.layouts]
    restored = transfers.after_restore(representation, arena, rows, host, device)
    staging.random_(generator=generator)
    mover.move(mover.locate(host), LAYERS, False, staging, None)
    codec.decode(device.view(-1, page_size), LAYERS, staging, None)
    for kept, part in zip(untouched, arena.shape.layouts, strict=True):
        for layer, row in enumerate(rows.of(part)):
            reference = restored.of(part)[layer] if layer in LAYERS else kept[layer]
            assert transfers.same_bits(row, reference), f"restore, {part}, layer {layer}"


def main() -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    cases = [
        *itertools.product(["int8"], LAYOUTS, [(8, 128), (3, 64)], [4]),
        ("int8", "page_first", (4, 128), 4),
        ("int8", "layer_first", (2, 128), 4),
        ("int8", "page_first", (8, 128), 1),
        ("bf16", "page_first", (3, 64), 4),
    ]
    for case in cases:
        try:
            check(*case)
        except Exception as error:
            raise AssertionError(f"case {case}") from error
    print(f"{len(cases)} cases agree with the reference codec")


if __name__ == "__main__":
    main()
