"""Runs before anything imports sglang."""

import os
import sys

import pytest
import torch

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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # the long ones first, so that all workers end at about the same time
        items.sort(key=lambda item: "slow" not in item.keywords)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


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
