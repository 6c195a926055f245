"""The representation that the documentation teaches: installed, found by name, and true to every promise."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from third_party import CHECK, MODULE, PAGE, PROJECT, Installed, files

MOST_LINES = 60


def run(installed: Installed, *arguments: str, cwd: pathlib.Path | None = None) -> str:
    """Standard output of a fresh Python that has the package on its path."""
    path = os.pathsep.join(filter(None, [str(installed.site), os.environ.get("PYTHONPATH")]))
    finished = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def test_the_page_has_each_file_once_and_the_module_is_short():
    assert sorted(files()) == sorted([MODULE, PROJECT, CHECK])
    for name in files():
        assert PAGE.read_text(encoding="utf-8").count(f"\n`{name}`\n\n```") == 1
    assert len(files()[MODULE].splitlines()) <= MOST_LINES


def test_it_is_listed(installed: Installed):
    (row,) = (line for line in run(installed, "-m", "hiqcache", "list").splitlines() if line.startswith(installed.name))
    assert row.split(None, 2)[1:] == [
        "fp8-pow2-v1",
        "FP8 E4M3, one power-of-two scale per head and token, records padded to 16 bytes",
    ]


def test_its_sizes_are_those_of_the_page(installed: Installed):
    script = """
import json, sys
from hiqcache import registry
from hiqcache.geometry import KVGeometry, Part, UnsupportedGeometry
def record(heads, dim):
    geometry = KVGeometry(layers=1, heads=heads, head_dim=dim, v_head_dim=dim, page_size=1)
    try:
        layout = registry.get(sys.argv[1])(geometry).layouts[Part.K]
    except UnsupportedGeometry as error:
        return str(error)
    padding = layout["padding"].shape[-1] if "padding" in layout else 0
    return [heads * 2, heads * dim, padding, layout.block_bytes]
module = sys.modules[registry.get(sys.argv[1]).__module__].__file__
print(json.dumps([module, *(record(*shape) for shape in [(8, 128), (3, 64), (1, 128), (1, 8)])]))
"""
    module, *records = json.loads(run(installed, "-c", script, installed.name))
    assert pathlib.Path(module) == installed.site / MODULE
    assert records == [
        [16, 1024, 0, 1040],
        [6, 192, 10, 208],
        [2, 128, 14, 144],
        "host representation 'fp8-pow2' refused (1 rule broken):\n"
        "  - bytes of a record: saw 16; allowed: fewer than BF16's 16; changed by --tp-size (a smaller one)",
    ]
    page = PAGE.read_text(encoding="utf-8")
    for shape, sizes in zip(["8 x 128", "3 x 64", "1 x 128"], records[:3], strict=True):
        row = next(line for line in page.splitlines() if line.startswith("|") and f"{shape} |" in line)
        bf16 = 2 * sizes[1]
        cells = [cell.strip() for cell in row.strip("|").split("|")][1:]
        assert cells == [*(f"{size:,}" for size in [*sizes, bf16]), f"{1 - sizes[3] / bf16:.2%}"]


def test_it_keeps_every_promise(installed: Installed, tmp_path: pathlib.Path):
    """By the check that the page offers to its readers."""
    (tmp_path / CHECK).write_text(files()[CHECK], encoding="utf-8")
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), CHECK]
    output = run(installed, "-m", "pytest", *options, cwd=tmp_path)
    assert " passed" in output


BREAKS = [
    ('layout.view(out, "padding").zero_()', "pass", "test_nothing_old_is_left"),
    ("LARGEST = 240.0", "LARGEST = 256.0", "test_every_largest_value_with_every_smaller_one"),
    ("masked_fill_(scales.isnan(), torch.nan)", "nan_to_num_()", "test_a_broken_head_stays_visibly_broken"),
    (">= bf16", "> bf16", "test_a_geometry_without_a_gain_is_refused"),
]
"""Part of the module, what breaks a promise in its place, and the test that should notice."""


def test_the_check_notices_broken_promises(installed: Installed, tmp_path: pathlib.Path):
    code = files()
    for was, becomes, _ in BREAKS:
        assert code[MODULE].count(was) == 1
        code[MODULE] = code[MODULE].replace(was, becomes)
    # The folder of a test file comes first on pytest's path, so this module hides the installed one.
    for name in (MODULE, CHECK):
        (tmp_path / name).write_text(code[name], encoding="utf-8")
    with pytest.raises(AssertionError) as failure:
        run(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), CHECK, cwd=tmp_path)
    missed = [test for *_, test in BREAKS if f"FAILED {CHECK}::{test}" not in str(failure.value)]
    assert not missed
