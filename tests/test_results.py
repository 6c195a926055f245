"""What the tools' `report` and `plot` say of a file that none of them wrote."""

import importlib
import pathlib

import pytest
from click.testing import CliRunner


@pytest.mark.parametrize("arguments", [["experiment", "report"], ["quality", "report"], ["error_sources", "report"]])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot read "),
        ("[]", "is no result of this tool: it has no '"),
        ('{"versions": {}}', "is no result of this tool: it has no '"),
    ],
)
def test_a_file_that_is_no_result(arguments: list[str], text: str, message: str, tmp_path: pathlib.Path):
    tool, command = arguments
    file = tmp_path / "result.json"
    file.write_text(text)
    answer = CliRunner().invoke(importlib.import_module(tool).main, [command, str(file)])
    assert answer.exit_code == 1
    assert message in answer.output
    assert isinstance(answer.exception, SystemExit), "a sentence, no traceback"


@pytest.mark.parametrize("tool", ["quality", "error_sources"])
def test_a_picture_of_no_known_kind_is_refused(tool: str, tmp_path: pathlib.Path):
    file = tmp_path / "result.json"
    file.write_text("{}")
    arguments = ["plot", str(file), "--out", str(tmp_path / "plot.doc")]
    answer = CliRunner().invoke(importlib.import_module(tool).main, arguments)
    assert answer.exit_code == 2
    assert "'plot.doc' does not end in" in answer.output
