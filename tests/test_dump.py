"""Dumps of running servers: what may be asked, what is held still meanwhile, and every value in the files.

The servers at the end are real; the rest drives the schedulers' side over real host pools, with two ranks also.
"""

import asyncio
import gc
import http.server as http_server
import json
import multiprocessing
import os
import pathlib
import random
import re
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import requests
import safetensors
import tiny_model
import torch
from click.testing import CliRunner, Result
from serving import (
    ADMIN,
    ADMIN_KEY,
    PROBE,
    Output,
    Server,
    carry,
    device_settings,
    engine,
    environment,
    events,
    free_port,
    http,
    pip_install,
    start_refused,
)
from transfers import same_bits

pytest.importorskip("sglang", reason="needs the sglang extra")

from pools import buffer_info, host_pool
from sglang.srt.managers.io_struct import DumperControlReqInput
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args

from hiqcache import registry
from hiqcache.__main__ import main
from hiqcache.geometry import Part
from hiqcache.inspect import writer
from hiqcache.inspect.compare import compare
from hiqcache.inspect.format import DumpError
from hiqcache.inspect.reader import Dump
from hiqcache.sglang import choice, cpu, dump, hooks
from hiqcache.sglang.choice import Choice, Refused
from hiqcache.sglang.pool import RepresentationHostPool

load_plugins()

PAGES = 33
"""Of a pool of `host_pool`, 4 tokens each: twice the device's 16, and one."""


def slots(*pages: int) -> torch.Tensor:
    return (torch.tensor(pages)[:, None] * 4 + torch.arange(4)).flatten()


def flags(*pages: int) -> torch.Tensor:
    """Pages of the pool, as `hold` wants them."""
    chosen = torch.zeros(PAGES, dtype=torch.bool)
    chosen[list(pages)] = True
    return chosen


def pages_of(indices: torch.Tensor | None) -> list[int]:
    assert indices is not None
    return sorted(set((indices // 4).tolist()))


# -- asking for it -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny_model.make(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hicache_representation": None}, "is for dumps of an encoded L2: add --hicache-representation NAME"),
        ({"hicache_dump_dir": "missing"}, "saw .*missing, which is no folder; allowed: one that exists"),
        ({"hicache_dump_dir": "file"}, "saw .*file, which is no folder"),
        ({"tokenizer_worker_num": 2}, "saw 2; allowed: 1; changed by --tokenizer-worker-num"),
        ({"dp_size": 2}, "one replica: saw 2; allowed: 1; changed by --dp-size"),
        ({"pp_size": 2}, "in one step: saw 2; allowed: 1; changed by --pp-size"),
    ],
    ids=str,
)
def test_servers_that_cannot_write_dumps(
    tiny: pathlib.Path, tmp_path: pathlib.Path, settings: dict[str, Any], message: str
):
    (tmp_path / "file").touch()
    folder = tmp_path / settings.get("hicache_dump_dir", "")
    with pytest.raises(Refused, match=message):
        start_refused(tiny, **settings | {"hicache_dump_dir": folder})


def test_a_server_on_a_command_line_needs_an_admin_key(tiny: pathlib.Path, tmp_path: pathlib.Path):
    """It has no way to dumps but HTTP, where they need one; an Engine has, as the tests of its dumps show."""
    words = ["--model-path", str(tiny), "--enable-hierarchical-cache", "--hicache-representation", "int8"]
    words += ["--hicache-dump-dir", str(tmp_path)]
    for more in [], ["--api-key", "users"]:
        with pytest.raises(SystemExit, match="dumps over HTTP need an admin key: add --admin-api-key KEY, or drop it"):
            prepare_server_args([*words, *more])
    chosen = choice.chosen(prepare_server_args([*words, "--admin-api-key", "KEY"]))
    assert chosen is not None
    assert chosen.dump_dir == str(tmp_path)


@pytest.mark.parametrize(
    ("api_key", "admin_key", "sent", "status"),
    [
        (None, None, None, 400),
        (None, None, "any", 400),
        ("users", None, None, 401),
        ("users", None, "users", 400),
        (None, "admin", None, 401),
        (None, "admin", "users", 401),
        (None, "admin", "admin", 200),
        ("users", "admin", "users", 401),
        ("users", "admin", "admin", 200),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_the_route_is_for_holders_of_the_admin_key(
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    api_key: str | None,
    admin_key: str | None,
    sent: str | None,
    status: int,
):
    """Behind SGLang's own check of keys; where a server has no admin key, as `/hicache/storage-backend` there."""
    from fastapi import FastAPI
    from sglang.srt.entrypoints import http_server as real
    from sglang.srt.utils.auth import add_api_key_middleware
    from starlette.testclient import TestClient

    asked = []

    async def schedulers(request: DumperControlReqInput) -> list[SimpleNamespace]:
        asked.append(request.method)
        return [SimpleNamespace(success=True, response=[{"state": "writing"}])]

    serving = SimpleNamespace(admin_api_key=admin_key)
    monkeypatch.setattr(dump, "get_serving", lambda: serving)
    monkeypatch.setattr(real, "get_serving", lambda: serving)
    state = SimpleNamespace(tokenizer_manager=SimpleNamespace(dumper_control=schedulers))
    server = SimpleNamespace(app=FastAPI(), _global_state=state)
    monkeypatch.setitem(sys.modules, real.__name__, server)
    dump.add_route()
    if api_key or admin_key:
        add_api_key_middleware(server.app, api_key=api_key, admin_api_key=admin_key)
    headers = {} if sent is None else {"Authorization": f"Bearer {sent}"}
    answer = TestClient(server.app).request(method, dump.ROUTE, json={"name": "a"}, headers=headers)
    assert answer.status_code == status
    assert len(asked) == (status == 200)
    if status == 400:
        assert "restart it with --admin-api-key KEY" in answer.json()["error"]
        sibling: Any = asyncio.run(real.hicache_storage_backend_status())
        assert sibling.status_code == status


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
def test_a_folder_that_cannot_be_written_to(tiny: pathlib.Path, tmp_path: pathlib.Path):
    tmp_path.chmod(0o555)
    with pytest.raises(Refused, match="which this user cannot write to"):
        start_refused(tiny, hicache_dump_dir=str(tmp_path))


def test_the_rust_server_has_no_route(tiny: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    settings = SimpleNamespace(tokenizer_worker_num=1, dp_size=1, pp_size=1)
    assert [violation.flag for violation in dump.violations(settings)] == ["SGLANG_RUST_SERVER"]


@pytest.mark.parametrize("name", ["a", "Chat_2026-11-29", "x.y", "0", "_", "a" * 128])
def test_names(name: str):
    assert dump.file_name(name, 3) == f"{name}-tp3.safetensors"


TRICKS = [
    "",
    ".",
    "..",
    "../x",
    "/etc/x",
    "a/b",
    "a\\b",
    ".hidden",
    "-rf",
    "a b",
    "a\n",
    "a\0",
    "ü",
    "~",
    "a" * 129,
    "$x",
]


@pytest.mark.parametrize("name", TRICKS, ids=ascii)
def test_names_that_are_no_plain_file_names(name: str):
    with pytest.raises(DumpError, match="cannot name a dump"):
        dump.file_name(name, 0)


# -- holding pages -----------------------------------------------------------------------------------------------------


@pytest.fixture
def pool() -> RepresentationHostPool:
    pool = host_pool(buffer_info())
    assert pool.page_num == PAGES
    return pool


def test_occupied_pages(pool: RepresentationHostPool):
    assert not pool.occupied_pages().any()
    pool.alloc(12)
    pool.free(slots(1))
    assert torch.equal(pool.occupied_pages(), flags(0, 2))


def test_pages_freed_while_held_are_handed_out_only_afterwards(pool: RepresentationHostPool):
    pool.alloc(4 * 10)  # pages 0 to 9
    pool.hold(flags(*range(6)))
    assert pool.available_size() == 4 * (PAGES - 10)
    assert pool.free(slots(2, 7, 3, 8)) == 16
    assert pool.available_size() == 4 * (PAGES - 10 + 2)
    assert pages_of(pool.alloc(pool.available_size())) == [7, 8, *range(10, PAGES)]
    assert pool.alloc(4) is None
    pool.release()
    assert pages_of(pool.alloc(pool.available_size())) == [2, 3]


def test_free_pages_that_are_held_are_not_handed_out_either(pool: RepresentationHostPool):
    pool.alloc(4 * 2)
    pool.hold(flags(1, 5, 30))
    assert pages_of(pool.alloc(pool.available_size())) == [page for page in range(2, PAGES) if page not in (5, 30)]
    pool.free(slots(1, 2))
    assert pages_of(pool.alloc(pool.available_size())) == [2]
    pool.release()
    assert pages_of(pool.alloc(pool.available_size())) == [1, 5, 30]


def test_a_flush_does_not_hand_held_pages_out(pool: RepresentationHostPool):
    pool.alloc(4 * 10)
    pool.hold(flags(0, 4))
    pool.free(slots(4))
    pool.clear()
    assert pages_of(pool.alloc(pool.available_size())) == [page for page in range(PAGES) if page not in (0, 4)]
    pool.release()
    assert pages_of(pool.alloc(pool.available_size())) == [0, 4]


def test_holding_nothing_changes_nothing(pool: RepresentationHostPool):
    order = pool.free_slots.clone()
    pool.hold(flags(0))
    pool.release()
    assert pages_of(pool.alloc(pool.available_size())) == pages_of(order)
    pool.free(slots(3))
    with pytest.raises(AssertionError, match="Double-free"):
        pool.free(slots(3))


def test_nothing_is_evicted_while_pages_are_held(pool: RepresentationHostPool):
    group = SimpleNamespace(entries=[SimpleNamespace(host_pool=pool)])
    cache, asked = SimpleNamespace(host_pool_group=group), []

    def evict(*arguments: object) -> int:
        asked.append(arguments)
        return 16

    pool.hold(flags(0))
    assert hooks.around_evict_host(evict, cache, 16) == 0
    assert not asked
    pool.release()
    assert hooks.around_evict_host(evict, cache, 16) == 16
    assert asked == [(cache, 16)]
    for other in (None, SimpleNamespace(entries=[SimpleNamespace(host_pool=object())])):
        assert hooks.around_evict_host(evict, SimpleNamespace(host_pool_group=other), 16) == 16


# -- the schedulers' side ----------------------------------------------------------------------------------------------


class Scheduler:
    """What `dump` needs of one, over a pool of noise; pages 0 to 9 are handed out."""

    def __init__(
        self,
        folder: pathlib.Path | None,
        rank: int = 0,
        ranks: int = 1,
        pool: RepresentationHostPool | None = None,
    ):
        self.pool = pool or host_pool(buffer_info(), tp_size=ranks)
        self.pool.arena.buffer.random_(generator=torch.Generator().manual_seed(rank))
        self.pool.alloc(4 * 10)
        self.server_args = SimpleNamespace()
        self.server_args._hiqcache_choice = Choice(
            "int8", "a test", command_line=False, dump_dir=folder and str(folder)
        )
        self.submitted = 0
        engine = SimpleNamespace(device_to_host_stream=torch.cpu.Stream())
        self.tree_cache = SimpleNamespace(
            flush_pending_backups=self._submit, cache_controller=SimpleNamespace(l2_transfer_engine=engine)
        )
        self.tp_cpu_group = torch.distributed.group.WORLD if ranks > 1 else None
        self.answers: list[Any] = []
        send = SimpleNamespace(send_output=lambda answer, request: self.answers.append(answer))
        self.ipc_channels = SimpleNamespace(send_to_tokenizer=send)
        self.parallel = SimpleNamespace(tp_rank=rank, tp_size=ranks, nnodes=1)

    def _submit(self) -> None:
        self.submitted += 1

    def ask(self, method: str, **body: Any) -> dict[str, Any]:
        """The answer; a refusal is raised."""

        def other(*arguments: object) -> None:
            raise AssertionError("went to SGLang")

        with (
            mock.patch.object(dump, "get_parallel", return_value=self.parallel),
            mock.patch.object(dump.proof, "pool_in_force", return_value=self.pool),
        ):
            dump.handle(other, self, DumperControlReqInput(method=method, body=body))
        answer = self.answers.pop()
        if not answer.success:
            raise DumpError(answer.error)
        return answer.response[0]

    def finish(self) -> dict[str, Any]:
        while (status := self.ask(dump.STATUS))["state"] == "writing":
            time.sleep(0.01)
        return status


def test_a_dump_from_first_to_last(tmp_path: pathlib.Path):
    scheduler = Scheduler(tmp_path)
    with pytest.raises(DumpError, match="asked for no dump"):
        scheduler.ask(dump.STATUS)
    begun = scheduler.ask(dump.START, name="first")
    assert begun["pages"] == 10
    assert scheduler.submitted == 1, "backups that wait to be submitted are part of the pages"
    status = scheduler.finish()
    file = tmp_path / "first-tp0.safetensors"
    assert status == {
        "state": "done",
        "files": [str(file)],
        "bytes": file.stat().st_size,
        "pages": 10,
        "written": 10,
        "error": "",
    }
    assert not scheduler.pool.holding
    with Dump(file) as opened:
        assert opened.metadata.page_ids.tolist() == list(range(10))
        assert opened.metadata.pool_pages == PAGES
        assert opened.metadata.sglang_version == "0.5.23"
        for part in Part:
            for name in ("payload", "scales"):
                expected = scheduler.pool.arena.section(part, name)[1, :10].contiguous()
                stored = opened.read(part, name, 1, slice(0, 10)).contiguous()
                assert torch.equal(stored.view(torch.uint8), expected.view(torch.uint8))
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(DumpError, match=r"first-tp0\.safetensors exists; no dump replaces a file"):
        scheduler.ask(dump.START, name="first")
    assert scheduler.ask(dump.START, name="second")["state"] == "writing"
    assert scheduler.finish()["state"] == "done"


def test_selections(tmp_path: pathlib.Path):
    scheduler = Scheduler(tmp_path)
    scheduler.pool.free(slots(4))
    for name, pages, expected in [
        ("a", "occupied", [0, 1, 2, 3, 5, 6, 7, 8, 9]),
        ("b", "all", list(range(PAGES))),
        ("c", "4-6,30", [4, 5, 6, 30]),
    ]:
        scheduler.ask(dump.START, name=name, pages=pages)
        assert scheduler.finish()["pages"] == len(expected)
        with Dump(tmp_path / f"{name}-tp0.safetensors") as opened:
            assert opened.metadata.page_ids.tolist() == expected
    for pages, message in [
        ("33", "no page 33; the pool's are 0 to 32"),
        ("5-1", "do not ascend"),
        ("some", "'some' is no page"),
        ("0," * 40_000, "ranges of pages have 80,000 characters; allowed: up to 65,536"),
    ]:
        with pytest.raises(DumpError, match=message):
            scheduler.ask(dump.START, name="d", pages=pages)
    scheduler.pool.clear()
    with pytest.raises(DumpError, match="L2 holds no page yet"):
        scheduler.ask(dump.START, name="d")
    assert sorted(path.name[0] for path in tmp_path.iterdir()) == ["a", "b", "c"]


def test_off_unless_the_server_was_started_with_it():
    with pytest.raises(DumpError, match="writes no dumps: it was started without --hicache-dump-dir"):
        Scheduler(None).ask(dump.START, name="a")


def test_other_requests_go_to_sglang():
    scheduler, seen = Scheduler(None), []
    request = DumperControlReqInput(method="get_state", body={})
    dump.handle(lambda *arguments: seen.append(arguments), scheduler, request)
    assert seen == [(scheduler, request)]


@pytest.mark.parametrize("name", ["../up", "/tmp/x", ".hidden", ""])
def test_tricks_leave_nothing(tmp_path: pathlib.Path, name: str):
    (tmp_path / "in").mkdir()
    with pytest.raises(DumpError, match="cannot name a dump"):
        Scheduler(tmp_path / "in").ask(dump.START, name=name)
    assert [path.name for path in tmp_path.rglob("*")] == ["in"]


def test_a_link_in_place_of_the_file_is_not_followed(tmp_path: pathlib.Path):
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a-tp0.safetensors").symlink_to("../secret")
    with pytest.raises(DumpError, match="exists"):
        Scheduler(tmp_path / "in").ask(dump.START, name="a")
    assert (tmp_path / "secret").read_text() == "mine"


def test_one_at_a_time_and_what_is_freed_meanwhile(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """While the thread writes: a second dump is refused, freed pages stay, a flush changes nothing in the file."""
    scheduler, go = Scheduler(tmp_path), threading.Event()
    gate(monkeypatch, go.wait)
    before = scheduler.pool.arena.buffer.clone()
    scheduler.ask(dump.START, name="a")
    with pytest.raises(DumpError, match="a dump is being written; one at a time"):
        scheduler.ask(dump.START, name="b")
    scheduler.pool.free(slots(3))
    scheduler.pool.clear()
    assert scheduler.ask(dump.STATUS)["state"] == "writing"
    taken = scheduler.pool.alloc(scheduler.pool.available_size())
    assert pages_of(taken) == list(range(10, PAGES))
    for part in Part:
        scheduler.pool.arena.blocks(part)[:, pages_of(taken)] = 0xEE  # what a backup would do
    go.set()
    assert scheduler.finish()["state"] == "done"
    assert pages_of(scheduler.pool.alloc(scheduler.pool.available_size())) == list(range(10))
    scheduler.pool.arena.buffer.copy_(before)
    with Dump(tmp_path / "a-tp0.safetensors") as opened:
        expected = scheduler.pool.arena.section(Part.V, "payload")[0, :10]
        assert torch.equal(opened.read(Part.V, "payload", 0, slice(0, 10)), expected)


def gate(monkeypatch: pytest.MonkeyPatch, wait: Callable[[], object]) -> None:
    """Make every piece of a dump wait first."""
    write = writer.SafetensorsWriter.write

    def waiting(self: writer.SafetensorsWriter, *arguments: Any) -> None:
        wait()
        write(self, *arguments)

    monkeypatch.setattr(writer.SafetensorsWriter, "write", waiting)


@pytest.mark.parametrize("fault", [DumpError("the disk is full"), ZeroDivisionError("division by zero")], ids=str)
def test_a_failure_while_writing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, fault: Exception):
    def fail() -> None:
        raise fault

    scheduler = Scheduler(tmp_path)
    with monkeypatch.context() as patch:
        gate(patch, fail)
        scheduler.ask(dump.START, name="a")
        status = scheduler.finish()
    assert status["state"] == "failed"
    assert status["error"].startswith("TP rank 0: ")
    assert str(fault) in status["error"]
    assert not list(tmp_path.iterdir())
    assert not scheduler.pool.holding
    scheduler.ask(dump.START, name="a")
    assert scheduler.finish()["state"] == "done"


def test_a_short_disk(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: SimpleNamespace(free=5000))
    scheduler = Scheduler(tmp_path)
    with pytest.raises(DumpError, match=r"TP rank 0: .* is too full: the dump needs .* and 5,000 bytes"):
        scheduler.ask(dump.START, name="a")
    assert not scheduler.pool.holding
    assert not list(tmp_path.iterdir())


# -- what it costs the schedulers -------------------------------------------------------------------------------------


def small_pool(pages: int) -> RepresentationHostPool:
    """Of pages of one token, every second of them handed out: the most ranges that a file can have to name."""
    info = buffer_info(head_num=1, head_dim=16, layer_num=1, page_size=1)
    pool = host_pool(info, name="bf16", page_size=1, host_token_capacity=pages)
    taken = pool.alloc(pages)
    assert taken is not None
    pool.free(taken[1::2])
    return pool


def cost(work: Callable[[], object]) -> tuple[int, int]:
    """Lines of Python that some work executes, in threads that it starts too, and the most bytes that Python takes."""
    lines = 0

    def count(frame: object, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    tracemalloc.start()
    threading.settrace(count)
    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(None)
        threading.settrace(None)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return lines, most


@pytest.mark.parametrize("pages", ["occupied", "all", "1-1500"])
def test_no_step_of_a_dump_goes_page_by_page(tmp_path: pathlib.Path, pages: str):
    """A scheduler stands still in each of these steps, and while the writer's thread has the GIL.

    So a pool that is 20 times as large takes as many lines of Python, and no Python object for each page: an int in a
    list has 36 bytes. Flags, numbers and the text of ranges have fewer than 20.
    """
    few, many = 2000, 40_000
    costs: dict[str, list[tuple[int, int]]] = {}
    for size in (few, many):
        (tmp_path / str(size)).mkdir()
        scheduler = Scheduler(tmp_path / str(size), pool=small_pool(size))
        pool = scheduler.pool
        used = pool.slot_used.nonzero()[:, 0].flip(0)

        def write(scheduler: Scheduler = scheduler) -> None:
            scheduler.ask(dump.START, name="a", pages=pages)
            assert scheduler.pool.dump is not None
            scheduler.pool.dump._thread.join()

        def advance(pool: RepresentationHostPool = pool) -> None:
            assert pool.dump is not None
            pool.dump.advance()
            pool.dump._thread.join()

        steps: dict[str, Callable[[], object]] = {
            "start and write": write,
            "free": lambda pool=pool, used=used: pool.free(used),
            "allocate": lambda pool=pool: pool.alloc(4),
            "flush": pool.clear,
            "release and commit": advance,
            "end": advance,
            "status": lambda scheduler=scheduler: scheduler.ask(dump.STATUS),
        }
        for name, step in steps.items():
            costs.setdefault(name, []).append(cost(step))
        assert pool.available_size() == size
        assert scheduler.ask(dump.STATUS)["state"] == "done"
    for name, ((lines, most), (more_lines, more)) in costs.items():
        assert more_lines < 1.1 * lines + 50, name
        assert more - most < 20 * (many - few), name


def test_nothing_of_a_dump_stays(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """Neither the ids of its pages, nor its flags, nor the writer; what `status` says does."""

    def writers_alive() -> list[Any]:
        return [each for each in gc.get_objects() if type(each) is writer.SafetensorsWriter]

    def left() -> list[str]:
        gc.collect()
        of_pages = [each for each in gc.get_objects() if type(each) is torch.Tensor and len(each.shape) == 1]
        writers = [each for each in writers_alive() if id(each) not in earlier]
        return [str(each.dtype) for each in of_pages if len(each) == occupied] + ["writer"] * len(writers)

    earlier = {id(each) for each in writers_alive()}  # of other tests in this process
    scheduler, go = Scheduler(tmp_path, pool=small_pool(2002)), threading.Event()
    occupied = int(scheduler.pool.slot_used.sum())
    gate(monkeypatch, go.wait)
    scheduler.ask(dump.START, name="a")
    assert "writer" in left()
    go.set()
    status = scheduler.finish()
    assert (status["state"], status["pages"], status["written"]) == ("done", occupied, occupied)
    assert left() == []
    assert not scheduler.pool.holding
    assert scheduler.ask(dump.STATUS) == status


# -- two ranks ---------------------------------------------------------------------------------------------------------


def rank_main(rank: int, folder: pathlib.Path, fault: str, results: Any) -> None:
    torch.set_num_threads(1)  # this process is forked: it has none of the parent's threads
    torch.distributed.init_process_group("gloo", f"file://{folder / 'store'}", rank=rank, world_size=2)
    dumps = folder / "dumps"
    scheduler = Scheduler(dumps, rank, ranks=2)
    result: dict[str, Any] = {"available": [], "states": []}
    with pytest.MonkeyPatch.context() as patch:

        def slowly() -> None:
            time.sleep(0.02 if rank == 0 else 0)
            if fault == "write" and rank == 1:
                raise DumpError("the disk is full")

        gate(patch, slowly)
        if fault == "commit" and rank == 1:
            (dumps / "a-tp1.safetensors").unlink(missing_ok=True)
            commit = writer.SafetensorsWriter.commit

            def late(self: writer.SafetensorsWriter) -> None:
                self.file.write_text("somebody's")
                commit(self)

            patch.setattr(writer.SafetensorsWriter, "commit", late)
        if fault == "room" and rank == 1:
            patch.setattr(writer.shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
        try:
            scheduler.ask(dump.START, name="a")
        except DumpError as error:
            result["refused"] = str(error)
        else:
            scheduler.pool.free(slots(2, 5))
            for step in range(1000):
                if step % 7 == 0:
                    status = scheduler.ask(dump.STATUS)
                    if status["state"] != "writing":
                        result |= status
                        break
                assert scheduler.pool.dump is not None
                scheduler.pool.dump.advance()
                result["available"].append(scheduler.pool.available_size())
                time.sleep(0.005)
    result["held"] = scheduler.pool.holding
    results.put((rank, result))
    torch.distributed.destroy_process_group()


def two_ranks(folder: pathlib.Path, fault: str = "") -> list[dict[str, Any]]:
    (folder / "dumps").mkdir()
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=rank_main, args=(rank, folder, fault, results)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    found = dict(results.get(timeout=60) for _ in ranks)
    for process in ranks:
        process.join(10)
    return [found[0], found[1]]


def test_two_ranks_release_in_the_same_step(tmp_path: pathlib.Path):
    """Rank 1 has long written when rank 0 has; both hand the freed pages out from the same step on."""
    first, second = two_ranks(tmp_path)
    assert first == second
    assert first["state"] == "done"
    assert first["pages"] == first["written"] == 20
    files = [tmp_path / "dumps" / f"a-tp{rank}.safetensors" for rank in (0, 1)]
    assert first["files"] == [str(file) for file in files]
    assert first["bytes"] == sum(file.stat().st_size for file in files)
    held, free = 4 * (PAGES - 10), 4 * (PAGES - 8)
    assert first["available"][0] == held
    assert first["available"][-1] == free
    assert sorted(first["available"]) == first["available"]
    for rank, file in enumerate(files):
        with Dump(file) as opened:
            assert opened.metadata.tp_rank == rank
            assert opened.geometry.tp_size == 2
    assert files[0].read_bytes() != files[1].read_bytes()


@pytest.mark.parametrize(
    ("fault", "message", "left"),
    [
        ("write", "TP rank 1: the disk is full", {}),
        ("commit", "TP rank 1: .*a-tp1.safetensors exists", {"a-tp1.safetensors": "somebody's"}),
    ],
)
def test_an_error_of_another_rank_is_everybodys(tmp_path: pathlib.Path, fault: str, message: str, left: dict):
    """Rank 0's replies are the only ones that SGLang passes on, and its file goes too."""
    for result in two_ranks(tmp_path, fault):
        assert result["state"] == "failed"
        assert re.match(message, result["error"])
        assert not result["held"]
        assert result["available"][-1] == 4 * (PAGES - 8)
    assert {path.name: path.read_text() for path in (tmp_path / "dumps").iterdir()} == left


def test_a_rank_that_refuses_refuses_for_all(tmp_path: pathlib.Path):
    for result in two_ranks(tmp_path, "room"):
        assert result["refused"].startswith("TP rank 1: ")
        assert "too full" in result["refused"]
        assert not result["held"]
    assert not list((tmp_path / "dumps").iterdir())


# -- real servers ------------------------------------------------------------------------------------------------------

PAGE_SIZE = 16
WHOLE = 96
"""Tokens of a prompt of 99 that can come from a cache: six pages."""


def settings(model: pathlib.Path, **more: Any) -> dict[str, Any]:
    """L1 of 448 tokens, L2 of 57 pages."""
    return {
        "model_path": str(model),
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "enable_hierarchical_cache": True,
        "hicache_write_policy": "write_through",
        "hicache_ratio": 2,
        "max_total_tokens": 448,
        "context_length": 256,
        "page_size": PAGE_SIZE,
        **more,
    }


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[first, *rng.choices(range(tiny_model.VOCABULARY), k=98)] for first in range(10, 22)]


@pytest.fixture(scope="module")
def carrying(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pytest.MonkeyPatch]:
    """Processes started in this module carry the probe."""
    site = pip_install(PROBE, tmp_path_factory.mktemp("probe"))
    with pytest.MonkeyPatch.context() as patch:
        carry(site, patch)
        yield patch


def one(server: Server, prompt: list[int]) -> Output:
    """The answer to one prompt; a single token, because nothing here depends on how many there are."""
    (answer,) = server.generate([prompt], new_tokens=1)
    return answer


def hiqcache_dump(url: str, *words: str, key: str | None = ADMIN_KEY) -> subprocess.CompletedProcess[str]:
    """The command as an operator runs it."""
    return subprocess.run(
        [sys.executable, "-m", "hiqcache", "dump", "--url", url, *words],
        env=os.environ | ({"HIQCACHE_ADMIN_KEY": key} if key else {}),
        capture_output=True,
        text=True,
        timeout=120,
    )


def ask(url: str, **body: str) -> requests.Response:
    """A request to the route itself; with no body, how far the dump is."""
    method = "POST" if body else "GET"
    return requests.request(method, url + dump.ROUTE, json=body or None, headers=ADMIN, timeout=60)


def backed_up(folder: pathlib.Path) -> dict[int, dict[Part, torch.Tensor]]:
    """Device rows `[layers, page_size, heads, dim]` of each page of the dump, as the probe saw them."""
    found: dict[int, dict[Part, torch.Tensor]] = {}
    for file in sorted(folder.iterdir()):
        saved = torch.load(file)
        for number, page in enumerate(saved["pages"].tolist()):
            if page < 30:
                assert page not in found, f"page {page} was written again while it was to be held"
                found[page] = {part: saved[part.value][:, number] for part in Part}
    return found


def check_values(file: pathlib.Path, rows: dict[int, dict[Part, torch.Tensor]]) -> None:
    """Every value in a dump is what the plain codec makes of the rows that were backed up."""
    with Dump(file) as opened:
        assert opened.metadata.page_ids.tolist() == list(range(30))
        representation = registry.get(opened.metadata.representation)(opened.geometry)
        assert opened.geometry.layers == tiny_model.LAYERS
        for part in Part:
            for layer in range(opened.geometry.layers):
                values = torch.stack([rows[page][part][layer] for page in opened.metadata.page_ids.tolist()])
                blocks = torch.empty(len(values), representation.layouts[part].block_bytes, dtype=torch.uint8)
                representation.encode(values, part, blocks)
                expected = torch.empty_like(values)
                representation.decode(blocks, part, expected)
                found = opened.decode(opened.representation(), part, layer, slice(0, opened.pages))
                assert same_bits(found, expected)


@pytest.fixture(scope="module")
def int8_file(
    tiny: pathlib.Path,
    prompts: list[list[int]],
    carrying: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> pathlib.Path:
    """The dump of an HTTP server's first five prompts, made under traffic; what else happens there is checked too."""
    folder = tmp_path_factory.mktemp("http")
    dumps, rows = folder / "dumps", folder / "rows"
    dumps.mkdir()
    rows.mkdir()
    port = free_port()
    options = {"port": port, "admin_api_key": ADMIN_KEY, "hicache_representation": "int8", "hicache_dump_dir": dumps}
    variables = {
        "HIQCACHE_PROBE": folder / "events",
        "HIQCACHE_PROBE_ROWS": rows,
        "HIQCACHE_PROBE_GATE": folder / "gate",
    }
    words = cpu.words(device_settings() | settings(tiny, **options))
    command = [sys.executable, "-m", "sglang.launch_server", *words]
    with http(command, folder / "log", port, environment(**variables)) as server:
        for key, message in [(None, "refused a request with no key"), ("wrong", "refused this key")]:
            refused = hiqcache_dump(server.url, "first", key=key)
            assert refused.returncode == 1
            assert message in refused.stderr
        assert requests.get(server.url + dump.ROUTE, timeout=60).status_code == 401
        for body, message in [
            ({"name": "first"}, "L2 holds no page yet"),
            ({"name": "../first"}, "'../first' cannot name a dump"),
            ({"name": "first", "pages": "57"}, "no page 57; the pool's are 0 to 56"),
            ({"title": "first"}, "the body must be"),
        ]:
            refused = ask(server.url, **body)
            assert refused.status_code == 400
            assert message in refused.json()["error"]

        (folder / "gate").touch()
        for prompt in prompts[:5]:
            assert one(server, prompt).from_host == 0
        assert ask(server.url, name="first").json()["pages"] == 5 * WHOLE // PAGE_SIZE
        refused = hiqcache_dump(server.url, "second")
        assert refused.returncode == 1
        assert "a dump is being written; one at a time" in refused.stderr
        for prompt in prompts[5:10]:  # 30 pages more than the 30 of the dump, in a pool of 57
            assert one(server, prompt).from_host == 0
        for prompt in prompts[:2]:  # L2 serves while it is dumped, and evicted nothing
            assert one(server, prompt).from_host == WHOLE
        server.flush()  # frees every page that is being written
        for prompt in prompts[5:10]:  # and these would take their place
            assert one(server, prompt).from_host == 0
        status = ask(server.url).json()
        assert (status["state"], status["written"]) == ("writing", 0)
        (folder / "gate").unlink()
        while (status := ask(server.url).json())["state"] == "writing":
            time.sleep(0.2)
        assert status["state"] == "done"
        check_values(dumps / "first-tp0.safetensors", backed_up(rows))

        # Released pages are used again: these prompts need more than the 27 that were free during the dump.
        for prompt in prompts[:5]:
            one(server, prompt)
        for number in (0, 1):
            assert one(server, prompts[number]).from_host == WHOLE
        refused = hiqcache_dump(server.url, "first")
        assert refused.returncode == 1
        assert "first-tp0.safetensors exists" in refused.stderr
        finished = hiqcache_dump(server.url, "few", "--pages", "2-3", "--json")
        assert finished.returncode == 0, finished.stderr
        assert json.loads(finished.stdout)["files"] == [str(dumps / "few-tp0.safetensors")]
    assert sorted(path.name for path in dumps.iterdir()) == ["few-tp0.safetensors", "first-tp0.safetensors"]
    assert not any(event.get("wrong_bytes") or event.get("wrong_values") for event in events(folder / "events"))
    return dumps / "first-tp0.safetensors"


@pytest.mark.slow
@pytest.mark.xdist_group("dump")  # to start the HTTP server once
def test_a_dump_of_a_server_opens_with_safetensors_alone(int8_file: pathlib.Path):
    with safetensors.safe_open(int8_file, framework="pt") as opened:
        payload, scales = opened.get_tensor("k.payload"), opened.get_tensor("k.scales")
        text = opened.metadata()
    shape = [tiny_model.LAYERS, 30, PAGE_SIZE, tiny_model.HEADS]
    assert list(payload.shape) == [*shape, tiny_model.HEAD_DIM]
    assert list(scales.shape) == shape
    assert payload.dtype == torch.int8
    assert (payload.abs().amax(-1) == 127).all()
    assert text["hiqcache.format_tag"] == "int8-head-v2"
    assert text["sglang.version"] == "0.5.23"
    assert text["hiqcache.pool_pages"] == "57"


@pytest.mark.slow
@pytest.mark.xdist_group("dump")  # to start the HTTP server once
def test_an_engines_dump_beside_it(
    tiny: pathlib.Path,
    prompts: list[list[int]],
    int8_file: pathlib.Path,
    carrying: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
):
    """The same prompts through a bf16 Engine: its dump is the device's own rows, and says what int8's error was."""
    dumps, rows = tmp_path / "dumps", tmp_path / "rows"
    dumps.mkdir()
    rows.mkdir()
    options = settings(tiny, hicache_representation="bf16", hicache_dump_dir=dumps, hicache_mem_layout="layer_first")
    with carrying.context() as patch:
        patch.setenv("HIQCACHE_PROBE", str(tmp_path / "events"))
        patch.setenv("HIQCACHE_PROBE_ROWS", str(rows))
        with engine(**options) as server:
            for prompt in prompts[:5]:
                one(server, prompt)
            told: list[tuple[int, int]] = []
            files = dump.dump(server.engine, "bf16", progress=lambda written, pages: told.append((written, pages)))
            with pytest.raises(DumpError, match="exists"):
                dump.dump(server.engine, "bf16")
            with pytest.raises(DumpError, match="cannot name a dump"):
                dump.dump(server.engine, "a/b")
    assert files == [dumps / "bf16-tp0.safetensors"]
    assert told[-1] == (30, 30)
    check_values(files[0], backed_up(rows))
    with Dump(int8_file) as lossy, Dump(files[0]) as exact:
        assert torch.equal(lossy.metadata.page_ids, exact.metadata.page_ids)
        for differences in compare(lossy, exact):
            assert differences.beyond_bound is not None
            assert not differences.beyond_bound.any()
            assert (differences.error > 0).all()
            assert (differences.relative_error < 0.02).all()


# -- the command, without a server -------------------------------------------------------------------------------------


def run(*words: str) -> Result:
    result = CliRunner().invoke(main, ["dump", *words], prog_name="hiqcache")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_no_server():
    result = run("name", "--url", f"http://127.0.0.1:{free_port()}")
    assert result.exit_code == 1
    assert "no answer from http://127.0.0.1:" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["name", "--url", "ftp://host"], "does not start with http:// or https://"),
        (["name", "--url", "file:///etc/passwd"], "does not start with http:// or https://"),
        (["name", "--all", "--pages", "1"], "Give --all or --pages, not both."),
        ([], "Missing argument 'NAME'"),
    ],
)
def test_what_is_asked_wrongly(words: list[str], message: str):
    result = run(*words)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize("url", ["http://", "http://a:b", "http://[::1", "http://127.0.0.1:1/a b"])
def test_urls_that_are_none(url: str):
    result = run("name", "--url", url)
    assert result.exit_code == 1
    assert f"answer from {url}: " in result.output


def test_a_key_that_no_request_can_carry():
    result = run("name", "--url", f"http://127.0.0.1:{free_port()}", "--admin-key", "schlüssel")
    assert result.exit_code == 1
    assert "the admin key has characters other than ASCII" in result.output


def test_no_pages_are_not_the_occupied_ones():
    asked = []
    answered(400, b'{"error": "no page"}', "--pages", "", bodies=asked)
    assert json.loads(asked[0]) == {"name": "name", "pages": ""}


def answered(
    status: int, answer: bytes, *words: str, headers: dict[str, str] | None = None, bodies: list[bytes] | None = None
) -> Result:
    """What the command makes of a server that answers so; `bodies` gets what it was asked."""

    class Handler(http_server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if bodies is not None:
                bodies.append(body)
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with http_server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        result = run("name", "--url", f"http://127.0.0.1:{server.server_port}/", *words)
        thread.join()
    return result


def _status(**changes: object) -> bytes:
    status = {"state": "done", "pages": 1, "written": 0, "bytes": 0, "files": [], "error": ""}
    return json.dumps(status | changes).encode()


def test_what_a_server_wrote():
    files = ["/d/name-tp0.safetensors", "/d/name-tp1.safetensors"]
    status = {"state": "done", "pages": 2000, "written": 2000, "bytes": 12345, "files": files, "error": ""}
    result = answered(200, json.dumps(status).encode())
    assert result.exit_code == 0
    assert result.stdout.splitlines() == ["2,000 pages, 12,345 bytes, on the server in:", *files]


@pytest.mark.parametrize(
    ("status", "answer", "message"),
    [
        (404, b"{}", "start it with --hicache-representation NAME, --hicache-dump-dir DIR and --admin-api-key KEY"),
        (
            401,
            b"{}",
            "a request with no key: give its admin key (--admin-api-key) in HIQCACHE_ADMIN_KEY or with --admin-key",
        ),
        (400, b'{"error": "too full"}', "refused: too full"),
        (500, b"<html>", "refused with status 500"),
        (200, b"hello", "no sensible answer from"),
        (200, b"[]", "answered, but not as a server with hiqcache does"),
        (200, b"[" * 100_000, "no sensible answer from"),
        (200, b'{"state": "done"}', "answered, but not as a server with hiqcache does"),
        (200, _status(state="lost"), "answered, but not as a server with hiqcache does"),
        (200, _status(pages="many"), "answered, but not as a server with hiqcache does"),
        (200, _status(state="failed", error="TP rank 1: full"), "left no file: TP rank 1"),
    ],
)
def test_what_a_server_may_answer(status: int, answer: bytes, message: str):
    result = answered(status, answer)
    assert result.exit_code == 1
    assert message in result.output


@pytest.mark.parametrize("status", [200, 500])
def test_an_answer_that_breaks_off(status: int):
    result = answered(status, b'{"state"', headers={"Content-Length": "100"})
    assert result.exit_code == 1
    assert ("no sensible answer from" if status == 200 else "refused with status 500") in result.output


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_the_key_is_not_sent_on(status: int):
    """Nor is another server's answer to a GET taken for this one's."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"http://127.0.0.1:{other.getsockname()[1]}/"
        result = answered(status, b"", "--admin-key", "secret", headers={"Location": address})
        assert result.exit_code == 1
        assert f"sends on to {address}: give --url the server's own address" in result.output
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.accept()
