"""Runs before anything imports sglang."""

import fcntl
import logging
import os
import pathlib
import sys
from collections.abc import Callable, Iterator

import pytest
import tiny_model
import torch
from serving import PROBE, carry, pip_install
from third_party import Installed, install_third_party, installed_in

from hiqcache import registry
from hiqcache.sglang import cpu

if not torch.cuda.is_available():
    cpu.prepare()

if "PYTEST_XDIST_WORKER" in os.environ:
    # Servers of several tests share the cores; where one's threads must wait for each other, all get slower.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """With `-n auto`, two workers: a server and the test that waits for it keep one core busy. A GPU is not shared."""
    return 0 if torch.cuda.is_available() else 2


def minutes(item: pytest.Item) -> float:
    """How long a test takes, about. One that shares servers or processes with others is as long as they are."""
    slow = item.get_closest_marker("slow")
    if slow:
        return slow.args[0] if slow.args else 1
    return 1 if item.get_closest_marker("xdist_group") else 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # the long ones first, so that all workers end at about the same time
        items.sort(key=minutes, reverse=True)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):  # not `item.keywords`, which holds the names of folders too
            item.add_marker(skip)


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[pathlib.Path], object]) -> pathlib.Path:
    """A folder of this run of pytest, made by the first worker that asks for it."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder, done = root / name, root / f"{name}.done"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            make(folder)
            done.touch()
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder of the tiny model."""
    return tiny_model.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def probe_site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder for PYTHONPATH with the probe; read only."""
    return made_once(tmp_path_factory, "probe-site", lambda folder: pip_install(PROBE, folder))


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The documentation's third-party package; read only."""
    return installed_in(made_once(tmp_path_factory, "third-party-site", install_third_party))


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """SGLang configures the root logger of a process that makes an Engine; later tests are to find it as it was."""
    level, handlers = logging.root.level, list(logging.root.handlers)
    yield
    logging.root.setLevel(level)
    for handler in list(logging.root.handlers):
        if type(handler) is logging.StreamHandler and handler not in handlers:  # pytest's own are of subclasses
            logging.root.removeHandler(handler)


@pytest.fixture
def probing(probe_site: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The file to which processes that are started meanwhile write what they see move."""
    carry(probe_site, monkeypatch)
    file = tmp_path / "probe.jsonl"
    monkeypatch.setenv("HIQCACHE_PROBE", str(file))
    return file


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An empty folder on sys.path; what is registered from it is forgotten afterwards."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    modules = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for module in set(sys.modules) - modules:
        if getattr(sys.modules[module], "__file__", None) == str(tmp_path / f"{module}.py"):
            del sys.modules[module]
