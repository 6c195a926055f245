"""Traces: JSON Lines, one request a line, in the order in which the requests arrive.

A line is an object of one of two kinds; other keys are ignored:

    {"hash_ids": [7, 8, 9], "input_length": 1100, "output_length": 50}
    {"token_ids": [1, 2, 3], "output_ids": [4, 5]}

`hash_ids` names the prompt's blocks, each a number or a string; requests share a prefix as far as their leading ids are
equal. A block has 512 tokens, as in Mooncake's traces, or `"block_tokens"` where that key is present; the last block
has what remains of `input_length` and, if that is less, shares only with a block of the same id and length.
`token_ids` are the prompt itself. The answer is `output_ids`, so that a later prompt can repeat it, or `output_length`
tokens that no other request shares.
"""

import gzip
import json
import zlib
from array import array
from collections.abc import Hashable, Iterable, Iterator
from itertools import accumulate
from operator import itemgetter
from typing import Any, BinaryIO

from attrs import Factory, field, frozen

from hiqcache.geometry import HiqcacheError

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens of a block whose line does not say."""

GZIP = b"\x1f\x8b"
"""How a gzip file begins."""

CHAT_KEYS = ("conversations", "conversation", "messages", "prompt", "text")
"""Keys by which chat logs in text are told, ShareGPT's first."""

CHATS = "docs/planning.md#chat-logs converts them"

Span = tuple[Hashable, int]
"""A run of tokens: (identity, tokens). Equal spans hold equal tokens; others differ from their first token on."""


class MalformedTrace(HiqcacheError):
    """A line of a trace is not a request, or the trace holds none."""


@frozen
class Request:
    """One prompt and its answer.

    Attributes:
        spans: the prompt's tokens, then the answer's.
        prompt_tokens: tokens of the prompt, at least one.
        output_tokens: tokens of the answer, at least one (a prefill always yields one).
        ends: tokens of the request up to the end of each span.
    """

    spans: list[Span]
    prompt_tokens: int
    output_tokens: int
    ends: list[int] = field(init=False, default=Factory(lambda self: _ends(self.spans), takes_self=True))


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Lines of a trace file from its start, decompressed if it is gzip's, whatever its name.

    Args:
        file: opened for reading bytes; it can seek.

    Raises:
        MalformedTrace: the gzip file is damaged or cut off.
    """
    compressed = file.read(len(GZIP)) == GZIP
    file.seek(0)
    try:
        yield from gzip.GzipFile(fileobj=file) if compressed else file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise MalformedTrace(f"the trace is a damaged gzip file: {error}") from None


def read_trace(lines: Iterable[str | bytes], page_size: int) -> Iterator[Request]:
    """Requests of a trace, one at a time; blank lines are skipped.

    Args:
        lines: the trace's lines.
        page_size: tokens in a page; token ids are held a page at a time, since nothing smaller is ever shared.

    Raises:
        MalformedTrace: a line is not a request (the message has its number), or there is none.
    """
    empty = True
    for number, line in enumerate(lines, 1):
        if not (stripped := line.strip()):
            continue
        if empty and stripped[:1] in ("[", b"["):
            raise MalformedTrace(
                f"trace line {number}: a JSON array begins here; a trace has a JSON object on each line, with "
                f"token_ids or hash_ids. If these are chat logs (ShareGPT): {CHATS}"
            )
        empty = False
        try:
            request = _request(json.loads(line), page_size)
        except MalformedTrace as error:
            raise MalformedTrace(f"trace line {number}: {error}") from None
        except UnicodeDecodeError:
            raise MalformedTrace(
                f"trace line {number}: not UTF-8 text; of compressed files gzip alone is read"
            ) from None
        except json.JSONDecodeError as error:
            raise MalformedTrace(f"trace line {number}: not JSON: {error.msg} at column {error.colno}") from None
        except (ValueError, RecursionError) as error:  # numbers and nesting without end
            raise MalformedTrace(f"trace line {number}: not JSON: {error}") from None
        yield request
    if empty:
        raise MalformedTrace("the trace holds no request")


def _ends(spans: list[Span]) -> list[int]:
    return list(accumulate(map(itemgetter(1), spans)))


def _request(record: Any, page_size: int) -> Request:
    if not isinstance(record, dict):
        raise MalformedTrace(f"a request is a JSON object, not {_shown(record)}")
    kinds = record.keys() & {"hash_ids", "token_ids"}
    if not kinds and (texts := [key for key in CHAT_KEYS if key in record]):
        raise MalformedTrace(f"a chat log in text (it has {texts[0]}); a trace has token_ids or hash_ids: {CHATS}")
    if len(kinds) != 1:
        raise MalformedTrace("a request has either hash_ids or token_ids")
    if "hash_ids" in record:
        prompt_tokens = _count(record, "input_length", least=1)
        spans = _blocks(record, prompt_tokens)
        output: list[int] = []
    else:
        prompt, output = _token_ids(record, "token_ids"), _token_ids(record, "output_ids", optional=True)
        if not prompt:
            raise MalformedTrace("token_ids is empty")
        prompt_tokens = len(prompt)
        spans = _pages(prompt + output, page_size)
    output_tokens = len(output)
    if not output:
        output_tokens = max(_count(record, "output_length", least=0), 1)
        spans.append((object(), output_tokens))  # equal to no other span
    return Request(spans, prompt_tokens, output_tokens)


def _blocks(record: dict[str, Any], prompt_tokens: int) -> list[Span]:
    ids = record["hash_ids"]
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int, str}:
        raise MalformedTrace(f"hash_ids is a list of whole numbers or strings, not {_shown(ids)}")
    size = _count(record, "block_tokens", least=1) if "block_tokens" in record else MOONCAKE_BLOCK_TOKENS
    blocks = -(-prompt_tokens // size)
    if len(ids) != blocks:
        raise MalformedTrace(
            f"input_length {prompt_tokens} takes {blocks} hash_ids, of {size} tokens each, but there are {len(ids)}"
        )
    spans: list[Span] = [(each, size) for each in ids]
    spans[-1] = (ids[-1], prompt_tokens - (blocks - 1) * size)
    return spans


def _pages(tokens: list[int], page_size: int) -> list[Span]:
    try:
        packed = array("q", tokens)
    except OverflowError:
        raise MalformedTrace("a token id does not fit in 64 bits") from None
    pages = (packed[start : start + page_size] for start in range(0, len(packed), page_size))
    return [(page.tobytes(), len(page)) for page in pages]


def _count(record: dict[str, Any], key: str, least: int) -> int:
    value = record.get(key)
    if type(value) is not int or value < least:
        found = _shown(value) if key in record else "nothing"
        raise MalformedTrace(f"{key} is a whole number of at least {least}, not {found}")
    return value


def _token_ids(record: dict[str, Any], key: str, optional: bool = False) -> list[int]:
    value = record.get(key, [] if optional else None)
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise MalformedTrace(f"{key} is a list of whole numbers, not {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
