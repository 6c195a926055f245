"""Runs before anything imports sglang."""

import pytest
import torch

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
