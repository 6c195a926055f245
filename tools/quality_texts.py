"""Real texts of several kinds for tools/quality.py, from packages of fixed versions whose licences are named."""

import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from attrs import asdict, define, field, frozen
from attrs.validators import in_, instance_of

from hiqcache.geometry import HiqcacheError

LENGTHS = (512, 1024, 1536, 2048)
"""Tokens of a prefix; every kind has as many prompts of one length as of another."""
CONTINUATION = 192
"""Tokens of the text that follow the prefix, for teacher-forced scores."""
ROUNDS = 5
"""Prompts of each kind and length."""


@frozen
class Source:
    """Texts of one kind in one file of PyPI's.

    Attributes:
        kind: prose, dialogue, code or tables.
        requirement: what pip downloads.
        sha256: of the downloaded file.
        files: patterns of names in it.
        licence: of those texts.
    """

    kind: str
    requirement: str
    sha256: str
    files: tuple[str, ...]
    licence: str


BROTLI = ("brotli==1.1.0", "81de08ac11bcb85841e440c13611c00b67d3bf82698314928d0b676362546724")
"""Brotli's sources hold the texts of the Canterbury corpus, to test compression with."""
SOURCES = (
    Source(
        "prose",
        *BROTLI,
        ("*/tests/testdata/alice29.txt", "*/tests/testdata/lcet10.txt"),
        "public domain: Alice's Adventures in Wonderland; proceedings of a workshop of the Library of Congress, 1992",
    ),
    Source("dialogue", *BROTLI, ("*/tests/testdata/asyoulik.txt",), "public domain: Shakespeare, As You Like It"),
    Source(
        "code",
        "werkzeug==3.1.3",
        "54b78bf3716d19a65be4fceccc0d1d7b89e608834989dfae50ea87564639213e",
        ("werkzeug/*.py",),
        "BSD-3-Clause",
    ),
    Source(
        "tables",
        "vega-datasets==0.9.0",
        "3d7c63917be6ca9b154b565f4779a31fedce57b01b5b9d99d8a34a7608062a1d",
        ("*/seattle-weather.csv", "*/airports.csv", "*/us-employment.csv", "*/stocks.csv"),
        "MIT (the package; its data are from public US statistics)",
    ),
)


@frozen(kw_only=True)
class Prompt:
    """A passage of real text.

    Attributes:
        kind: of text.
        origin: package, file in it, licence, and characters from where to where.
        prefix_tokens: how many tokens are the prefix; the rest is its true continuation.
        tokens: ids of both.
    """

    kind: str = field(validator=instance_of(str))
    origin: str = field(validator=instance_of(str))
    prefix_tokens: int = field(validator=instance_of(int))
    tokens: tuple[int, ...]

    @property
    def prefix(self) -> list[int]:
        return list(self.tokens[: self.prefix_tokens])

    @property
    def sha256(self) -> str:
        """Of the token ids, as decimal numbers between commas."""
        return hashlib.sha256(",".join(map(str, self.tokens)).encode()).hexdigest()


@frozen(kw_only=True)
class Prompts:
    """What one run asks for.

    Attributes:
        tokenizer: name of the model whose tokenizer made the ids.
        shared_tokens: leading tokens that all prompts have in common (a beginning-of-text token), 0 or 1.
        prompts: no two of them share more than those, and all continuations are of one length.
    """

    tokenizer: str
    shared_tokens: int = field(validator=in_((0, 1)))
    prompts: tuple[Prompt, ...]

    def __attrs_post_init__(self) -> None:
        for prompt in self.prompts:
            if not 0 < prompt.prefix_tokens < len(prompt.tokens) - 1 or not set(map(type, prompt.tokens)) <= {int}:
                raise HiqcacheError(f"{prompt.origin}: its tokens are no ids of a prefix and of two tokens or more")
        if not self.prompts:
            raise HiqcacheError("there are no prompts")
        heads = [prompt.tokens[: self.shared_tokens + 1] for prompt in self.prompts]
        if len(set(heads)) < len(heads):
            raise HiqcacheError(
                f"two prompts share more than {self.shared_tokens} leading tokens: one serves the other"
            )
        if len({len(prompt.tokens) - prompt.prefix_tokens for prompt in self.prompts}) != 1:
            raise HiqcacheError("the continuations differ in length; all must have the same")

    def require_ids_of(self, model: Path) -> None:
        """
        Raises:
            HiqcacheError: there is no such model, or it has no such tokens.
        """
        try:
            config = dict(json.loads((model / "config.json").read_text()))
        except (OSError, TypeError, ValueError) as error:
            raise HiqcacheError(f"{model} is no folder of a model (--model): {error}") from error
        # Models of several modalities state it one level down.
        parts = [part for part in (config, *config.values()) if isinstance(part, dict)]
        sizes = [part["vocab_size"] for part in parts if isinstance(part.get("vocab_size"), int)]
        ids = [token for prompt in self.prompts for token in prompt.tokens]
        if min(ids) < 0 or (sizes and max(ids) >= max(sizes)):
            raise HiqcacheError(
                f"token ids from {min(ids)} to {max(ids)}, made with the tokenizer of {self.tokenizer}; {model} has "
                f"{max(sizes, default='no')} tokens: make prompts for it with quality.py prompts --model {model}"
            )

    @property
    def continuation_tokens(self) -> int:
        return len(self.prompts[0].tokens) - self.prompts[0].prefix_tokens

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), separators=(",", ":")) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Prompts":
        """
        Raises:
            HiqcacheError: the file is not what `save` writes.
        """
        try:
            data = json.loads(path.read_text())
            prompts = [Prompt(**{**prompt, "tokens": tuple(prompt["tokens"])}) for prompt in data.pop("prompts")]
            return cls(**data, prompts=tuple(prompts))
        except HiqcacheError as error:
            raise HiqcacheError(f"{path}: {error}") from error
        except (KeyError, TypeError, AttributeError, OSError, ValueError, RecursionError) as error:
            reason = error if isinstance(error, OSError) else error.args[0]  # attrs has more to say, for programs
            raise HiqcacheError(
                f"{path} holds no prompts ({type(error).__name__}: {reason}); make them with: "
                "quality.py prompts --out FILE"
            ) from error


@define
class _Text:
    """A text being cut up, from its start on."""

    source: Source
    file: str
    tokens: list[int]
    spans: list[tuple[int, int]]
    line_starts: set[int]
    position: int = 0

    def cut(self, tokens: int, taken: set[int]) -> tuple[int, int] | None:
        """The next passage that starts a line with a token that no other prompt starts with; None when used up."""
        for start in range(self.position, len(self.tokens) - tokens):
            if self.spans[start][0] in self.line_starts and self.tokens[start] not in taken:
                self.position = start + tokens
                return start, start + tokens
        return None


def make(model: Path) -> Prompts:
    """Prompts of every kind and length, in the tokens of a model, always the same.

    Raises:
        HiqcacheError: a text cannot be downloaded or is not the one expected, or the texts are too short.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise HiqcacheError(f"{model} has no tokenizer (--model): {str(error).splitlines()[0]}") from error
    lead = tokenizer("")["input_ids"]
    if len(lead) > 1:
        raise HiqcacheError(
            f"the tokenizer of {model} puts {len(lead)} tokens before a text; at most 1 is provided for"
        )
    texts: dict[str, list[_Text]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for source in SOURCES:
            texts.setdefault(source.kind, []).extend(_read(source, tokenizer, Path(scratch)))
    prompts, taken = [], {0}  # SGLang's health checks use token 0
    for _ in range(ROUNDS):
        for length in LENGTHS:
            for kind, choices in texts.items():
                prompts.append(_next(kind, choices, length, lead, taken))
                taken.add(prompts[-1].tokens[len(lead)])
    return Prompts(tokenizer=model.name, shared_tokens=len(lead), prompts=tuple(prompts))


def _next(kind: str, texts: list[_Text], length: int, lead: list[int], taken: set[int]) -> Prompt:
    wanted = length - len(lead) + CONTINUATION
    for text in texts:
        if passage := text.cut(wanted, taken):
            start, end = passage
            texts.append(texts.pop(texts.index(text)))  # the texts of a kind take turns
            characters = f"characters {text.spans[start][0]} to {text.spans[end - 1][1]}"
            origin = f"{text.source.requirement}, {text.file}, {characters}; {text.source.licence}"
            return Prompt(kind=kind, origin=origin, prefix_tokens=length, tokens=(*lead, *text.tokens[start:end]))
    raise HiqcacheError(f"the texts of kind {kind!r} are too short for {ROUNDS} prompts of each length with this model")


def _read(source: Source, tokenizer: Any, scratch: Path) -> Iterator[_Text]:
    for file, text in sorted(_members(_download(source, scratch))):
        if any(fnmatch(file, pattern) for pattern in source.files):
            encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            line_starts = {0} | {index + 1 for index, character in enumerate(text) if character == "\n"}
            spans = [tuple(span) for span in encoded["offset_mapping"]]
            yield _Text(source, file, encoded["input_ids"], spans, line_starts)


def _download(source: Source, scratch: Path) -> Path:
    folder = scratch / source.sha256
    if not folder.exists():
        name = source.requirement.partition("==")[0]
        kind = ["--no-binary", name] if source.requirement == BROTLI[0] else ["--only-binary", name]
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *kind, "--dest", str(folder)]
        result = subprocess.run([*command, source.requirement], capture_output=True, text=True)
        if result.returncode:
            lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
            raise HiqcacheError(f"cannot download {source.requirement} with pip (is there a network?): {lines[-1]}")
    (file,) = folder.iterdir()
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != source.sha256:
        raise HiqcacheError(f"{file.name} from pip has SHA-256 {digest}, expected {source.sha256}: not using it")
    return file


def _members(archive: Path) -> Iterator[tuple[str, str]]:
    """Name and text of every file that is UTF-8."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            files = [(name, wheel.read(name)) for name in wheel.namelist()]
    else:
        with tarfile.open(archive) as tar:
            members = [member for member in tar if member.isfile()]
            files = [(member.name, tar.extractfile(member).read()) for member in members]  # pyright: ignore[reportOptionalMemberAccess]
    for name, content in files:
        try:
            yield name, content.decode().replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
