"""`hiqcache demo`'s engine: SGLang in a process of its own, and what it tells the command about it.

`serve` runs in the command and starts `python -m hiqcache.sglang.demo`, which imports sglang (on a machine with no GPU
as `cpu.py` arranges it), asks each prompt three times, and reports each event as a line of JSON:

    cold       all but its last token, with nothing cached
    exact      whole, at once after it: the prefix is in L1, and the answer comes from exact KV
    restored   whole, after every other prompt has pushed the prefix out of L1: it comes back from L2

The last two compute one prompt token on top of a cached prefix, so their arithmetic is the same and only what L2 did to
the KV can make their answers differ. A cold run computes a prompt at once, which may round differently. It leaves out
the last token: in the exact run alone, SGLang would go on from that token's cached KV, rounded as in the cold run.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from hiqcache.geometry import HiqcacheError

HOST_GB = 1
"""Host budget for L2 (`--hicache-size`), in GB of 10**9 bytes."""
DEVICE_TOKENS = 1024
"""L1 in tokens (`--max-total-tokens`): room for one prompt and its answer, but for no two."""
ANSWER_TOKENS = 16
PHASES = {"cold": "cold", "exact": "again", "restored": "once evicted"}
"""The times that a prompt is asked, in order: name -> what is said of it."""


class DemoFailed(HiqcacheError):
    """The demo has nothing to show; the text says why."""


@attrs.frozen
class Started:
    """The server is up.

    Attributes:
        bytes_per_token: host bytes of a token in L2.
        tokens: tokens that L2 holds.
    """

    bytes_per_token: int
    tokens: int

    def __str__(self) -> str:
        return f"SGLang is up, with {self.tokens:,} tokens of {self.bytes_per_token:,} bytes in L2"


@attrs.frozen
class Answer:
    """A prompt has been answered, greedily.

    Attributes:
        phase: a key of `PHASES`.
        prompt: index of the prompt.
        seconds: time to the first token.
        tokens: ids of the generated tokens.
        host_tokens: prompt tokens restored from L2, by SGLang's own count.
    """

    phase: str
    prompt: int
    seconds: float
    tokens: list[int]
    host_tokens: int

    def __str__(self) -> str:
        restored = f", {self.host_tokens} tokens from L2" if self.host_tokens else ""
        return f"prompt {self.prompt + 1} {PHASES[self.phase]}: first token after {self.seconds:.2f} s{restored}"


Event = Started | Answer


def serve(model: Path, representation: str, prompts: Sequence[str], log: Path) -> Generator[Event]:
    """Serve `prompts` in a new process group; close the generator to end every process of it.

    Args:
        model: folder of the model.
        representation: name of the host representation.
        prompts: texts, any two of them longer than L1.
        log: file for all that SGLang prints.

    Raises:
        DemoFailed: the server refused, or ended before it had answered everything.
    """
    request = json.dumps({"model": str(model), "representation": representation, "prompts": prompts})
    with (
        log.open("w") as log_file,
        subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log_file,
            text=True,
            start_new_session=True,  # a process group that Ctrl-C does not reach, and that can be killed as one
        ) as process,
    ):
        assert process.stdin
        assert process.stdout
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin:  # broken: it ended already, as is found below
                process.stdin.write(request)
            for line in process.stdout:
                yield _decode(line)
            if process.wait():
                raise DemoFailed(f"SGLang ended with status {process.returncode} while serving {representation!r}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _encode(event: Event | DemoFailed) -> str:
    fields = {"reason": str(event)} if isinstance(event, DemoFailed) else attrs.asdict(event)
    return json.dumps([type(event).__name__, fields])


def _decode(line: str) -> Event:
    name, fields = json.loads(line)
    if name == DemoFailed.__name__:
        raise DemoFailed(fields["reason"])
    return {cls.__name__: cls for cls in (Started, Answer)}[name](**fields)


# -- in the engine's process -----------------------------------------------------------------------------------------


def _main() -> None:
    # Standard output is for events alone: what SGLang and its children print there goes to the log.
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        for event in _run(**json.load(sys.stdin)):
            print(_encode(event), file=events, flush=True)
    except (Exception, SystemExit) as error:
        print(_encode(DemoFailed(str(error))), file=events, flush=True)
        raise


def _run(model: str, representation: str, prompts: list[str]) -> Iterator[Event]:
    import torch

    from hiqcache.sglang import cpu

    arguments: dict[str, Any] = {
        "model_path": model,
        "hicache_representation": representation,
        "enable_hierarchical_cache": True,
        "hicache_size": HOST_GB,
        "max_total_tokens": DEVICE_TOKENS,
        "log_level": "info",
    }
    if not torch.cuda.is_available():
        cpu.prepare()
        arguments |= cpu.ENGINE_ARGS | cpu.FLOAT32
    import sglang
    from sglang.srt.utils import kill_itself_when_parent_died

    from hiqcache.sglang import proof

    kill_itself_when_parent_died()
    with sglang.Engine(**arguments) as engine:
        (report,) = engine.get_server_info()[proof.KEY]
        yield Started(report["bytes_per_token"], report["tokens"])
        tokens = [engine.tokenizer_manager.tokenizer.encode(prompt) for prompt in prompts]
        for index, prompt in enumerate(tokens):
            yield _ask(engine, "cold", index, prompt[:-1], 1)
            yield _ask(engine, "exact", index, prompt, ANSWER_TOKENS)
        for index, prompt in enumerate(tokens):
            yield _ask(engine, "restored", index, prompt, ANSWER_TOKENS)


def _ask(engine: Any, phase: str, index: int, prompt: list[int], new_tokens: int) -> Answer:
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    start = time.perf_counter()
    chunks = engine.generate(input_ids=prompt, sampling_params=sampling, stream=True)
    last = next(chunks)
    seconds = time.perf_counter() - start
    for last in chunks:  # noqa: B007  # each chunk repeats the answer so far
        pass
    details = last["meta_info"].get("cached_tokens_details") or {}
    return Answer(phase, index, seconds, last["output_ids"], details.get("host", 0))


if __name__ == "__main__":
    _main()
