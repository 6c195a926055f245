"""Dumping a running server's L2 to files, one for each TP rank, while it serves.

Requests reach every scheduler in the same step, through SGLang's `DumperControlReqInput`; a thread of each then writes
its pages. What must not change under the thread is held: pages that are freed meanwhile are handed out again only when
every rank has written, on all of them in the same step, and L2 evicts nothing. If one rank fails, all of them do.

A scheduler serves nobody while it works on a dump, so its thread makes no Python object for each page. Nor does the
writer's, which would keep the GIL from it. Pages are flags and numbers in tensors.
"""

import functools
import importlib.metadata
import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import DumperControlReqInput, DumperControlReqOutput
from sglang.srt.runtime_context import get_parallel, get_serving

from hiqcache import __version__
from hiqcache.geometry import HiqcacheError, Violation
from hiqcache.inspect.format import ALL, OCCUPIED, DumpError, Metadata, each_range
from hiqcache.inspect.writer import SafetensorsWriter, dump_tensors, require_room, write_pages
from hiqcache.sglang import proof, rules
from hiqcache.sglang.choice import DUMP_FLAG, chosen
from hiqcache.sglang.pool import RepresentationHostPool

ROUTE = "/hicache/dump"
START, STATUS = "hiqcache.dump.start", "hiqcache.dump.status"
"""Methods of `DumperControlReqInput` that are ours."""
POLL_SECONDS = 0.2
LONGEST_SELECTION = 65_536
"""Characters of ranges of pages, which a scheduler reads between two of its steps."""
NO_ADMIN_KEY = (
    "dumps over HTTP need an admin key, and this server was started without one: restart it with --admin-api-key KEY, "
    "and ask with that key (`hiqcache dump` takes it from HIQCACHE_ADMIN_KEY)"
)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")

logger = logging.getLogger(__name__)


def violations(settings: Any) -> Iterator[Violation]:
    """Settings of a server under which a dump could not be asked for, as `rules.violations`."""
    yield from rules.dump_violations(settings)
    if envs.SGLANG_RUST_SERVER.get():
        rule = "a live dump is asked for through SGLang's Python server"
        yield Violation(rule=rule, seen=1, allowed="0", flag="SGLANG_RUST_SERVER")


def file_name(name: str, tp_rank: int) -> str:
    """The file of one rank.

    Raises:
        DumpError: `name` is no plain file name.
    """
    if not _NAME.fullmatch(name):
        raise DumpError(
            f"{name!r} cannot name a dump; allowed: up to 128 letters, digits, '.', '_' and '-', the first a letter, a "
            "digit or '_'"
        )
    return f"{name}-tp{tp_rank}.safetensors"


# -- in a scheduler ----------------------------------------------------------------------------------------------------


class LiveDump:
    """One rank's share of a dump.

    The scheduler calls every method, on all ranks in the same step; a thread does what takes time.

    Args:
        pool: the pool; the pages are held already.
        writer: a file for them, not begun yet.
        pages: which ones, `[page_num]` bool.
        count: how many they are.
        ready: set once everything that is on its way into these pages has arrived.
        tp_rank: this rank.
        group: CPU process group of the ranks; None for a single one.
    """

    def __init__(
        self,
        pool: RepresentationHostPool,
        writer: SafetensorsWriter,
        pages: torch.Tensor,
        count: int,
        ready: Any,
        tp_rank: int,
        group: torch.distributed.ProcessGroup | None,
    ):
        self._pool, self._count, self._group = pool, count, group
        self._writer: SafetensorsWriter | None = writer  # until it is over
        self._file, self._bytes, self._written = str(writer.file), writer.total_bytes, 0
        self._failure: str | None = None
        self._failures: list[str] = []
        self._begin("write", functools.partial(self._write, writer, pages, ready, tp_rank))

    @property
    def over(self) -> bool:
        """Whether there is nothing more to do."""
        return self._stage == "over"

    def advance(self) -> None:
        """Go on to the next stage if every rank has finished this one."""
        if self.over or not self._all(not self._thread.is_alive()):
            return
        assert self._writer is not None
        self._failures += _failures(self._group, self._failure)
        if self._stage == "write":
            self._pool.release()
            if self._failures:
                self._begin("withdraw", self._writer.withdraw)
            else:
                self._begin("commit", self._writer.commit)
        elif self._stage == "commit" and self._failures:
            self._begin("withdraw", self._writer.withdraw)
        else:
            self._stage, self._writer = "over", None

    def status(self) -> dict[str, Any]:
        """How far all ranks are; the same on each of them."""
        self.advance()
        ranks = _gather(self._group, (self._file, self._bytes, self._written))
        return {
            "state": "writing" if not self.over else "failed" if self._failures else "done",
            "files": [file for file, _, _ in ranks],
            "bytes": sum(size for _, size, _ in ranks),
            "pages": len(ranks) * self._count,
            "written": sum(written for _, _, written in ranks),
            "error": "; ".join(dict.fromkeys(self._failures)),
        }

    def _all(self, mine: bool) -> bool:
        if self._group is None:
            return mine
        agreed = torch.tensor(int(mine))
        torch.distributed.all_reduce(agreed, torch.distributed.ReduceOp.MIN, group=self._group)
        return bool(agreed)

    def _begin(self, stage: Literal["write", "commit", "withdraw"], work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except Exception as error:  # whatever it is, the other ranks must hear of it
                self._failure = _reason(error)

        self._stage: Literal["write", "commit", "withdraw", "over"] = stage
        self._failure = None
        # A daemon: a server that ends does not wait for a disk.
        self._thread = threading.Thread(target=run, name=f"hiqcache-dump-{stage}", daemon=True)
        self._thread.start()

    def _write(self, writer: SafetensorsWriter, pages: torch.Tensor, ready: Any, tp_rank: int) -> None:
        device = self._pool.device_k_buffers[0].device
        torch.get_device_module(device).set_device(device)  # or waiting would make a CUDA context on GPU 0
        ready.synchronize()

        def progress(written: int) -> None:
            self._bytes, self._written = writer.total_bytes, written

        page_ids = torch.from_numpy(np.flatnonzero(pages.numpy()))
        metadata = _metadata(self._pool, page_ids, tp_rank)
        write_pages(writer, self._pool.arena, metadata, progress, self._pool.key_exponents)


def handle(original: Callable, scheduler: Any, request: DumperControlReqInput) -> None:
    """AROUND `Scheduler.handle_dumper_control`: answer what is ours."""
    actions = {START: _start, STATUS: _status}
    if request.method not in actions or chosen(scheduler.server_args) is None:
        original(scheduler, request)
        return
    try:
        answer = DumperControlReqOutput(success=True, response=[actions[request.method](scheduler, request.body)])
    except HiqcacheError as error:
        answer = DumperControlReqOutput(success=False, response=[], error=str(error))
    scheduler.ipc_channels.send_to_tokenizer.send_output(answer, request)


def pool_of(tree_cache: Any) -> RepresentationHostPool | None:
    """The pool of a radix cache, if it is ours."""
    group = tree_cache.host_pool_group
    pool = group.entries[0].host_pool if group is not None else None
    return pool if type(pool) is RepresentationHostPool else None


def _start(scheduler: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    """Begin a dump. What is decided before `_failures` is decided alike on every rank."""
    pool, choice = proof.pool_in_force(scheduler.tree_cache), chosen(scheduler.server_args)
    assert choice is not None
    if choice.dump_dir is None:
        raise DumpError(f"this server writes no dumps: it was started without {DUMP_FLAG}")
    if pool.dump is not None and not pool.dump.over:
        raise DumpError("a dump is being written; one at a time")
    parallel = get_parallel()
    group = scheduler.tp_cpu_group if parallel.tp_size > 1 else None
    file = Path(choice.dump_dir) / file_name(str(body.get("name")), parallel.tp_rank)
    pages = _selected(pool, str(body.get("pages", OCCUPIED)))
    count = int(pages.count_nonzero())
    if not count:
        raise DumpError("L2 holds no page yet")
    writer, failure = None, None
    try:
        writer = SafetensorsWriter(file, dump_tensors(pool.arena.shape, count, pool.key_exponents))
        ranks_here = parallel.tp_size // parallel.nnodes
        require_room(file.parent, ranks_here * writer.total_bytes)
    except Exception as error:  # whatever it is, the other ranks wait to hear of it
        failure = _reason(error)
    if failures := _failures(group, failure):
        if writer is not None:
            writer.discard()
        raise DumpError("; ".join(failures))
    assert writer is not None
    pool.hold(pages)
    ready = _backups_arrived(scheduler.tree_cache, pool.device_k_buffers[0].device)
    pool.dump = LiveDump(pool, writer, pages, count, ready, parallel.tp_rank, group)
    return pool.dump.status()


def _status(scheduler: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    pool = proof.pool_in_force(scheduler.tree_cache)
    if pool.dump is None:
        raise DumpError("this server has been asked for no dump")
    return pool.dump.status()


def _selected(pool: RepresentationHostPool, selection: str) -> torch.Tensor:
    """Which pages are asked for, `[page_num]` bool; never none but for an empty L2.

    Raises:
        DumpError: the selection makes no sense, or the pool has not all of these pages.
    """
    if selection == OCCUPIED:
        return pool.occupied_pages()
    if selection == ALL:
        return torch.ones(pool.page_num, dtype=torch.bool)
    if len(selection) > LONGEST_SELECTION:
        raise DumpError(f"the ranges of pages have {len(selection):,} characters; allowed: up to {LONGEST_SELECTION:,}")
    pages = np.zeros(pool.page_num, dtype=bool)
    for first, last in each_range(selection, pool.page_num):
        pages[first : last + 1] = True
    return torch.from_numpy(pages)


def _metadata(pool: RepresentationHostPool, page_ids: torch.Tensor, tp_rank: int) -> Metadata:
    return Metadata(
        representation=pool.representation.name,
        format_tag=pool.representation.format_tag,
        geometry=pool.representation.geometry,
        page_ids=page_ids,
        pool_pages=pool.page_num,
        tp_rank=tp_rank,
        hiqcache_version=__version__,
        sglang_version=importlib.metadata.version("sglang"),
    )


def _backups_arrived(tree_cache: Any, device: torch.device) -> Any:
    """An event behind every backup whose page has been handed out, those that SGLang has not submitted yet included."""
    tree_cache.flush_pending_backups()
    event = torch.get_device_module(device).Event()
    event.record(tree_cache.cache_controller.l2_transfer_engine.device_to_host_stream)
    return event


def _gather(group: torch.distributed.ProcessGroup | None, mine: Any) -> list[Any]:
    """Every rank's value, in the order of ranks."""
    if group is None:
        return [mine]
    found: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(found, mine, group=group)
    return found


def _failures(group: torch.distributed.ProcessGroup | None, mine: str | None) -> list[str]:
    """What went wrong, and on which rank."""
    return [f"TP rank {rank}: {failure}" for rank, failure in enumerate(_gather(group, mine)) if failure is not None]


def _reason(error: Exception) -> str:
    if isinstance(error, HiqcacheError):
        return str(error)
    logger.exception("hiqcache: the dump failed")
    return f"{type(error).__name__}: {error}"


# -- beside the tokenizer ----------------------------------------------------------------------------------------------


async def _ask(manager: Any, method: str, body: dict[str, Any]) -> dict[str, Any]:
    """The schedulers' answer.

    Raises:
        DumpError: they refuse; the text says why.
    """
    (answer,) = await manager.dumper_control(DumperControlReqInput(method=method, body=body))
    if not answer.success:
        raise DumpError(answer.error)
    return answer.response[0]


def add_route() -> None:
    """Add `ROUTE` to SGLang's HTTP server, if this process is one: POST begins a dump, GET says how far it is.

    Both are for holders of the admin key, and nobody's where the server has none.
    """
    server = sys.modules.get("sglang.srt.entrypoints.http_server")
    if server is None or any(getattr(route, "path", None) == ROUTE for route in server.app.routes):
        return
    from fastapi import Request
    from fastapi.responses import JSONResponse
    from sglang.srt.utils.auth import AuthLevel, auth_level

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def hicache_dump(request: Request) -> JSONResponse:
        # As `/hicache/storage-backend` does: AuthLevel.ADMIN_FORCE would add SGLang's key check to every server.
        if not get_serving().admin_api_key:
            return JSONResponse({"error": NO_ADMIN_KEY}, status_code=400)
        try:
            method, body = STATUS, {}
            if request.method == "POST":
                method, body = START, _body(await request.body())
            return JSONResponse(await _ask(server._global_state.tokenizer_manager, method, body))
        except DumpError as error:
            return JSONResponse({"error": str(error)}, status_code=400)

    server.app.add_api_route(ROUTE, hicache_dump, methods=["GET", "POST"])


def _body(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise DumpError(f"the body is not JSON: {error}") from error
    match body:
        case {"name": str(), **rest} if rest.keys() <= {"pages"} and isinstance(rest.get("pages", ""), str):
            return body
    raise DumpError(
        'the body must be {"name": NAME}, and may have "pages": "occupied", "all", or ranges such as "0-99"'
    )


def dump(
    engine: Any, name: str, pages: str = OCCUPIED, progress: Callable[[int, int], None] = lambda written, pages: None
) -> list[Path]:
    """Dump the L2 of an `sgl.Engine` that was made with `hicache_dump_dir=DIR`.

    Args:
        engine: serving, in this process.
        name: rank N writes DIR/NAME-tpN.safetensors.
        pages: `occupied`, `all`, or ranges of page ids such as `0-99,128`.
        progress: told, every now and then, how many pages are written and how many there are, over all ranks.

    Returns:
        The files, in the order of ranks.

    Raises:
        DumpError: it is refused, or fails; no file is left then.
    """

    def ask(method: str, body: dict[str, Any]) -> dict[str, Any]:
        return engine.loop.run_until_complete(_ask(engine.tokenizer_manager, method, body))

    status = ask(START, {"name": name, "pages": pages})
    while status["state"] == "writing":
        progress(status["written"], status["pages"])
        time.sleep(POLL_SECONDS)
        status = ask(STATUS, {})
    if status["state"] == "failed":
        raise DumpError(status["error"])
    progress(status["written"], status["pages"])
    return [Path(file) for file in status["files"]]
