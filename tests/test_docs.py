"""The documentation against the code: a rule, a hook or a number that changes here must change there.

`python tests/test_docs.py` prints the table of settings for `docs/sglang-integration.md`.
"""

import ast
import contextlib
import importlib.util
import io
import pathlib
import re
import sys

import pytest

from hiqcache.backends.bf16 import Bf16
from hiqcache.backends.int8 import Int8
from hiqcache.capacity import tokens_of_size
from hiqcache.geometry import KVGeometry, Part
from hiqcache.sglang import rules

REPOSITORY = pathlib.Path(__file__).parents[1]
DOCS = REPOSITORY / "docs"
PAGES = (
    "design",
    "doctor",
    "dump-and-inspect",
    "experiments",
    "hicache-internals",
    "metrics",
    "performance",
    "planning",
    "quality",
    "reliability",
    "reproducing",
    "sglang-integration",
    "writing-a-representation",
)


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def prose(name: str) -> str:
    """A page on one line, so that a line break inside a phrase does not matter."""
    return " ".join(page(name).split())


def parsed(path: str) -> ast.Module:
    return ast.parse((REPOSITORY / path).read_text(encoding="utf-8"))


def literals(node: ast.AST) -> list[str]:
    """The fixed pieces of a string expression; of `Class.__name__`, the class."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return [text for part in parts for text in literals(part)]
        case ast.FormattedValue(value=inner):
            return literals(inner)
        case ast.Attribute(value=ast.Name(id=name), attr="__name__"):
            return [name]
    return []


# -- docs/sglang-integration.md --------------------------------------------------------------------------------------


def settings_table() -> str:
    """The refused settings, as the page shows them."""
    rows = [f"| `{rule.flag}` | {rule.allowed} | {rule.why} |" for rule in rules._RULES]
    return "\n".join(["| setting | allowed | why |", "|---|---|---|", *rows])


def test_every_refused_setting_is_on_the_page():
    assert settings_table() in page("sglang-integration"), f"the table should read:\n{settings_table()}"


def test_every_setting_that_dumps_refuse_is_on_their_page():
    assert all(
        f"| `{rule.flag}` | {rule.allowed} | {rule.why} |" in page("dump-and-inspect") for rule in rules._DUMP_RULES
    )
    assert len(rules._DUMP_RULES) == 3


def hooks() -> dict[str, str]:
    """Hooked name -> the hook, from both lists and without importing SGLang."""
    found = {}
    for module in ("asking", "hooks"):
        for node in parsed(f"hiqcache/sglang/{module}.py").body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "HOOKS":
                assert isinstance(node.value, ast.Tuple)
                calls = [entry for entry in node.value.elts if isinstance(entry, ast.Call)]
                found |= {literals(call.args[0])[0]: ast.unparse(call.args[1]) for call in calls}
    return found


def test_every_hook_has_a_section():
    text = page("sglang-integration")
    missing = [
        target
        for target, hook in hooks().items()
        if f"`{target.removeprefix('sglang.srt.')}`" not in text or f"### `{hook}`" not in text
    ]
    assert hooks()
    assert not missing, f"no section: {missing}"


def test_no_section_is_about_a_hook_that_is_gone():
    sections = re.findall(r"^### `((?:around|after|before)_\w+)`", page("sglang-integration"), re.MULTILINE)
    assert sorted(sections) == sorted(hooks().values())


@pytest.mark.parametrize(
    "path", ["hiqcache/sglang/pool.py", "hiqcache/representation.py", "backends/bf16.py", "backends/int8.py"]
)
def test_every_rule_of_a_pool_or_format_is_on_the_page(path: str):
    found = [
        keyword.value
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Violation"
        for keyword in node.keywords
        if keyword.arg == "rule"
    ]
    missing = [text for rule in found for text in literals(rule) if f"| {text} |" not in page("sglang-integration")]
    assert not missing
    assert found or path == "backends/bf16.py"


def test_every_refusal_of_the_proof_is_on_the_page():
    calls = [
        node
        for node in ast.walk(parsed("hiqcache/sglang/proof.py"))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "_refuse"
    ]
    assert calls
    pieces = [piece.strip(" ,'") for call in calls for argument in call.args for piece in literals(argument)]
    assert not [piece for piece in pieces if piece not in prose("sglang-integration")]


def test_the_names_that_a_user_types_are_on_the_page():
    wanted = ("FLAG", "DUMP_FLAG", "ALIAS", "ALLOW_UNTESTED", "TESTED_SGLANG")
    found = {
        ast.unparse(node.targets[0]): ast.literal_eval(node.value)
        for path in ("hiqcache/sglang/choice.py", "hiqcache/sglang/versions.py")
        for node in parsed(path).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in wanted
    }
    assert sorted(found) == sorted(wanted)
    values = [found["FLAG"], found["DUMP_FLAG"], found["ALIAS"], found["ALLOW_UNTESTED"], *found["TESTED_SGLANG"]]
    assert not [value for value in values if value not in page("sglang-integration")]


# -- docs/design.md --------------------------------------------------------------------------------------------------


def geometry(layers: int, heads: int, dim: int, page_size: int) -> KVGeometry:
    return KVGeometry(layers=layers, heads=heads, head_dim=dim, v_head_dim=dim, page_size=page_size)


def test_the_arithmetic_of_the_formats():
    bf16, int8, int8_64 = Bf16(geometry(36, 8, 128, 1)), Int8(geometry(36, 8, 128, 1)), Int8(geometry(36, 8, 128, 64))
    numbers = [
        int8.layouts[Part.K].block_bytes,
        int8_64.layouts[Part.K].block_bytes,
        bf16.bytes_per_token(),
        int8.bytes_per_token(),
        int8_64.bytes_per_token(),
        Int8(geometry(80, 1, 128, 64)).bytes_per_token(),
        tokens_of_size(8, bf16.bytes_per_token(), 1),
        tokens_of_size(8, int8.bytes_per_token(), 1),
        54_254 * bf16.bytes_per_token(),
        54_254 * int8.bytes_per_token(),
        tokens_of_size(8, bf16.bytes_per_token(), 64),
        tokens_of_size(8, int8_64.bytes_per_token(), 64),
    ]
    assert numbers == [
        *(1152, 66_560, 147_456, 82_944, 74_880, 20_800),
        *(54_254, 96_451, 8_000_077_824, 4_500_043_776, 54_272, 106_880),
    ]
    assert not [number for number in numbers if f"{number:,}" not in page("design")]


def test_the_table_of_geometries():
    rows = re.findall(r"^\| [^|]+ \| (\d+) x (\d+) \| (.*) \|$", page("design"), re.MULTILINE)
    assert len(rows) == 5
    for heads, dim, cells in rows:
        bf16 = 2 * int(heads) * int(dim)
        expected = [f"{bf16:,}"]
        for page_size in (1, 16, 64):  # powers of two up to 128, so a multiple of 128 is whole bytes a token
            taken = -(-page_size * int(heads) * (int(dim) + 2) // 128) * 128 // page_size
            expected += [f"{taken:,}", f"{1 - taken / bf16:.2%}" if taken < bf16 else "refused"]
        assert [cell.strip() for cell in cells.split("|")] == expected


def test_what_the_page_computes_comes_out_as_it_says():
    text = page("design")
    ((code, result),) = re.findall(r"^```python\n(.*?)^```\n\nIt prints `([^`]*)`", text, re.MULTILINE | re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue().strip() == result


# -- all pages -------------------------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """What `#...` may follow a link to a page, as GitHub makes it."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", [*PAGES, "../README"])
def test_links_lead_somewhere(name: str):
    here = DOCS / f"{name}.md"
    for target in re.findall(r"\]\(([^)\s]+)\)", page(name)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = here.parent / path if path else here
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked.read_text(encoding="utf-8")), target


@pytest.mark.parametrize("name", PAGES)
def test_named_files_of_this_repository_exist(name: str):
    paths = re.findall(r"`((?:hiqcache|backends|tests|docs)/[\w/.-]+\.(?:py|md))`", page(name))
    assert not [path for path in paths if not (REPOSITORY / path).exists()]


def sglang_sources() -> pathlib.Path:
    spec = importlib.util.find_spec("sglang")  # imports nothing
    if spec is None or spec.origin is None:
        pytest.skip("sglang is not installed")
    return pathlib.Path(spec.origin).parent / "srt"


@pytest.mark.parametrize("name", ["hicache-internals", "sglang-integration"])
def test_sglang_has_what_the_page_names(name: str):
    """Table rows that start with files of SGLang name things defined there."""
    sources = sglang_sources()
    rows = re.findall(r"^\| (`(?!hiqcache/)[\w/]+\.py`(?:, `[\w/]+\.py`)*) \| (.*) \|$", page(name), re.MULTILINE)
    assert rows
    for files, cells in rows:
        code = "\n".join((sources / file).read_text(encoding="utf-8") for file in re.findall(r"`([^`]+)`", files))
        for term in re.findall(r"`([^`]+)`", cells):
            last = term.removesuffix("()").rsplit(".", 1)[-1]
            assert re.search(rf"\b{re.escape(last)}\b", code), f"{files}: {term}"


if __name__ == "__main__":
    sys.stdout.write(settings_table() + "\n")
