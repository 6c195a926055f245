"""Random traffic on real servers with an int8 L2, every byte that moves checked, and nothing leaked or lost at the end.

\b
    python tools/soak.py --minutes 30 --out docs/results/soak.json

Serves a small model of random weights, on a GPU or the CPU engine: one server after the other, each with another write
policy, page size, host layout and size of L2, two of them with retraction. 1 to 16 clients send shared prefixes,
repeated and continued prompts in two namespaces (`extra_key`), most of them longer than a prefill chunk. Requests are
aborted, clients disconnect, caches are flushed and L2 is dumped in the middle of it.

\b
Exit status 1, with the reasons, if in any server
* a byte was backed up, or a value restored, other than the representation's plain-PyTorch code has it (a probe in the
  scheduler checks all of them), or nothing was restored at all;
* a request ended in anything but its answer or an abort that was asked for;
* tokens came from the cache that no request of the same namespace had put there;
* a prompt restored from L2 was answered otherwise than the same prompt from L1, asked alone both times;
* the host pool's slots were not all free, each once, after everything was evicted, and again after a flush;
* the scheduler's memory grew: its median in the last quarter of the traffic lies more than 64 MiB above the second's
  (192 MiB in fewer than 2,000 requests, during which kernels are still new);
* a dump failed, the server logged an exception, it stopped, or a process of it was left after its end.

The seed fixes what each client asks for, but not how requests meet in the scheduler.
"""

import contextlib
import json
import os
import pathlib
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import click
import psutil
import requests
from attrs import asdict, define, field, frozen
from counters import metric
from results import command_line, writable
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column
from safetensors import safe_open
from servers import end_servers_on_sigterm, launch, provenance
from serving import ADMIN, ADMIN_KEY, PROBE, HttpServer, environment, events, free_port, http, pip_install, sampling
from tiny_model import VOCABULARY, make

from hiqcache.commands._table import print_table

L1_TOKENS, CHUNK_TOKENS = 1024, 64
CLIENTS = 16
NAMESPACES = ("one", "two")
HEADS = 6
"""Prefixes that many prompts share."""
SHORTEST, LONGEST, NEW_TOKENS = 12, 400, 24
"""Tokens of a prompt, and most of an answer."""
RECENT = 24
"""Prompts remembered by the clients, about as many tokens as L1 and L2 hold."""
COMPARE, COMPARE_AMONG = 3, 12
"""Answers compared at each rest, and prompts tried for it: not all of them are in L2 as a whole."""
ANSWER_SECONDS, IDLE_SECONDS = 300, 120
"""For an answer, and for a server whose clients have all had theirs to be idle."""
TICK = 0.5
ALLOWED_GROWTH_MIB, ALLOWED_WARMING_MIB = 64, 192
WARMING_REQUESTS = 2000
"""PyTorch caches a kernel for each shape it meets. On two cores the scheduler grows by 250 MiB, 90% of it in the first
500 requests."""
END_SECONDS = 15
"""For a server's processes to be gone."""


@frozen
class Variant:
    """One server.

    Attributes:
        ratio: `--hicache-ratio`, tokens of L2 for one of L1.
        retract_interval: every so many steps SGLang retracts requests that are being decoded; None: when L1 is full.
    """

    write_policy: str
    page_size: int
    layout: str
    ratio: float
    retract_interval: int | None = None

    @property
    def name(self) -> str:
        small = "" if self.ratio * L1_TOKENS > LONGEST else ", small L2"
        return self.write_policy + small


VARIANTS = (
    Variant("write_through", 1, "page_first", 2),
    Variant("write_through_selective", 16, "layer_first", 2),
    Variant("write_back", 16, "page_first", 2, retract_interval=7),
    Variant("write_back", 1, "layer_first", 0.25, retract_interval=11),
)


class Broken(Exception):
    """A server that cannot be driven any further; the text says why."""


# -- what was seen -----------------------------------------------------------------------------------------------------


@define
class Found:
    """What was seen of one server.

    Attributes:
        variant: the server.
        seconds: of traffic.
        counts: what happened, and how often.
        problems: kind of a problem -> how often.
        examples: kind of a problem -> the first of its kind.
        memory: MiB that the scheduler has resident, over the time of the traffic.
        audits: what the probe said of the host pool's slots.
        left: processes of the server after its end.
    """

    variant: Variant
    seconds: float = 0
    counts: Counter[str] = field(factory=Counter)
    problems: Counter[str] = field(factory=Counter)
    examples: dict[str, str] = field(factory=dict)
    memory: list[float] = field(factory=list)
    audits: list[dict[str, Any]] = field(factory=list)
    left: list[str] = field(factory=list)
    _lock: threading.Lock = field(factory=threading.Lock)

    def count(self, **more: int) -> None:
        with self._lock:
            self.counts.update(more)

    def problem(self, kind: str, example: str) -> None:
        with self._lock:
            self.problems[kind] += 1
            self.examples.setdefault(kind, example)

    def growth(self) -> tuple[float, float] | None:
        """Median MiB in the second and in the last quarter of the traffic; None if there was hardly any."""
        quarter = len(self.memory) // 4
        if not quarter:
            return None
        return statistics.median(self.memory[quarter : 2 * quarter]), statistics.median(self.memory[-quarter:])

    def allowed_growth(self) -> int:
        """MiB from the one to the other."""
        return ALLOWED_WARMING_MIB if self.counts["sent"] < WARMING_REQUESTS else ALLOWED_GROWTH_MIB

    def result(self) -> dict[str, Any]:
        growth = self.growth()
        return {
            **asdict(self.variant),
            "name": self.variant.name,
            "seconds": round(self.seconds, 1),
            "counts": dict(sorted(self.counts.items())),
            "audits": len(self.audits),
            "host_slots": self.audits[0]["slots"] if self.audits else None,
            "scheduler_mib": None if growth is None else [round(value, 1) for value in growth],
            "allowed_growth_mib": self.allowed_growth(),
            "reasons": judge(self),
        }


def judge(found: Found) -> list[str]:
    """What is wrong with a server; nothing if it is right."""
    counts = found.counts
    reasons = [f"{kind}: {times:,}, the first: {found.examples[kind]}" for kind, times in found.problems.items()]
    if wrong := counts["wrong_bytes"]:
        reasons.append(f"{wrong:,} bytes were backed up wrong")
    if wrong := counts["wrong_values"]:
        reasons.append(f"{wrong:,} values were restored wrong")
    if not counts["restored_tokens"]:
        reasons.append(f"nothing was restored from L2, so nothing was tested ({counts['sent']:,} requests)")
    ended = counts["answered"] + counts["aborted"] + counts["disconnected"]
    if missing := counts["sent"] - ended:
        reasons.append(
            f"{missing:,} of {counts['sent']:,} requests ended in no answer, and in no abort that was asked for"
        )
    if not found.audits:
        reasons.append("the host pool's slots were never counted")
    for audit in found.audits:
        if not audit["slots"] == audit["free"] == audit["distinct"] or audit["used"]:
            reasons.append(
                f"host pool after {audit['after']}: {audit['slots']:,} slots, {audit['free']:,} in the free list, "
                f"{audit['distinct']:,} of them distinct, {audit['used']:,} in use"
            )
            break
    growth = found.growth()
    if growth is not None and growth[1] - growth[0] > found.allowed_growth():
        reasons.append(
            f"the scheduler grew from {growth[0]:,.0f} to {growth[1]:,.0f} MiB (medians of the second and the last "
            f"quarter); allowed: {found.allowed_growth()} MiB more"
        )
    if found.left:
        reasons.append(f"processes left after the server's end: {', '.join(found.left)}")
    return reasons


# -- what the clients know ---------------------------------------------------------------------------------------------


@define
class Known:
    """What was sent since the last flush.

    Attributes:
        prefixes: namespace -> hash of a prefix -> requests with it.
        prompts: the same for whole prompts.
    """

    prefixes: dict[str, Counter[int]] = field(factory=lambda: {name: Counter() for name in NAMESPACES})
    prompts: dict[str, Counter[int]] = field(factory=lambda: {name: Counter() for name in NAMESPACES})
    _lock: threading.Lock = field(factory=threading.Lock)

    def add(self, namespace: str, prompt: Sequence[int]) -> None:
        hashes = list(_hashes(prompt))
        with self._lock:
            self.prefixes[namespace].update(hashes)
            self.prompts[namespace][hashes[-1]] += 1

    def clear(self) -> None:
        with self._lock:
            for counter in (*self.prefixes.values(), *self.prompts.values()):
                counter.clear()

    def explained(self, namespace: str, prompt: Sequence[int], own: int) -> int:
        """The most tokens of a prompt that other requests of a namespace can have put into the cache.

        An answer is cached behind its prompt, so a prompt that starts with another may go on as that one's answer did.

        Args:
            own: how often the asking request itself was added to this namespace.
        """
        shared = answered = 0
        with self._lock:
            for length, prefix in enumerate(_hashes(prompt), 1):
                if self.prefixes[namespace][prefix] <= own:
                    break
                shared = length
                if self.prompts[namespace][prefix] > (own if length == len(prompt) else 0):
                    answered = length + NEW_TOKENS
        return max(shared, min(answered, len(prompt)))


def _hashes(prompt: Sequence[int]) -> Iterator[int]:
    """Of each prefix."""
    value = 0
    for token in prompt:
        value = hash((value, token))
        yield value


class Gate:
    """Lets at most `limit` requests run at a time, or none."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._limit, self._running, self._closed, self._ended = 1, 0, False, False

    def enter(self) -> bool:
        """Wait for a turn; False if there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or (not self._closed and self._running < self._limit))
            if self._ended:
                return False
            self._running += 1
            return True

    def leave(self) -> None:
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def limit(self, requests_at_once: int) -> None:
        with self._changed:
            self._limit = requests_at_once
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Wait until nothing runs, and let nothing in.

        Raises:
            Broken: a request does not end.
        """
        with self._changed:
            self._closed = True
            if not self._changed.wait_for(lambda: not self._running, ANSWER_SECONDS + 10):
                raise Broken(f"{self._running} requests did not end")
        try:
            yield
        finally:
            with self._changed:
                self._closed = False
                self._changed.notify_all()


# -- requests ----------------------------------------------------------------------------------------------------------


@frozen
class Answer:
    """Tokens of an answer, and where its prompt's came from."""

    tokens: tuple[int, ...]
    from_l1: int
    from_l2: int


@define
class Clients:
    """The clients of one server.

    Attributes:
        url: the server's.
        found: what they see.
        rng: for the prompts' heads.
        known: what they sent.
        recent: namespaces and prompts.
        aborts: begin and end of each request to abort everything; the end is infinite until it is answered.
    """

    url: str
    found: Found
    rng: random.Random
    known: Known = field(factory=Known)
    recent: deque[tuple[str, list[int]]] = field(factory=lambda: deque(maxlen=RECENT))
    aborts: list[list[float]] = field(factory=list)
    gate: Gate = field(factory=Gate)
    heads: list[list[int]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.heads = [_fresh(self.rng, self.rng.randint(32, 160)) for _ in range(HEADS)]

    def work(self, rng: random.Random) -> None:
        """One client: ask until the gate says that it is over."""
        while self.gate.enter():
            try:
                self.request(rng)
            finally:
                self.gate.leave()

    def request(self, rng: random.Random) -> None:
        """Ask for something, in some way."""
        namespace, prompt = self.pick(rng)
        new_tokens = rng.randint(1, NEW_TOKENS)
        way = rng.choices(["wait", "stream", "abort", "disconnect"], [6, 2, 1, 1])[0]
        if way == "disconnect":
            self.disconnect(namespace, prompt, new_tokens, rng.randint(0, 3))
            return
        after = rng.uniform(0, 0.4) if way == "abort" else None
        answer = self.ask(namespace, prompt, new_tokens, stream=way == "stream", abort_after=after)
        self.recent.append((namespace, prompt))
        if answer is not None and len(prompt) + 2 * NEW_TOKENS < LONGEST and rng.random() < 0.3:
            self.recent.append((namespace, [*prompt, *answer.tokens, *_fresh(rng, NEW_TOKENS)]))

    def pick(self, rng: random.Random) -> tuple[str, list[int]]:
        """A namespace and a prompt: an old one, an old one of the other namespace, half an old one, or a new one."""
        kind, namespace = rng.random(), rng.choice(NAMESPACES)
        with contextlib.suppress(IndexError):  # nothing is remembered yet
            old, prompt = rng.choice(list(self.recent))
            if kind < 0.4:
                return old, prompt
            if kind < 0.5:
                return next(name for name in NAMESPACES if name != old), prompt
            if kind < 0.6:
                return old, [*prompt[: len(prompt) // 2], *_fresh(rng, SHORTEST)]
        head = rng.choice(self.heads) if kind < 0.9 else []
        return namespace, [*head, *_fresh(rng, rng.randint(SHORTEST, LONGEST - len(head)))]

    def ask(
        self,
        namespace: str,
        prompt: list[int],
        new_tokens: int,
        *,
        stream: bool = False,
        abort_after: float | None = None,
    ) -> Answer | None:
        """The answer to a prompt; None if it was aborted, or if there is none, which is a problem."""
        rid, begin = f"{random.getrandbits(128):032x}", time.monotonic()  # SGLang aborts whatever starts with an id
        asked = threading.Event()

        def abort() -> None:
            asked.set()
            with contextlib.suppress(Broken):  # which the request itself notices too
                self.admin("POST", "/abort_request", {"rid": rid})

        timer = None if abort_after is None else threading.Timer(abort_after, abort)
        self.send(namespace, prompt)
        if timer is not None:
            timer.start()
        try:
            with self.generate(namespace, prompt, new_tokens, rid=rid, stream=stream) as response:
                body = _last_event(response) if stream else response.json()
            meta, tokens = body["meta_info"], tuple(body.get("output_ids") or ())
            reason = meta["finish_reason"]["type"]
        except (requests.RequestException, ValueError, KeyError, TypeError) as error:
            return self.found.problem("a request without an answer", f"{type(error).__name__}: {error}")
        finally:
            if timer is not None:
                timer.cancel()
                timer.join()
        end = time.monotonic()
        if reason == "abort":
            if asked.is_set() or any(since <= end and begin <= until for since, until in self.aborts):
                self.found.count(aborted=1)
            else:
                self.found.problem("an abort that nobody asked for", str(meta["finish_reason"]))
            return None
        if reason != "length" or len(tokens) != new_tokens:
            return self.found.problem(
                "an answer of the wrong length", f"{len(tokens)} tokens for {new_tokens}, {meta['finish_reason']}"
            )
        details = meta.get("cached_tokens_details") or {"device": 0, "host": 0}
        answer = Answer(tokens, details["device"], details["host"])
        self.found.count(answered=1, from_l1=answer.from_l1, from_l2=answer.from_l2)
        self.check_namespace(namespace, prompt, meta["cached_tokens"])
        return answer

    def disconnect(self, namespace: str, prompt: list[int], new_tokens: int, after: int) -> None:
        """Hang up after so many pieces of an answer."""
        self.send(namespace, prompt)
        try:
            with self.generate(namespace, prompt, new_tokens, stream=True) as response:
                for _ in zip(range(after), response.iter_lines(), strict=False):
                    pass
        except requests.RequestException as error:
            self.found.problem("a request without an answer", f"{type(error).__name__}: {error}")
        else:
            self.found.count(disconnected=1)

    def send(self, namespace: str, prompt: list[int]) -> None:
        """Note that a prompt is about to be sent."""
        self.known.add(namespace, prompt)
        self.found.count(sent=1, chunked=int(len(prompt) > CHUNK_TOKENS))

    def generate(self, namespace: str, prompt: list[int], new_tokens: int, **more: Any) -> requests.Response:
        body = {"input_ids": prompt, "sampling_params": sampling(new_tokens), "extra_key": namespace, **more}
        answer = requests.post(
            f"{self.url}/generate", json=body, timeout=ANSWER_SECONDS, stream=more.get("stream", False)
        )
        answer.raise_for_status()
        return answer

    def check_namespace(self, namespace: str, prompt: list[int], cached: int) -> None:
        """Nothing may come from the cache that other requests of this namespace have not put there."""
        explained = self.known.explained(namespace, prompt, own=1)
        elsewhere = max(self.known.explained(name, prompt, own=0) for name in NAMESPACES if name != namespace)
        self.found.count(foreign=int(elsewhere > explained))
        if cached > explained:
            self.found.problem(
                "tokens from the cache that this namespace had not put there",
                f"{cached} of {len(prompt)}; the namespace had sent {explained}, the other one {elsewhere}",
            )

    def compare(self, page_size: int) -> None:
        """Ask alone, and again: an answer from L2 is the answer from L1, whose values the restore left there."""
        compared = 0
        for namespace, prompt in self.rng.sample(list(self.recent), min(COMPARE_AMONG, len(self.recent))):
            if compared == COMPARE:
                break
            whole = (len(prompt) - 1) // page_size * page_size
            first = self.ask(namespace, prompt, NEW_TOKENS)
            if first is None or not first.from_l2 or first.from_l1 + first.from_l2 != whole:
                continue
            second = self.ask(namespace, prompt, NEW_TOKENS)
            if second is not None and second.from_l1 == whole:
                compared += 1
                self.found.count(compared=1)
                if second.tokens != first.tokens:
                    self.found.problem(
                        "another answer from L2 than from L1",
                        f"{first.tokens} and {second.tokens}, {len(prompt)} tokens",
                    )

    def abort_everything(self) -> None:
        span = [time.monotonic(), float("inf")]
        self.aborts.append(span)
        self.admin("POST", "/abort_request", {"abort_all": True})
        span[1] = time.monotonic()
        self.found.count(abort_all=1)

    def admin(
        self, method: str, path: str, body: dict[str, Any] | None = None, allowed: Sequence[int] = (200,)
    ) -> requests.Response:
        """An administrator's request.

        Raises:
            Broken: the server does not answer.
        """
        try:
            answer = requests.request(method, self.url + path, json=body, headers=ADMIN, timeout=ANSWER_SECONDS)
        except requests.RequestException as error:
            raise Broken(f"{path}: {error}") from error
        if answer.status_code not in allowed:
            self.found.problem(f"{path} was refused", f"status {answer.status_code}, {answer.text[:200]!r}")
        return answer


def _fresh(rng: random.Random, tokens: int) -> list[int]:
    return rng.choices(range(10, VOCABULARY), k=tokens)


def _last_event(response: requests.Response) -> dict[str, Any]:
    """Of a stream, which must have an end."""
    lines = [line.removeprefix(b"data: ") for line in response.iter_lines() if line]
    if len(lines) < 2 or lines[-1] != b"[DONE]":
        raise ValueError(f"a stream broke off after {len(lines)} lines")
    return json.loads(lines[-2])


# -- one server --------------------------------------------------------------------------------------------------------


@define
class Drive:
    """Drives one server: how many clients ask, and what happens beside them.

    Attributes:
        server: up and healthy.
        clients: its clients.
        audit: while this file is there, a flush evicts everything first and counts the host pool's slots.
        processes: all that the server was seen to have.
        dumping: whether a dump is being written.
        dumps: how many were begun.
    """

    server: HttpServer
    clients: Clients
    audit: pathlib.Path
    processes: set[psutil.Process]
    dumping: bool = False
    dumps: int = 0

    def run(self, seconds: float, progress: Callable[[float], None]) -> None:
        """Traffic for so long, which ends at rest.

        Raises:
            Broken: the server cannot be driven any further.
        """
        rng, begin = self.clients.rng, time.monotonic()
        acts: dict[Callable[[], None], tuple[float, float]] = {
            self.change_load: (1, 4),
            self.flush_twice: (2, 8),
            self.dump: (2, 6),
            self.clients.abort_everything: (5, 20),
            self.rest: (6, 20),
        }
        due = {act: begin + rng.uniform(0, most) for act, (_, most) in acts.items()}
        while (now := time.monotonic()) < begin + seconds:
            self.look()
            for act, (least, most) in acts.items():
                if now >= due[act]:
                    act()
                    due[act] = now + rng.uniform(least, most)
            progress(now - begin)
            time.sleep(TICK)
        self.clients.found.seconds = time.monotonic() - begin
        self.rest()

    def change_load(self) -> None:
        """1 client as often as any other number together: only then there are moments without a request."""
        self.clients.gate.limit(self.clients.rng.choice([1, self.clients.rng.randint(2, CLIENTS)]))

    def look(self) -> None:
        """See that the server runs, how much memory it takes, and how far a dump is.

        Raises:
            Broken: it does not run.
        """
        leader = psutil.Process(self.server.process_group)
        if leader.status() == psutil.STATUS_ZOMBIE:
            raise Broken("the server stopped")
        children = leader.children(recursive=True)
        self.processes |= {leader, *children}
        resident = 0
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
                resident += child.memory_info().rss if "sglang::scheduler" in child.name() else 0
        self.clients.found.memory.append(resident / 2**20)
        if self.dumping:
            self.look_at_dump()

    def flush_twice(self) -> None:
        """Amid traffic; SGLang refuses if there is no moment without a request."""
        for seconds in (2, 0):
            flushed = self.flush(seconds, allowed=(200, 400))
            self.clients.found.count(**{"flushed" if flushed else "flush_refused": 1})

    def flush(self, seconds: float, allowed: Sequence[int] = (200,)) -> bool:
        """Whether the caches were flushed, which SGLang tries for so long."""
        return self.clients.admin("POST", f"/flush_cache?timeout={seconds}", allowed=allowed).status_code == 200

    def dump(self) -> None:
        """Begin one."""
        if self.dumping:
            return
        answer = self.clients.admin("POST", "/hicache/dump", {"name": f"soak-{self.dumps}"}, allowed=(200, 400))
        self.dumping = answer.status_code == 200
        self.dumps += 1
        if not self.dumping and "L2 holds no page" not in answer.text:
            self.clients.found.problem("a dump was refused", answer.text[:200])

    def look_at_dump(self) -> None:
        status = self.clients.admin("GET", "/hicache/dump").json()
        if status["state"] == "writing":
            return
        self.dumping = False
        if status["state"] == "failed":
            self.clients.found.problem("a dump failed", status["error"])
            return
        for file in status["files"]:
            with safe_open(file, framework="pt") as dump:
                pages = dump.get_slice("k.payload").get_shape()[1]
            os.unlink(file)
            self.clients.found.count(dumps=1, dumped_pages=pages)
            if pages * len(status["files"]) != status["pages"]:
                self.clients.found.problem("a dump without all of its pages", f"{pages} of {status}")

    def rest(self) -> None:
        """With no request running: compare answers, then evict everything, count the slots, and flush.

        Raises:
            Broken: requests do not end, or the server does not flush.
        """
        with self.clients.gate.closed():
            while self.dumping:  # L2 evicts nothing meanwhile
                self.look()
                time.sleep(0.05)
            self.clients.compare(self.clients.found.variant.page_size)
            self.audit.touch()
            flushed = self.flush(IDLE_SECONDS)
            self.audit.unlink()
            if not flushed:
                raise Broken("requests are left in the server although every client has its answer")
            self.clients.known.clear()
            self.clients.found.count(rests=1)


def soak(
    variant: Variant,
    seconds: float,
    seed: int,
    model: pathlib.Path,
    probe: pathlib.Path,
    scratch: pathlib.Path,
    progress: Callable[[Found, float], None],
) -> Found:
    """Serve a variant, drive it for so long, and end it; what was seen."""
    found = Found(variant)
    file, audit, log, dumps = (scratch / name for name in ("probe.jsonl", "audit", "log", "dumps"))
    dumps.mkdir(parents=True)
    words = ["--skip-tokenizer-init", "--context-length", "1024", "--enable-metrics"]
    words += ["--chunked-prefill-size", str(CHUNK_TOKENS), "--max-running-requests", str(CLIENTS)]
    words += ["--enable-hierarchical-cache", "--hicache-representation", "int8", "--hicache-ratio", str(variant.ratio)]
    words += ["--hicache-mem-layout", variant.layout, "--hicache-write-policy", variant.write_policy]
    words += ["--hicache-dump-dir", str(dumps), "--admin-api-key", ADMIN_KEY]
    port = free_port()
    command = launch(model, port, l1_tokens=L1_TOKENS, page_size=variant.page_size, memory=0.2, arguments=words)
    variables = environment(HIQCACHE_PROBE=file, HIQCACHE_PROBE_AUDIT=audit)
    variables["PYTHONPATH"] = f"{variables.get('PYTHONPATH', '')}:{probe}"
    if variant.retract_interval is not None:
        variables |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(variant.retract_interval)}
    processes: set[psutil.Process] = set()
    try:
        with ThreadPoolExecutor(CLIENTS) as pool, http(command, log, port, variables) as server:
            clients = Clients(server.url, found, random.Random(f"{seed} {variant.name}"))
            try:
                work = [pool.submit(clients.work, random.Random(f"{seed} {variant.name} {n}")) for n in range(CLIENTS)]
                Drive(server, clients, audit, processes).run(seconds, lambda passed: progress(found, passed))
            finally:
                clients.gate.end()
                for exception in exceptions(log.read_text()):  # before SGLang ends, which it does not do in silence
                    found.problem("an exception in the server's log", exception)
            for one in work:
                one.result()
            page = clients.admin("GET", "/metrics").text
            found.count(retracted=int(metric(page, "sglang:num_retracted_requests_total")))
    except (Broken, AssertionError) as error:  # an assertion: the server did not come up
        found.problem("the server", f"{error}; its log ends: {log.read_text()[-1500:]}")
    found.left = end_left(processes)
    seen = events(file)
    found.audits = [event for event in seen if event["event"] == "audit"]
    for event in seen:
        if event["event"] == "backup":
            found.count(backed_up_tokens=event["tokens"], wrong_bytes=event["wrong_bytes"])
        elif event["event"] == "restore":
            found.count(restored_tokens=event["tokens"] * (event["layer"] == 0), wrong_values=event["wrong_values"])
    return found


def exceptions(log: str) -> list[str]:
    """What each traceback says at its end, on the first line that is not indented."""
    return [
        next((line for line in traceback.splitlines()[1:] if line and not line[0].isspace()), "it breaks off")
        for traceback in log.split("Traceback (most recent call last)")[1:]
    ]


def end_left(processes: Collection[psutil.Process], seconds: float = END_SECONDS) -> list[str]:
    """Which of these still run after some seconds; those are ended."""
    psutil.wait_procs(list(processes), timeout=seconds)
    left = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                left.append(f"{process.name()} ({process.pid})")
                process.kill()
    return left


# -- the command -------------------------------------------------------------------------------------------------------


class Watch:
    """Says how far it is: a bar on a terminal, elsewhere a line every ten seconds."""

    def __init__(self, seconds: float):
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:3.0f}%"),
            TimeElapsedColumn(),
        )
        self.progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._seconds, self._task = seconds, self.progress.add_task("", total=seconds * len(VARIANTS))
        self._begin = self._said = time.monotonic()

    def __call__(self, found: Found, passed: float) -> None:
        counts, finished = found.counts, VARIANTS.index(found.variant) * self._seconds
        text = (
            f"{found.variant.name}: {counts['sent']:,} requests, {counts['from_l2']:,} tokens from L2, "
            f"{sum(found.problems.values())} problems"
        )
        self.progress.update(self._task, completed=finished + passed)
        if not self.progress.disable or time.monotonic() - self._said >= 10:
            self.say(text)

    def say(self, text: str) -> None:
        self._said = time.monotonic()
        self.progress.update(self._task, description=text)
        if self.progress.disable:
            click.echo(f"[{self._said - self._begin:5.0f} s] {text}")


ROWS = {
    "requests": "sent",
    "longer than a prefill chunk": "chunked",
    "answered": "answered",
    "aborted, as asked": "aborted",
    "hung up": "disconnected",
    "retractions": "retracted",
    "tokens from L1": "from_l1",
    "tokens from L2": "from_l2",
    "tokens backed up": "backed_up_tokens",
    "wrong bytes in backups": "wrong_bytes",
    "tokens restored": "restored_tokens",
    "wrong values in restores": "wrong_values",
    "restored answers compared with L1's": "compared",
    "prompts that only the other namespace knew": "foreign",
    "dumps": "dumps",
    "flushes amid traffic": "flushed",
    "flushes refused": "flush_refused",
    "audits of all slots": "rests",
}
"""Of the closing table: title -> count."""


def show(results: Sequence[Found]) -> None:
    rows = [[title, *(f"{found.counts[name]:,}" for found in results)] for title, name in ROWS.items()]
    memory = [found.growth() for found in results]
    rows.append(["scheduler, MiB", *("" if one is None else f"{one[0]:,.0f} to {one[1]:,.0f}" for one in memory)])
    print_table(["", *(Column(found.variant.name, justify="right") for found in results)], rows)


@click.command(help=__doc__)
@click.option("--minutes", required=True, type=click.FloatRange(0.5), help="Of traffic; starting servers comes on top.")
@click.option("--seed", default=0, show_default=True, help="Of the traffic.")
@click.option("--out", type=click.Path(path_type=pathlib.Path), callback=writable, help="JSON to write.")
def main(minutes: float, seed: int, out: pathlib.Path | None) -> None:
    end_servers_on_sigterm()
    seconds = minutes * 60 / len(VARIANTS)
    results = []
    with tempfile.TemporaryDirectory() as directory:
        scratch = pathlib.Path(directory)
        model, probe = make(scratch / "model"), pip_install(PROBE, scratch / "probe")
        watch = Watch(seconds)
        with watch.progress:
            for number, variant in enumerate(VARIANTS):
                watch.say(f"{variant.name}: starting its server")
                results.append(soak(variant, seconds, seed, model, probe, scratch / str(number), watch))
    show(results)
    if out is not None:
        write(out, seed, minutes, results)
    finish(results)


def write(out: pathlib.Path, seed: int, minutes: float, results: Sequence[Found]) -> None:
    result = {
        "what": "random traffic on real servers with an int8 L2: bytes, answers, slots, memory and processes",
        **provenance(command_line()),
        "seed": seed,
        "minutes": minutes,
        "passed": not any(judge(found) for found in results),
        "servers": [found.result() for found in results],
    }
    out.write_text(json.dumps(result, indent=1) + "\n")


def finish(results: Sequence[Found]) -> NoReturn:
    """Say whether it is right, and exit."""
    reasons = [f"{found.variant.name}: {reason}" for found in results for reason in judge(found)]
    for reason in reasons:
        click.echo(f"FAIL: {reason}", err=True)
    if not reasons:
        sent = sum(found.counts["sent"] for found in results)
        click.echo(f"PASS: {sent:,} requests to {len(results)} servers, nothing wrong, lost or left")
    sys.exit(1 if reasons else 0)


if __name__ == "__main__":
    main()
