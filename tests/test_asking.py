"""Whoever asks for a representation is heard, on every way by which a server can start, or gets a sentence."""

import json
import pathlib
import re
import subprocess
import sys

import pytest
import tiny_model
from serving import environment

pytest.importorskip("sglang", reason="needs the sglang extra")

SERVES, SERVES_BF16 = ("SchedulersStarted", r"int8, dumps: None"), ("SchedulersStarted", "BF16")
DUMPS = ("SchedulersStarted", "int8, dumps: /tmp")
FLAG, KEYWORD = "--hicache-representation", r"Engine\(hicache_representation=...\)"
ALIAS, ATTRIBUTE = "SGLANG_EXPERIMENTAL_HICACHE_INT8=1", "server_args.hicache_representation"
LOST = (
    "Refused",
    f"{FLAG} asked for host representation 'int8'.*or a copy that lost it. Set its attribute hicache_representation",
)


def unhooked(target: str, error: str = "Refused") -> tuple[str, str]:
    return error, rf"asked for .* 'int8', which.*SGLang [\d.]+ does not call hiqcache's hooks on {target}\."


def unsupported(source: str, error: str = "Refused") -> tuple[str, str]:
    reason = "SGLang 0.5.22 is not supported; supported: 0.5.23. HIQCACHE_ALLOW_UNTESTED_SGLANG=1 tries it"
    return error, f"{source} asked for host representation 'int8', which cannot be served.\n{reason}"


def lacking(source: str, error: str = "Refused") -> tuple[str, str]:
    return error, f"{source} asked for.*do not fit SGLang 0.5.22: ImportError: cannot import name 'MHABufferInfo' from"


EXPECTED = {
    "nothing_asked": SERVES_BF16,
    "alias_and_launch_server": SERVES,
    "alias_and_engine_with_a_record": SERVES,
    "alias_and_engine": SERVES,
    "alias_and_command_line": SERVES,
    "attribute_and_launch_server": DUMPS,
    "attribute_and_engine": SERVES,
    "keyword_beside_a_record": DUMPS,
    "keyword": DUMPS,
    "flag": SERVES,
    "attribute_of_a_package_that_is_not_there": ("Refused", f"{ATTRIBUTE} asked for.*unknown representation 'int9'"),
    "folder_as_attribute_alone": ("Refused", f"--hicache-dump-dir /tmp is for dumps of an encoded L2: add {FLAG}"),
    "keyword_beside_a_record_that_asks_for_another": (
        "Refused",
        f"{ATTRIBUTE} asked for host representation 'bf16'.*{KEYWORD} asks for 'int8': ask for one of the two",
    ),
    "keyword_of_an_engine_of_ones_own": SERVES,
    "alias_and_schedulers_started_in_another_way": (
        "Refused",
        f"{ALIAS} asked for.*Another starts schedulers that hiqcache cannot verify; allowed: Engine",
    ),
    "flag_after_an_early_hook_on_from_cli_args": unhooked(
        "sglang.srt.server_args.ServerArgs.from_cli_args", "SystemExit"
    ),
    "keyword_after_an_early_hook_on_evict_host": unhooked(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.evict_host"
    ),
    "flag_where_another_plugin_makes_the_record": LOST,
    "hook_replaced_later": unhooked("sglang.srt.managers.scheduler.Scheduler.get_init_info"),
    "a_caller_that_kept_the_original": unhooked("sglang.srt.mem_cache.pool_host.mha.get_mha_host_pool_cls"),
    "flag_and_a_copy": LOST,
    "flag_and_a_record_of_its_fields": LOST,
    "flag_and_a_deep_copy": SERVES,
    "flag_and_a_server_that_wants_none": SERVES_BF16,
    "flag_and_an_engine_that_wants_none": SERVES_BF16,
    "flag_and_another_command_line": SERVES_BF16,
    "unsupported: nothing_asked": SERVES_BF16,
    "unsupported: alias_and_launch_server": unsupported(ALIAS),
    "unsupported: alias_and_engine_with_a_record": unsupported(ALIAS),
    "unsupported: alias_and_engine": unsupported(ALIAS),
    "unsupported: alias_and_command_line": unsupported(ALIAS, "SystemExit"),
    "unsupported: attribute_and_launch_server": unsupported(ATTRIBUTE),
    "unsupported: attribute_and_engine": unsupported(ATTRIBUTE),
    "unsupported: keyword_beside_a_record": unsupported(KEYWORD),
    "unsupported: keyword": unsupported(KEYWORD),
    "unsupported: flag": unsupported(FLAG, "SystemExit"),
    "unsupported, tried: nothing_asked": SERVES_BF16,
    "unsupported, tried: alias_and_launch_server": lacking(ALIAS),
    "unsupported, tried: flag": lacking(FLAG, "SystemExit"),
    "untested, complete: nothing_asked": SERVES_BF16,
    "untested, complete: alias_and_launch_server": SERVES,
    "untested, complete: flag": SERVES,
    "unsupported: allowed_too_late": (
        "Refused",
        "do not fit SGLang 0.5.22: HIQCACHE_ALLOW_UNTESTED_SGLANG was not set when SGLang loaded its plugins",
    ),
}
"""Case of fresh_processes.py -> the exception that ends it, and a pattern of its text."""


def test_every_way_to_ask(tmp_path: pathlib.Path):
    """All of them in one test, as SGLang is imported once for all."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_model.CONFIG))
    program, answer = pathlib.Path(__file__).with_name("fresh_processes.py"), tmp_path / "happened.json"
    command = [sys.executable, str(program), str(tmp_path), str(answer)]
    finished = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-4000:]
    happened = json.loads(answer.read_text())
    assert happened.keys() == EXPECTED.keys()

    def as_expected(case: str) -> bool:
        error, pattern = EXPECTED[case]
        found, text = happened[case]
        return found == error and re.search(pattern, text, re.DOTALL) is not None

    assert {case: what for case, what in happened.items() if not as_expected(case)} == {}
