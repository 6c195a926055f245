"""Slots that a transfer cannot read are refused before anything moves, whoever moves it."""

from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
import transfers

from hiqcache.geometry import Part
from hiqcache.registry import get
from hiqcache.transfer import Transfer, make_transfer

PAGE_SIZE, PAGES = 4, 6
WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "int32": lambda slots: slots.int(),
    "float64": lambda slots: slots.double(),
    "every other entry": lambda slots: slots.repeat_interleave(2)[::2],
    "one entry for all": lambda slots: slots[:1].expand(len(slots)),
    "a row for each page": lambda slots: slots.view(-1, PAGE_SIZE),
    "none-dimensional": lambda slots: slots[0],
    "another length": lambda slots: torch.cat([slots, slots]),
    "half a page": lambda slots: slots[: PAGE_SIZE // 2],
    "another device": lambda slots: slots.to("meta"),
}


class World:
    """A transfer, and all that it could change."""

    def __init__(self, device: str):
        generator = torch.Generator().manual_seed(0)
        geometry = transfers.geometry((8, 128), PAGE_SIZE, layers=2)
        representation = get("int8")(geometry)
        self.arena = transfers.random_arena(representation, PAGES, "page_first", generator, pin=device == "cuda")
        self.rows = transfers.random_rows(geometry, PAGES * PAGE_SIZE, generator, device)
        self.transfer = make_transfer(representation, self.arena, self.rows)
        self.host = transfers.random_slots(2, PAGES, PAGE_SIZE, generator)
        self.device = self.host.flip(0).view(2, PAGE_SIZE).flip(1).flatten().to(device)

    def memory(self) -> list[torch.Tensor]:
        if self.rows.device.type == "cuda":
            torch.cuda.synchronize()
        layers = [layer for part in Part for layer in self.rows.of(part)]
        return [self.arena.buffer.clone(), *(layer.cpu().view(torch.int16).clone() for layer in layers)]

    def refused(self, host: torch.Tensor, device: torch.Tensor) -> list[str]:
        """What a backup and a restore of these slots say, having moved nothing."""
        before, messages = self.memory(), []
        for move in (self.transfer.backup, lambda *slots: self.transfer.restore(0, *slots)):
            with pytest.raises(ValueError, match="slots of a transfer") as caught:
                move(host, device)
            messages.append(str(caught.value))
        assert all(map(torch.equal, before, self.memory()))
        return messages


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("wrong", WRONG)
def test_slots_of_another_kind_are_refused_on_either_side(wrong: str, device: str):
    world = World(device)
    for host, slots in (
        (WRONG[wrong](world.host), world.device),
        (world.host, WRONG[wrong](world.device)),
    ):
        for message in world.refused(host, slots):
            for seen in (host, slots):
                assert f"{seen.dtype} {tuple(seen.shape)} with strides {seen.stride()} on {seen.device}" in message
            assert "needed: both contiguous torch.int64 of one dimension and the same length" in message
            assert "a multiple of the page size 4; host slots on cpu" in message


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_half_a_page_on_both_sides_is_refused(device: str):
    world = World(device)
    for message in world.refused(world.host[:6], world.device[:6]):
        assert "torch.int64 (6,)" in message


@pytest.mark.gpu
def test_rows_on_a_gpu_need_their_slots_there():
    world = World("cuda")
    for message in world.refused(world.host, world.device.cpu()):
        assert "host slots on cpu or cuda:0, device slots on cuda:0" in message


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_slices_of_longer_slots_and_no_slots_at_all_are_read(device: str):
    world = World(device)
    for host, slots in ((world.host[4:], world.device[4:]), (world.host[:0], world.device[:0])):
        world.transfer.backup(host, slots)
        for layer in range(2):
            world.transfer.restore(layer, host, slots)


def test_slots_are_looked_at_once_a_restore_and_not_once_a_layer(monkeypatch: pytest.MonkeyPatch):
    world, looked = World("cpu"), Mock()
    monkeypatch.setattr(Transfer, "_check_slots", looked)
    for layer in range(2):
        world.transfer.restore(layer, world.host, world.device)
    looked.assert_called_once_with(world.host, world.device)
