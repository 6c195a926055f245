"""Runs before anything imports sglang."""

import sys

import pytest
import torch

from hiqcache import registry
from hiqcache.sglang import cpu

if not torch.cuda.is_available():
    cpu.prepare()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
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
