"""The command line, as a person or a script meets it."""

import json
import os
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner, Result
from distributions import HALF, install

from hiqcache import __version__, commands
from hiqcache.__main__ import main

QWEN3_8B = ["--layers", "36", "--heads", "8", "--head-dim", "128"]
GB8 = ["--hicache-size", "8"]


def hiqcache(*args: str) -> Result:
    """The command run in this process; an exception that would be a traceback fails the test."""
    result = CliRunner().invoke(main, args, prog_name="hiqcache")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def rows(result: Result) -> dict[str, list[str]]:
    """The printed table: name -> its other cells."""
    return {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines()}


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Lays down a module of `hiqcache.commands`."""
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(tmp_path)])

    def write(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(f"import click\n{source}")
        monkeypatch.delitem(sys.modules, f"hiqcache.commands.{name}", raising=False)

    return write


# list


def test_list():
    table = rows(hiqcache("list"))
    assert table["bf16"][0] == "bf16-v1"
    assert table["int8"][0] == "int8-head-v2"
    assert len(table["int8"]) > 5, "a summary belongs to it"


def test_list_shows_third_parties_and_what_is_broken_about_them(site):
    install(site, "good-kv", {"good_kv": HALF}, {"half": "good_kv:Half"})
    install(site, "bad-kv", {"bad_kv": "raise RuntimeError('no\\nluck')"}, {"bad": "bad_kv:Bad"})
    result = hiqcache("list")
    assert result.exit_code == 0
    assert rows(result).keys() >= {"bad", "bf16", "half", "int8"}
    assert rows(result)["half"] == ["half-v1", "[the", "upper", "byte]", "of", "each", "BF16"]
    assert (
        "unavailable: representation 'bad': cannot load bad_kv:Bad of bad-kv 1.0: RuntimeError: no luck"
        in result.stdout
    )


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (f"{HALF}\nHalf.summary = None", "summary of odd:Half of odd-kv 1.0 is None, not a string"),
        (f"{HALF}\nHalf.format_tag = 5", "format_tag of odd:Half of odd-kv 1.0 is 5, not a string"),
        ("raise SystemExit(0)", "cannot load odd:Half of odd-kv 1.0: SystemExit: 0"),
    ],
)
def test_list_survives_third_parties(site, source, why):
    install(site, "odd-kv", {"odd": source}, {"half": "odd:Half"})
    result = hiqcache("list")
    assert result.exit_code == 0
    assert rows(result).keys() >= {"bf16", "half", "int8"}
    assert why in result.stdout


# capacity


def test_capacity_of_8_gb():
    table = rows(hiqcache("capacity", *QWEN3_8B, *GB8))
    assert table["bf16"][:4] == ["147,456", "54,254", "8,000,077,824", "1.00x,"]
    assert table["int8"] == ["82,944", "96,451", "8,000,031,744", "1.78x,", "43.8%", "saved"]


def test_capacity_of_a_ratio():
    table = rows(hiqcache("capacity", *QWEN3_8B, "--hicache-ratio", "1", "--device-tokens", "54253"))
    assert table["bf16"][1:3] == ["54,254", "8,000,077,824"]
    assert table["int8"][1:3] == ["54,254", "4,500,043,776"]


def test_capacity_of_a_config_as_json(tmp_path):
    config = {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    args = ["--config", str(tmp_path), "--tp-size", "2", "--page-size", "64", *GB8, "--json"]
    document = json.loads(hiqcache("capacity", *args).stdout)
    assert document["geometry"] == {
        "layers": 36,
        "heads": 4,
        "head_dim": 128,
        "v_head_dim": 128,
        "page_size": 64,
        "dtype": "bfloat16",
        "tp_size": 2,
    }
    # 36 layers x 2 parts x 520 bytes; 8e9 / 37440 = 213,675 tokens, 3,338 whole pages of 64 and one more.
    int8 = document["representations"]["int8"]
    assert int8 == {
        "bytes_per_token": 37_440,
        "bf16_bytes_per_token": 73_728,
        "tokens": 213_696,
        "host_bytes": 8_000_778_240,
        "gain": 73_728 / 37_440,
        "saving": 1 - 37_440 / 73_728,
    }


def test_capacity_shows_a_refusal_in_its_place():
    result = hiqcache("capacity", *QWEN3_8B, *GB8, "--tp-size", "8")
    assert result.exit_code == 0
    table = rows(result)
    assert table["bf16"][0] == "18,432"
    assert table["int8"][:4] == ["-", "-", "-", "refused:"]
    assert "saw 256 (1 local KV heads x 128 at TP=8, page size 1, padded)" in result.stdout
    document = json.loads(hiqcache("capacity", *QWEN3_8B, *GB8, "--tp-size", "8", "--json").stdout)
    assert "fewer than BF16's 256" in document["representations"]["int8"]["refused"][0]


def test_capacity_fails_if_nothing_holds_the_model():
    result = hiqcache("capacity", *QWEN3_8B, "--v-head-dim", "64", *GB8)
    assert result.exit_code == 1
    assert result.stdout.count("refused: width of K and V heads: saw 128 and 64") == 4


def test_capacity_survives_a_third_party_that_does_not(site):
    source = HALF.replace("shape = (", "raise OSError('no such chip'); shape = (")
    install(site, "bad-kv", {"bad_layout": source}, {"half": "bad_layout:Half"})
    result = hiqcache("capacity", *QWEN3_8B, *GB8)
    assert result.exit_code == 0
    assert "refused: OSError: no such chip" in result.stdout
    assert rows(result)["int8"][0] == "82,944"


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        ([*QWEN3_8B, "--tp-size", "3", *GB8], 1, "KV heads divided among ranks: saw 8 among 3"),
        (["--config", "/no/such/config.json", *GB8], 1, "No such file"),
        (QWEN3_8B, 2, "Give either --hicache-size, or --hicache-ratio together with --device-tokens"),
        ([*QWEN3_8B, "--hicache-ratio", "2"], 2, "Give either --hicache-size"),
        ([*QWEN3_8B, *GB8, "--device-tokens", "9"], 2, "Give either --hicache-size"),
        ([*QWEN3_8B, *GB8, "--hicache-ratio", "2"], 2, "Give either --hicache-size"),
        (GB8, 2, "Give either --config, or --layers, --heads and --head-dim"),
        ([*QWEN3_8B[:4], *GB8], 2, "Give either --config"),
        (["--config", ".", *QWEN3_8B, *GB8], 2, "Give either --config"),
        (["--config", ".", "--v-head-dim", "4", *GB8], 2, "given: --config, --v-head-dim."),
        ([*QWEN3_8B, "--hicache-size", "1.5"], 2, "'1.5' is not a valid integer"),  # as in SGLang, where it is an int
        ([*QWEN3_8B, "--hicache-size", "0"], 2, "--hicache-size"),
        ([*QWEN3_8B, "--hicache-size", "1" + "0" * 400], 2, "--hicache-size"),
        ([*QWEN3_8B, "--hicache-ratio", "nan", "--device-tokens", "9"], 2, "NaN is not a ratio"),
        ([*QWEN3_8B, "--hicache-ratio", "inf", "--device-tokens", "9"], 2, "--hicache-ratio"),
        ([*QWEN3_8B, "--hicache-ratio", "0", "--device-tokens", "9"], 2, "--hicache-ratio"),
        ([*QWEN3_8B, *GB8, "--page-size", "0"], 2, "--page-size"),
    ],
)
def test_capacity_says_what_to_give(args, status, words):
    result = hiqcache("capacity", *args)
    assert result.exit_code == status
    assert words in result.stderr
    assert result.stdout == ""


# all commands


def test_version_and_help():
    assert hiqcache("--version").stdout == f"hiqcache, version {__version__}\n"
    helped = hiqcache("--help").stdout
    assert "capacity" in helped
    assert "_table" not in helped
    assert hiqcache("no-such-command").exit_code == 2


@pytest.mark.parametrize("source", ["import no_such_module", "def (", "1 / 0", ""])
def test_a_broken_command_takes_only_itself_away(command, source):
    command("halfdone", source)
    assert hiqcache("list").exit_code == 0
    helped = hiqcache("--help")
    assert helped.exit_code == 0
    assert "halfdone" in helped.stdout
    assert "unavailable" in helped.stdout
    result = hiqcache("halfdone", "--any", "thing")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: command 'halfdone' is unavailable: ")


def test_an_error_for_the_reader_is_one_message(command):
    source = (
        "from hiqcache.geometry import HiqcacheError\n@click.command\ndef command(): raise HiqcacheError('No luck.')"
    )
    command("unlucky", source)
    result = hiqcache("unlucky")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", "Error: No luck.\n")


def test_a_defect_keeps_its_traceback(command):
    command("defective", "@click.command\ndef command(): raise ValueError('oops')")
    with pytest.raises(ValueError, match="oops"):
        hiqcache("defective")


def test_a_module_becomes_a_command(command):
    command("fine", "@click.command\ndef command(): click.echo('fine')")
    assert hiqcache("fine").stdout == "fine\n"


SECONDS = 300
"""For a process that should end at once, on a machine that may be busy."""


def start(*args: str, code: str = "", stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
    """`python -m hiqcache` or, with `code`, Python running that code first and then `hiqcache`."""
    command = (
        ["-c", f"{code}\nfrom hiqcache.__main__ import main; main()", *args] if code else ["-m", "hiqcache", *args]
    )
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.Popen([sys.executable, *command], stdout=stdout, stderr=subprocess.PIPE, text=True, env=env)


def beside(tmp_path, name: str, source: str) -> str:
    """Code that makes a new process find one command more."""
    (tmp_path / f"{name}.py").write_text(f"import click\n{source}")
    return f"import hiqcache.commands; hiqcache.commands.__path__.append({str(tmp_path)!r})"


def test_python_dash_m():
    process = start("--version")
    assert process.communicate(timeout=SECONDS) == (f"hiqcache, version {__version__}\n", "")


def test_nothing_heavy_is_imported_before_it_is_needed():
    code = (
        "import atexit, sys\n"
        "heavy = lambda: print(sorted({'torch', 'sglang', 'rich', 'transformers'} & set(sys.modules)))\n"
        "atexit.register(heavy)"
    )
    out, errors = start("--help", code=code).communicate(timeout=SECONDS)
    assert (out.splitlines()[-1], errors) == ("[]", "")
    out, errors = start("list", code=code).communicate(timeout=SECONDS)
    assert (out.splitlines()[-1], errors) == ("['rich', 'torch']", "")


def test_ctrl_c_is_quiet(tmp_path):
    # A shell that starts the tests in the background has them, and what they start, ignore Ctrl-C.
    source = "import signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    source += "@click.command\ndef command(): click.echo('started'); time.sleep(60)"
    process = start("sleepy", code=beside(tmp_path, "sleepy", source))
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=SECONDS) == ("", "")
    assert process.returncode == 130


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_closed_pipe_is_quiet(tmp_path, lines):
    # One line waits in Python's buffer until the very end; many fail in the middle.
    source = f"@click.command\ndef command(): [print('line', i) for i in range({lines})]"
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = start("chatty", code=beside(tmp_path, "chatty", source), stdout=write_end)
    os.close(write_end)
    assert process.communicate(timeout=SECONDS)[1] == ""
    assert process.returncode == 1
