"""Gemma 3 has sliding-window layers, and SGLang keeps their KV with the others': it is served."""

import pathlib

import pytest
import tiny_gemma3
import tiny_model
from scenario import Case, check, check_bytes
from serving import engine

from hiqcache.model_config import geometry_from_config

pytest.importorskip("sglang", reason="needs the sglang extra")

from hiqcache.backends.int8 import Int8


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("name", ["int8", "bf16"])
def test_gemma3_is_served(tmp_path: pathlib.Path, probing: pathlib.Path, name: str):
    """Every byte that moves is checked, and its layers are those that `hiqcache capacity` counts."""
    model = tiny_gemma3.make(tmp_path / "model")
    case = Case(name, 16, "page_first", "write_through")
    assert case.prompt_tokens > 2 * tiny_gemma3.WINDOW
    with engine(**case.settings(model)) as server:
        (report,) = server.info()["hiqcache"]
        check(server, case)
    check_bytes(probing, case)
    geometry = geometry_from_config(model, tp_size=1, page_size=16)
    assert geometry.layers == tiny_model.LAYERS
    if name == "int8":
        assert report["bytes_per_token"] == Int8(geometry).bytes_per_token()
