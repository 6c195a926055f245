"""`hiqcache plan`: by hand on small traces, and hit for hit against SGLang itself.

In the traces by hand a letter is a token: `ask(cache, "aaab")` is a prompt of four tokens.
"""

import contextlib
import gzip
import io
import json
import os
import pathlib
import random
import re
import sys
import tracemalloc
from collections.abc import Iterator
from types import ModuleType

import pytest
from click.testing import CliRunner, Result

from hiqcache.__main__ import main
from hiqcache.capacity import tokens_of_ratio
from hiqcache.plan.cache import Hit, Limits, PrefixCache, WritePolicy
from hiqcache.plan.replay import make_plan, replay
from hiqcache.plan.trace import MalformedTrace, Request, read_trace

BACK = WritePolicy.WRITE_BACK
SELECTIVE = WritePolicy.WRITE_THROUGH_SELECTIVE

A, B, C = ("a" * 12 + "!", "b" * 12 + "!", "c" * 12 + "!")
"""Prompts that leave 12 tokens each, three pages of four, in the cache."""


def request(page_size: int = 4, **record: object) -> Request:
    [request] = read_trace([json.dumps(record)], page_size)
    return request


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def cache(l1: int, l2: int = 0, page: int = 4, **limits) -> PrefixCache:
    return PrefixCache(Limits(l1_tokens=l1, l2_tokens=l2, page_size=page, **limits))


def ask(cache: PrefixCache, prompt: str, answer: str = "?", page: int = 4) -> tuple[int, int] | None:
    """Tokens from L1 and from L2."""
    hit = cache.serve(request(page, token_ids=letters(prompt), output_ids=letters(answer)))
    return hit and (hit.l1_tokens, hit.l2_tokens)


# -- the cache, by hand ------------------------------------------------------------------------------------------------


def test_matches_whole_pages_and_never_the_last_token():
    server = cache(l1=64)
    assert ask(server, "aaaabbbbc") == (0, 0)
    assert ask(server, "aaaabbbbc") == (8, 0)
    assert ask(server, "aaaabbbb") == (4, 0)  # the second page holds the last token
    assert ask(server, "aaaabbbbcd") == (8, 0)  # nine tokens in common
    assert ask(server, "aaaabbbd") == (4, 0)


def test_evicts_the_least_recently_used_and_restores_it_from_l2():
    server = cache(l1=32, l2=64)
    assert [ask(server, prompt) for prompt in (A, B)] == [(0, 0), (0, 0)]
    # 24 of 32 tokens are taken, and C asks for 13 and a page: A goes.
    assert ask(server, C) == (0, 0)
    assert ask(server, A) == (0, 12)  # makes room by evicting B
    assert ask(server, B) == (0, 12)  # by evicting C
    assert ask(server, A) == (12, 0)


def test_use_protects():
    server = cache(l1=32, l2=64)
    assert [ask(server, prompt) for prompt in (A, B, A, C)] == [(0, 0), (0, 0), (12, 0), (0, 0)]
    assert ask(server, A) == (12, 0)
    assert ask(server, B) == (0, 12)


def test_without_l2_what_is_evicted_is_gone():
    server = cache(l1=32)
    assert [ask(server, prompt) for prompt in (A, B, C, A)] == [(0, 0)] * 4


def test_leaves_go_before_what_they_build_on():
    server = cache(l1=32, l2=64)
    shared = "s" * 8
    ask(server, f"{shared}aaaa!")
    ask(server, f"{shared}bbbb!")
    ask(server, C)  # 16 tokens are taken; evicting "aaaa" is enough
    assert ask(server, f"{shared}bbbb!") == (12, 0)
    assert ask(server, f"{shared}aaaa!") == (8, 0)  # its 4 tokens in L2 are too few to restore


@pytest.mark.parametrize(("prompt", "restored"), [("a" * 10, 0), ("a" * 10 + "b", 10)])
def test_restores_no_fewer_than_ten_tokens(prompt: str, restored: int):
    server = cache(l1=24, l2=64, page=1)
    for earlier in ("a" * 10, "b" * 10, "c" * 10):
        ask(server, earlier, page=1)
    assert ask(server, prompt, page=1) == (0, restored)


def test_l2_gives_up_its_least_recently_used():
    server = cache(l1=32, l2=24)
    for prompt in (A, B, C):  # C leaves L2 no room but A's, which is in L2 alone
        ask(server, prompt)
    assert ask(server, A) == (0, 0)


def test_write_through_keeps_no_more_than_l1_in_an_l2_of_its_size():
    server = cache(l1=32, l2=24)
    assert [ask(server, prompt) for prompt in (A, B, C) * 3] == [(0, 0)] * 9


def test_write_back_fills_l2_with_what_left_l1():
    server = cache(l1=32, l2=24, policy=BACK)
    assert [ask(server, prompt) for prompt in (A, B, C)] == [(0, 0)] * 3
    assert [ask(server, prompt) for prompt in (A, B, C)] == [(0, 12)] * 3


def test_write_back_drops_what_l2_cannot_take():
    server = cache(l1=32, l2=8, policy=BACK)
    assert [ask(server, prompt) for prompt in (A, B, C, A)] == [(0, 0)] * 4


def test_selective_saves_what_was_inserted_twice():
    once, twice = cache(l1=32, l2=64, policy=SELECTIVE), cache(l1=32, l2=64, policy=SELECTIVE)
    assert [ask(once, prompt) for prompt in (A, B, C, A)][-1] == (0, 0)
    assert [ask(twice, prompt) for prompt in (A, A, B, C, A)][-1] == (0, 12)


def test_a_known_answer_is_cached_but_for_its_last_token():
    server = cache(l1=64)
    ask(server, A, answer="12345")
    assert ask(server, f"{A}12345 and more") == (16, 0)  # 13 + 4 tokens of KV, four whole pages


def test_an_answer_goes_before_its_prompt():
    server = cache(l1=32, l2=64)
    ask(server, A, answer="12345")  # leaves 12 tokens and a page of answer
    ask(server, "b" * 8)
    ask(server, "c" * 8)  # 24 tokens are taken, and 12 asked for: evicting the answer is enough
    assert ask(server, f"{A}12345 and") == (12, 0)


def test_a_request_must_fit_in_l1_with_a_page_to_spare():
    server = cache(l1=32)
    assert ask(server, "a" * 26, answer="??") is None
    assert ask(server, "a" * 25, answer="??") == (0, 0)


def test_prefill_chunks_are_evicted_one_by_one():
    whole, chunks = cache(l1=48, l2=0), cache(l1=48, l2=0, chunk_tokens=16)
    for server in (whole, chunks):
        ask(server, "a" * 32 + "!")
        ask(server, C)  # needs one token more than the 16 that are free
    assert ask(whole, "a" * 32 + "!") == (0, 0)
    assert ask(chunks, "a" * 32 + "!") == (16, 0)


# -- traces ------------------------------------------------------------------------------------------------------------


def blocks(*ids: int | str, length: int, page: int = 64, **more: object) -> Request:
    return request(page, hash_ids=ids, input_length=length, output_length=1, **more)


@pytest.mark.parametrize(
    ("second", "shared"),
    [
        (blocks(1, 2, 3, length=1100), 1088),  # the short block's 76 tokens too, as far as they fill pages
        (blocks(1, 2, 4, length=1100), 1024),
        (blocks(1, 2, 3, length=1101), 1024),  # the same id for another length is another block
        (blocks(1, 2, 3, length=1536), 1024),
        (blocks(1, 2, 3, 4, length=2000), 1024),
        (blocks(1, length=512), 448),
        (blocks(2, 1, length=1024), 0),
        (blocks("1", "2", length=1024), 0),
    ],
)
def test_blocks_share_as_far_as_their_leading_ids(second: Request, shared: int):
    server = cache(l1=100_000, page=64)
    server.serve(blocks(1, 2, 3, length=1100))
    assert server.serve(second) == Hit(shared, 0)


@pytest.mark.parametrize(("page", "shared"), [(1, 1024), (48, 1008), (1000, 1000), (1024, 1024), (1025, 0)])
def test_pages_need_not_divide_blocks(page: int, shared: int):
    server = cache(l1=100_000, page=page)
    server.serve(blocks(1, 2, 3, length=1500, page=page))
    assert server.serve(blocks(1, 2, 4, length=1500, page=page)) == Hit(shared, 0)


def test_prefix_hashes_with_blocks_of_their_own_size():
    server = cache(l1=1000)
    server.serve(blocks("ab", "cd", length=31, block_tokens=16))
    assert server.serve(blocks("ab", "ef", length=32, block_tokens=16)) == Hit(16, 0)


def test_an_unknown_answer_takes_room_and_is_never_found():
    server = cache(l1=48)
    long_answer = {"token_ids": letters(A), "output_length": 20}
    assert server.serve(request(**long_answer)) == Hit(0, 0)
    assert server.serve(request(**long_answer)) == Hit(12, 0)
    ask(server, C)
    ask(server, B)
    assert server.serve(request(**long_answer)) == Hit(12, 0)


GOOD = '{"token_ids": [1], "output_length": 1}'


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not JSON: Expecting property name"),
        ("[1, 2]", "a request is a JSON object, not [1, 2]"),
        ("{}", "either hash_ids or token_ids"),
        ('{"token_ids": [1], "hash_ids": [1]}', "either hash_ids or token_ids"),
        ('{"token_ids": [], "output_length": 1}', "token_ids is empty"),
        ('{"token_ids": "abc", "output_length": 1}', 'a list of whole numbers, not "abc"'),
        ('{"token_ids": [1.5], "output_length": 1}', "a list of whole numbers, not [1.5]"),
        ('{"token_ids": [true], "output_length": 1}', "a list of whole numbers, not [true]"),
        ('{"token_ids": [99999999999999999999], "output_length": 1}', "does not fit in 64 bits"),
        ('{"token_ids": [1]}', "output_length is a whole number of at least 0, not nothing"),
        ('{"token_ids": [1], "output_ids": null}', "output_ids is a list of whole numbers, not null"),
        ('{"token_ids": [1], "output_length": -1}', "at least 0, not -1"),
        ('{"hash_ids": [1], "output_length": 1}', "input_length is a whole number of at least 1, not nothing"),
        ('{"hash_ids": [1], "input_length": "9", "output_length": 1}', 'at least 1, not "9"'),
        (
            '{"hash_ids": [1], "input_length": 513, "output_length": 1}',
            "takes 2 hash_ids, of 512 tokens each, but there are 1",
        ),
        (
            '{"hash_ids": [], "input_length": 1, "output_length": 1}',
            "takes 1 hash_ids, of 512 tokens each, but there are 0",
        ),
        ('{"hash_ids": [[1]], "input_length": 1, "output_length": 1}', "numbers or strings, not [[1]]"),
        ('{"hash_ids": 7, "input_length": 1, "output_length": 1}', "numbers or strings, not 7"),
        ('{"hash_ids": [1], "input_length": 1, "output_length": 1, "block_tokens": 0}', "block_tokens is a whole"),
        (f'{{"token_ids": [{"1" * 5000}]}}', "not JSON: Exceeds the limit"),
        ("[" * 100_000, "not JSON: "),
        (b"\xff\xfe\xfd{}", "not UTF-8 text"),
        (b"\x28\xb5\x2f\xfd\x04\x00", "of compressed files gzip alone is read"),
        (
            '{"conversations": [{"from": "human", "value": "Hi"}]}',
            "a chat log in text (it has conversations); a trace has",
        ),
        ('{"model": "x", "messages": []}', "(it has messages); a trace has token_ids or hash_ids: docs/planning.md"),
        ("\0", "not JSON: "),
    ],
)
def test_a_bad_line_is_one_sentence_with_its_number(line: str | bytes, why: str):
    with pytest.raises(MalformedTrace) as caught:
        list(read_trace([GOOD, "\n", line, GOOD], page_size=1))
    message = str(caught.value)
    assert message.startswith("trace line 3: ")
    assert why in message
    assert "\n" not in message
    assert len(message) < 200


def test_an_empty_trace_is_refused():
    with pytest.raises(MalformedTrace, match="holds no request"):
        list(read_trace([" \n", ""], page_size=1))


@pytest.mark.parametrize("text", ['[{"id": "a", "conversations": []}]', '[\n {\n  "id": "a"\n }\n]'])
def test_a_json_array_is_told_the_format(text: str):
    """ShareGPT's files are one array, on one line or indented."""
    with pytest.raises(MalformedTrace) as caught:
        list(read_trace(["\n", *text.splitlines(keepends=True)], page_size=1))
    message = str(caught.value)
    assert message.startswith("trace line 2: a JSON array begins here; a trace has a JSON object on each line")
    assert "If these are chat logs (ShareGPT): docs/planning.md#chat-logs" in message


def test_chat_logs_are_converted_as_the_page_says(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """The page's own program, with a tokenizer that makes a token of each letter."""

    class Letters:
        @staticmethod
        def from_pretrained(model: str) -> type["Letters"]:
            assert model == "model"
            return Letters

        @staticmethod
        def apply_chat_template(messages: list[dict[str, str]], **options: bool) -> list[int]:
            assert options == {"add_generation_prompt": True, "return_dict": False}
            return letters("".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>")

        @staticmethod
        def encode(text: str, add_special_tokens: bool) -> list[int]:
            assert not add_special_tokens
            return letters(text)

    turns = [("system", "Be brief."), ("human", "Hi"), ("gpt", "Hello"), ("human", "More"), ("gpt", ""), ("gpt", "No")]
    chats = [{"id": "a", "conversations": [{"from": who, "value": text} for who, text in turns]}]
    (tmp_path / "chats.json").write_text(json.dumps(chats))
    text = (pathlib.Path(__file__).parents[1] / "docs/planning.md").read_text()
    (program,) = re.findall(r"^### Chat logs$.*?^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    transformers = ModuleType("transformers")
    transformers.AutoTokenizer = Letters  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    monkeypatch.setattr("sys.argv", ["chats.py", "model", str(tmp_path / "chats.json")])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(program, {})
    first, second = read_trace(printed.getvalue().splitlines(), page_size=1)
    opening = "<system>Be brief.<user>Hi<assistant>"
    assert (first.prompt_tokens, first.output_tokens) == (len(opening), len("Hello"))
    assert (second.prompt_tokens, second.output_tokens) == (len(f"{opening}Hello<user>More<assistant><assistant>"), 2)
    server = cache(l1=1000, page=1)
    server.serve(first)
    assert server.serve(second) == Hit(len(f"{opening}Hell"), 0), "an answer's last token has no KV"


# -- replays -----------------------------------------------------------------------------------------------------------


def test_budgets_become_tokens_by_sglangs_rule():
    # 36 layers of 8 heads x 128: bytes per token as design and `hiqcache capacity` have them.
    sizes = {"bf16": 147_456, "int8": 82_944}
    for page_size, expected in [(1, (54_254, 96_451)), (64, (54_272, 96_512))]:
        limits = Limits(l1_tokens=1000, l2_tokens=0, page_size=page_size)
        plan = make_plan(lambda: [blocks(1, length=9)], limits, sizes, [8])
        assert tuple(plan.estimates[name][0].pool_tokens for name in sizes) == expected


def test_totals_leave_out_what_does_not_fit():
    limits = Limits(l1_tokens=1000, l2_tokens=0, page_size=1)
    totals = replay([blocks(1, length=400), blocks(1, 2, length=1024), blocks(1, length=400)], limits)
    assert (totals.requests, totals.refused, totals.prompt_tokens) == (2, 1, 800)
    assert (totals.saved_tokens, totals.hit_rate) == (399, 399 / 800)


def test_memory_is_bounded_by_the_simulated_capacity():
    def peak(requests: int) -> int:
        stream = (request(page_size=16, token_ids=[each] * 200, output_length=5) for each in range(requests))
        tracemalloc.start()
        replay(stream, Limits(l1_tokens=2_000, l2_tokens=10_000, page_size=16))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(1500) < 1.5 * peak(250)


# -- the command -------------------------------------------------------------------------------------------------------

QWEN3_8B = ("--layers", "36", "--heads", "8", "--head-dim", "128")
ONE_HEAD = ("--layers", "36", "--heads", "1", "--head-dim", "128")


@pytest.fixture
def trace(tmp_path: pathlib.Path) -> pathlib.Path:
    """Twice the same 40 prompts of 2,000 tokens: too many for L1, and for 8 GB in BF16, but not in INT8."""
    prompts = [
        {"hash_ids": [4 * each + block for block in range(4)], "input_length": 2000, "output_length": 1}
        for each in range(40)
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts * 2))
    return file


def plan(trace: pathlib.Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", str(trace), "--device-tokens", "10000", *arguments])


def test_the_table(trace: pathlib.Path):
    result = plan(trace, *QWEN3_8B, "--hicache-size", "8", "--hicache-size", "16", "--page-size", "64")
    assert result.exit_code == 0, result.output
    title, _, *rows = result.stdout.splitlines()
    assert title == "80 requests, 160,000 prompt tokens; both tiers evict by lru"
    assert [row.split() for row in rows] == [
        ["-", "no", "L2", "-", "0.0%", "0", "0"],
        # 27 prompts' 1,984 tokens fit in 54,272; going round 40 of them, LRU keeps none until it is needed.
        ["8", "bf16", "54,272", "0.0%", "0", "0"],
        ["8", "int4", "190,272", "49.6%", "79,360", "79,360"],
        ["8", "int8", "106,880", "49.6%", "79,360", "79,360"],
        ["8", "k6v4", "166,336", "49.6%", "79,360", "79,360"],
        ["16", "bf16", "108,544", "49.6%", "79,360", "79,360"],
        ["16", "int4", "380,544", "49.6%", "79,360", "79,360"],
        ["16", "int8", "213,696", "49.6%", "79,360", "79,360"],
        ["16", "k6v4", "332,672", "49.6%", "79,360", "79,360"],
    ]


def test_json_says_what_was_run(trace: pathlib.Path):
    result = plan(trace, *QWEN3_8B, "--hicache-size", "8", "--hicache-write-policy", "write_back", "--json")
    document = json.loads(result.stdout)
    assert document["trace"]["name"] == "trace.jsonl"
    assert (document["l1_tokens"], document["write_policy"]) == (10_000, "write_back")
    assert document["eviction_policy"] == "lru"
    int8 = document["representations"]["int8"]
    assert int8["bytes_per_token"] == 82_944
    assert [budget["pool_tokens"] for budget in int8["budgets"]] == [96_451]
    assert document["without_l2"]["requests"] == 80


def test_a_refused_representation_says_why_and_the_others_go_on(trace: pathlib.Path):
    result = plan(trace, *ONE_HEAD, "--hicache-size", "8")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line.split()[1] for line in lines if line.split()[:1] == ["8"]] == ["bf16", "int4", "k6v4"]
    assert lines[-1].startswith("int8 is left out: host representation 'int8' refused (1 rule broken)")


@pytest.mark.parametrize(("name", "start"), [("curve.png", b"\x89PNG"), ("curve.svg", b"<?xml")])
def test_the_plot(trace: pathlib.Path, tmp_path: pathlib.Path, name: str, start: bytes):
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    files = [tmp_path / name, tmp_path / f"again-{name}"]
    for file in files:
        result = plan(trace, *QWEN3_8B, "--hicache-size", "8", "--hicache-size", "16", "--plot", str(file))
        assert result.exit_code == 0, result.output
    assert files[0].read_bytes().startswith(start)
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*QWEN3_8B, "--plot", "curve.pdf"), "'curve.pdf' does not end in .png or .svg"),
        ((*QWEN3_8B, "--plot", "no/such/folder/curve.png"), "there is no folder 'no/such/folder'"),
        ((*QWEN3_8B, "--device-tokens", "1999"), "L1 of 1,999 tokens is too small for every request of trace.jsonl"),
        (("--layers", "36"), "Give either --config, or --layers, --heads and --head-dim; given: --layers."),
        ((*QWEN3_8B, "--config", "x"), "given: --config, --layers, --heads, --head-dim."),
        (("--config", "no-such-config.json"), "no-such-config.json: No such file or directory"),
    ],
)
def test_mistakes_are_one_message(trace: pathlib.Path, arguments: tuple[str, ...], message: str):
    result = plan(trace, "--hicache-size", "8", *arguments)
    assert result.exit_code in (1, 2)
    assert isinstance(result.exception, SystemExit)
    assert message in result.stderr


def test_files_that_will_not_do(trace: pathlib.Path, tmp_path: pathlib.Path):
    pipe, picture = tmp_path / "pipe", trace.rename(tmp_path / "trace.svg")
    os.mkfifo(pipe)
    result = plan(pipe, *QWEN3_8B)
    assert result.exit_code == 2
    assert "is not a regular file. It is read for every budget: give it as -." in result.stderr
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    before = picture.read_bytes()
    result = plan(picture, *QWEN3_8B, "--hicache-size", "8", "--plot", str(picture))
    assert result.exit_code == 2
    assert "is another file of this command" in result.stderr
    assert picture.read_bytes() == before


def test_a_bad_trace_is_one_message(trace: pathlib.Path):
    with trace.open("a") as file:
        file.write("oops\n")
    result = plan(trace, *QWEN3_8B)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "Error: trace line 81: not JSON: Expecting value at column 1\n"


@pytest.mark.parametrize("name", ["trace.jsonl.gz", "trace"])
def test_gzip_is_read_whatever_its_name(name: str, trace: pathlib.Path, tmp_path: pathlib.Path):
    arguments = (*QWEN3_8B, "--hicache-size", "8")
    plain = plan(trace, *arguments)
    compressed = tmp_path / name
    compressed.write_bytes(gzip.compress(trace.read_bytes()))
    assert plan(compressed, *arguments).stdout == plain.stdout
    assert plain.exit_code == 0


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda data: data[:-20], "end-of-stream marker"),
        (lambda data: data[:3], "end-of-stream marker"),
        (lambda data: data[:-8] + bytes(8), "CRC check failed"),
        (lambda data: data[:10] + b"\xff" * 20, "invalid block type"),
    ],
)
def test_a_damaged_gzip_file_is_one_message(damage, why: str, trace: pathlib.Path):
    trace.write_bytes(damage(gzip.compress(trace.read_bytes())))
    result = plan(trace, *QWEN3_8B)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: the trace is a damaged gzip file: ")
    assert why in result.stderr
    assert isinstance(result.exception, SystemExit)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_standard_input(pack, trace: pathlib.Path):
    arguments = ["--device-tokens", "10000", *QWEN3_8B, "--hicache-size", "8", "--json"]
    expected = json.loads(CliRunner().invoke(main, ["plan", str(trace), *arguments]).stdout)
    result = CliRunner().invoke(main, ["plan", "-", *arguments], input=pack(trace.read_bytes()))
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["trace"]["name"] == "standard input"
    assert document["representations"] == expected["representations"]
    if pack is bytes:
        assert document["trace"]["sha256"] == expected["trace"]["sha256"]


def test_a_bad_standard_input_is_one_message():
    result = CliRunner().invoke(main, ["plan", "-", "--device-tokens", "9", *QWEN3_8B], input="oops\n")
    assert result.exit_code == 1
    assert result.stderr == "Error: trace line 1: not JSON: Expecting value at column 1\n"


def test_help_and_page_say_which_eviction_is_modelled():
    """By SGLang's names, where it is installed."""
    policies = {"lru", "lfu", "slru", "tlru", "priority"}
    with contextlib.suppress(ImportError):
        from sglang.srt.arg_groups.choices import RADIX_EVICTION_POLICY_CHOICES

        assert set(RADIX_EVICTION_POLICY_CHOICES) == policies
    texts = [CliRunner().invoke(main, ["plan", "--help"]).stdout]
    texts.append((pathlib.Path(__file__).parents[1] / "docs/planning.md").read_text())
    for text in texts:
        (modelled, others) = re.findall(
            r"--radix-eviction-policy[` ]+(\w+)[^;]*; ([^.]*) are not modelled", text.replace("\n", " ")
        )[0]
        assert {modelled, *re.findall(r"[a-z]?lru|lfu|priority", others)} == policies


# -- SGLang itself -----------------------------------------------------------------------------------------------------

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
L1_TOKENS, CHUNK_TOKENS, RATIO = 256, 64, 1.5


def conversations(turns: int) -> Iterator[tuple[list[int], list[int], int]]:
    """Chats that share an opening, go on, repeat or shorten what was said before.

    Yields a chat so far, which the caller brings up to date; its next prompt; and the tokens of the answer.
    """
    dice = random.Random(5)

    def words(count: int) -> list[int]:
        return [dice.randrange(3, 500) for _ in range(count)]

    opening, chats = words(37), [[]]
    for _ in range(turns):
        if dice.random() < 0.3:
            chats.append(list(opening) if dice.random() < 0.6 else [])
        chat = dice.choice(chats[-10:])
        if len(chat) > L1_TOKENS // 2:
            del chat[20:]
        kind = dice.random()
        if kind < 0.12 and len(chat) > 3:
            prompt = chat[: dice.randrange(2, len(chat))]
        elif kind < 0.2 and chat:
            prompt = list(chat)
        else:
            prompt = chat + words(dice.randrange(1, 60))
        yield chat, prompt, dice.choice([1, 1, 2, 5, 9, 17])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "page_size"), [("write_through", 8), ("write_back", 1), ("write_through_selective", 4)]
)
def test_hit_for_hit_with_sglang(policy: str, page_size: int, tmp_path: pathlib.Path):
    """A real engine, scheduler, radix cache and host pool on the CPU serve what the replay replays."""
    pytest.importorskip("sglang", reason="the extra `sglang` is not installed")
    from serving import engine

    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    settings = {
        "model_path": str(tmp_path),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enable_cache_report": True,
        "page_size": page_size,
        "max_total_tokens": L1_TOKENS,
        "chunked_prefill_size": CHUNK_TOKENS,
        "enable_hierarchical_cache": True,
        "hicache_representation": "bf16",
        "hicache_ratio": RATIO,
        "hicache_write_policy": policy,
        "log_level": "error",
    }
    replayed = cache(
        L1_TOKENS,
        tokens_of_ratio(RATIO, L1_TOKENS, page_size),
        page_size,
        chunk_tokens=CHUNK_TOKENS,
        policy=WritePolicy(policy),
    )
    served, expected = [], []
    with engine(**settings) as server:
        for chat, prompt, new_tokens in conversations(60):
            [output] = server.generate([prompt], new_tokens)
            served.append(Hit(output.from_device, output.from_host))
            answer = list(output.tokens)
            expected.append(replayed.serve(request(page_size, token_ids=prompt, output_ids=answer)))
            chat[:] = prompt + answer
    assert served == expected
    assert any(hit.l1_tokens and hit.l2_tokens for hit in served)
