"""Committed results, and what the tools' `report` and `plot` say of a file that none of them wrote."""

import importlib
import json
import pathlib
import shlex

import pytest
from click.testing import CliRunner

REPOSITORY = pathlib.Path(__file__).parents[1]
RESULTS = sorted((REPOSITORY / "docs" / "results").glob("*.json"))


@pytest.mark.parametrize(
    "arguments",
    [["experiment", "report"], ["quality", "report"], ["error_sources", "report"], ["key_biases", "report"]],
)
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


@pytest.mark.parametrize(
    "command",
    [
        ["quality", "run"],
        ["quality", "prompts"],
        ["error_sources", "run"],
        ["conformance", "verify"],
        ["key_biases", "run"],
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_any_work(command: list[str], tmp_path: pathlib.Path):
    (tmp_path / "file").write_text("")
    prompts = ["--prompts", str(tmp_path)] if command == ["error_sources", "run"] else []
    for out in (tmp_path, tmp_path / "file" / "result.json"):
        main = importlib.import_module(command[0]).main
        answer = CliRunner().invoke(main, [command[1], *prompts, "--out", str(out)])
        assert answer.exit_code == 2, answer.output
        assert f"{out}'" in answer.output


@pytest.mark.parametrize(
    ("tool", "file"), [("quality", "quality-smollm2-h200.json"), ("error_sources", "error-sources-smollm2.json")]
)
def test_a_picture_that_cannot_be_written_is_a_sentence(tool: str, file: str, tmp_path: pathlib.Path):
    result = REPOSITORY / "docs" / "results" / file
    out = tmp_path / "missing" / "plot.svg"
    answer = CliRunner().invoke(importlib.import_module(tool).main, ["plot", str(result), "--out", str(out)])
    assert answer.exit_code == 2
    assert f"there is no folder '{out.parent}'" in answer.output


@pytest.mark.parametrize("tool", ["quality", "error_sources"])
def test_a_picture_of_no_known_kind_is_refused(tool: str, tmp_path: pathlib.Path):
    file = tmp_path / "result.json"
    file.write_text("{}")
    arguments = ["plot", str(file), "--out", str(tmp_path / "plot.doc")]
    answer = CliRunner().invoke(importlib.import_module(tool).main, arguments)
    assert answer.exit_code == 2
    assert "'plot.doc' does not end in" in answer.output


@pytest.mark.parametrize(
    ("tool", "command", "option"),
    [("quality", "plot", "--out"), ("error_sources", "plot", "--out"), ("experiment", "report", "--plot")],
)
def test_a_picture_without_matplotlib_is_a_sentence(
    tool: str, command: str, option: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("hiqcache.plotting.find_spec", lambda name: None)
    file = tmp_path / "result.json"
    file.write_text("{}")
    arguments = [command, str(file), option, str(tmp_path / "plot.svg")]
    answer = CliRunner().invoke(importlib.import_module(tool).main, arguments)
    assert answer.exit_code == 1, answer.output
    assert answer.output.strip() == "Error: a plot needs matplotlib: pip install 'hiqcache[plot]'"


def test_the_command_in_a_result_names_no_folder_of_the_machine(monkeypatch):
    results = importlib.import_module("results")
    monkeypatch.setattr("sys.argv", ["/home/somebody/tools/experiment.py", "run", "--out", "/home/somebody/out", "a b"])
    assert results.command_line() == "python tools/experiment.py run --out out 'a b'"


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_every_result_names_the_command_that_makes_it(file: pathlib.Path):
    result = json.loads(file.read_text())
    assert "command" in result, "no command of this repository made it"
    program, first, *_ = shlex.split(result["command"])
    script = first if program == "python" else f"hiqcache/commands/{first}.py"
    assert program in ("python", "hiqcache")
    assert (REPOSITORY / script).is_file(), f"{script} is not in this repository"
    assert script.startswith(("tools/", "hiqcache/"))


def test_every_picture_is_of_a_result():
    pictures = [file for file in (REPOSITORY / "docs" / "results").iterdir() if file.suffix != ".json"]
    assert pictures
    assert not {picture.stem for picture in pictures} - {result.stem for result in RESULTS}


def test_every_result_is_on_a_page():
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    assert not [file.name for file in RESULTS if f"results/{file.name}" not in text]
