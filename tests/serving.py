"""Driving real SGLang servers from tests: one interface over `sgl.Engine` and over HTTP."""

import contextlib
import json
import os
import pathlib
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import requests
import torch
from attrs import frozen

from hiqcache.sglang import cpu

if TYPE_CHECKING:
    import pytest

PROBE = pathlib.Path(__file__).parent / "probe"
START_SECONDS = 900
"""Until a server is given up: a busy machine with two slow cores takes minutes to start one."""
ANSWER_SECONDS = 300
ADMIN_KEY = "for tests"
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}


@frozen
class Output:
    """One generated answer."""

    tokens: tuple[int, ...]
    prompt_tokens: int
    from_device: int
    from_host: int

    @classmethod
    def of(cls, answer: dict[str, Any]) -> "Output":
        meta = answer["meta_info"]
        details = meta.get("cached_tokens_details") or {"device": 0, "host": 0}
        return cls(tuple(answer["output_ids"]), meta["prompt_tokens"], details["device"], details["host"])


class Server(Protocol):
    """What a scenario needs of a server."""

    def generate(self, prompts: list[list[int]], new_tokens: int = 8) -> list[Output]:
        """Greedy answers to prompts sent at once."""
        ...

    def flush(self) -> None:
        """Empty L1 and L2."""
        ...

    def info(self) -> dict[str, Any]:
        """`/server_info`."""
        ...


def sampling(new_tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}


def device_settings() -> dict[str, Any]:
    return {} if torch.cuda.is_available() else cpu.ENGINE_ARGS


def start_refused(config: pathlib.Path, **more: Any) -> None:
    """Start an Engine that must not come up."""
    import sglang

    settings = {
        "model_path": str(config),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "enable_hierarchical_cache": True,
        "hicache_representation": "int8",
    }
    sglang.Engine(**device_settings() | settings | more)


class EngineServer:
    """`sgl.Engine` in this process."""

    def __init__(self, **settings: Any):
        import sglang

        self.engine = sglang.Engine(**device_settings(), **settings)

    def generate(self, prompts: list[list[int]], new_tokens: int = 8) -> list[Output]:
        answers = self.engine.generate(input_ids=prompts, sampling_params=sampling(new_tokens))
        return [Output.of(answer) for answer in answers]

    def flush(self) -> None:
        deadline = time.monotonic() + ANSWER_SECONDS
        while not self.engine.flush_cache().success:  # the last request may not have left the scheduler yet
            assert time.monotonic() < deadline, "the engine did not get idle"
            time.sleep(0.05)

    def info(self) -> dict[str, Any]:
        return self.engine.get_server_info()


class HttpServer:
    """A server process, reached as its users reach it."""

    def __init__(self, url: str, process_group: int):
        self.url = url
        self.process_group = process_group

    def generate(self, prompts: list[list[int]], new_tokens: int = 8) -> list[Output]:
        answer = requests.post(
            f"{self.url}/generate",
            json={"input_ids": prompts, "sampling_params": sampling(new_tokens)},
            timeout=ANSWER_SECONDS,
        )
        answer.raise_for_status()
        return [Output.of(entry) for entry in answer.json()]

    def flush(self) -> None:
        url, idle_within = f"{self.url}/flush_cache", {"timeout": ANSWER_SECONDS / 2}
        requests.post(url, params=idle_within, headers=ADMIN, timeout=ANSWER_SECONDS).raise_for_status()

    def put(self, path: str, body: dict[str, Any]) -> str:
        """The text of the answer, whatever its status, asked with the admin key."""
        return requests.put(f"{self.url}{path}", json=body, headers=ADMIN, timeout=ANSWER_SECONDS).text

    def info(self) -> dict[str, Any]:
        return requests.get(f"{self.url}/server_info", timeout=ANSWER_SECONDS).json()

    def metrics(self) -> list[Any]:
        """The samples of `/metrics`."""
        from prometheus_client.parser import text_string_to_metric_families  # not where SGLang has yet to be started

        answer = requests.get(f"{self.url}/metrics", timeout=ANSWER_SECONDS)
        answer.raise_for_status()
        return [sample for family in text_string_to_metric_families(answer.text) for sample in family.samples]


@contextlib.contextmanager
def engine(**settings: Any) -> Iterator[EngineServer]:
    server = EngineServer(**settings)
    try:
        yield server
    finally:
        server.engine.shutdown()


@contextlib.contextmanager
def http(
    command: list[str], log: pathlib.Path, port: int, variables: dict[str, str], seconds: float = START_SECONDS
) -> Iterator[HttpServer]:
    """A server process, up and healthy within `seconds`; its output goes to `log`."""
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=variables, start_new_session=True
        )
    try:
        deadline = time.monotonic() + seconds
        while True:
            assert process.poll() is None, f"server stopped with {process.returncode}:\n{log.read_text()[-4000:]}"
            assert time.monotonic() < deadline, f"server not up in {seconds} s:\n{log.read_text()[-4000:]}"
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            time.sleep(0.5)
        yield HttpServer(url, process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 15)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()


def free_port() -> int:
    """A port below those that Linux hands out unasked: a server's own processes take such ones before it listens."""
    for port in random.SystemRandom().sample(range(10_000, 32_000), 100):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port among 100 from 10000 to 31999")


def environment(**variables: object) -> dict[str, str]:
    """This process's environment, fit for a SGLang process on this machine, with `variables` added."""
    base = dict(os.environ)
    if not torch.cuda.is_available():
        base |= cpu.environment()
    return base | {name: str(value) for name, value in variables.items()}


def carry(site: pathlib.Path, monkeypatch: "pytest.MonkeyPatch") -> None:
    """Let processes that are started from now on find the packages in `site`."""
    monkeypatch.syspath_prepend(str(site))  # children that are spawned take this process's path, not PYTHONPATH
    monkeypatch.setenv("PYTHONPATH", f"{environment()['PYTHONPATH']}:{site}")


def pip_install(source: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """Really install a package, entry points and all, into a folder for PYTHONPATH."""
    options = ["-q", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    # Without PYTHONPATH: packages there may extend setuptools, and break the build.
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as scratch:  # setuptools builds in the source's folder
        copy = shutil.copytree(source, pathlib.Path(scratch) / "source")
        subprocess.run([sys.executable, "-m", "pip", "install", *options, str(copy)], check=True, env=clean)
    return target


def events(path: pathlib.Path) -> list[dict[str, Any]]:
    """What the probe wrote."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
