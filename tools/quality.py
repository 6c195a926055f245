"""What an encoded L2 does to a model's answers, through real SGLang servers and real restores.

\b
    python tools/quality.py prompts --out prompts.json          (needs a network; --model for yours)
    python tools/quality.py run --prompts prompts.json --out result.json
    python tools/quality.py report result.json                  (tables, in Markdown)
    python tools/quality.py plot result.json --out result.svg

Every arm is a server of the same model. It computes each prompt's prefix in one piece, and later continues it in two
ways: the text's true continuation is scored (SGLang's own log-probabilities, the 50 most likely tokens at each
position), and 64 tokens are generated greedily, as far as the end of text. Between the two, what the arm does to the KV
of the prefix:

\b
    exact       nothing: it has stayed in L1 since it was computed
    bf16, int8    pushed out of L1 by the other prompts, and restored from L2 (SGLang's count must say so each time)
    int8 8 trips  evicted, restored, evicted and *encoded again*, 8 times (write-back, L2 too small for second copies)
    fp8           --kv-cache-dtype fp8_e4m3: the KV in L1 is in 8 bits, without an L2
    recomputed    BF16 in L1, but the prefix was computed in small chunks: what differs is rounding, the noise floor

Arms are compared with exact, restored ones with the exact run of their own server; recomputed with bf16 restored.
Logits are computed in float32 everywhere (--enable-fp32-lm-head), or their rounding would hide small differences.
With --float32 so is everything else, on KV in BF16: the noise floor is lower, and answers are scored only.
"""

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import click
import numpy as np
import requests
import torch
from attrs import evolve, frozen
from counters import BACKUP_TOKENS, metric
from quality_report import YARDSTICK, Arm, Greedy, Score, markdown, plot, summarise
from quality_texts import Prompt, Prompts, make
from results import Commands, read_result, writable
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from servers import end_servers_on_sigterm, launch, provenance
from serving import START_SECONDS, HttpServer, environment, free_port, http

from hiqcache import registry, sample_model
from hiqcache.commands._picture import picture
from hiqcache.geometry import HiqcacheError
from hiqcache.sglang import cpu

TOP = 50
"""Most likely tokens asked for at each position."""
GENERATED = 64
"""Tokens generated greedily, at most."""
ONE_PIECE = 8192
"""Chunked prefill size that leaves a prefix in one piece, unless prefixes are longer."""
SPARE = 64
"""L1 tokens beyond the longest prompt."""
FP8 = "fp8_e4m3"
PARTS = ("arms", "settings", "model", "prompts", "hardware", "versions", "bars")
"""What a result has."""
MEMORY = 0.8
"""`--mem-fraction-static`; L1 takes only what its fixed size needs."""
COMMON = ["--skip-tokenizer-init", "--skip-server-warmup", "--enable-fp32-lm-head", "--cuda-graph-max-bs-decode", "1"]
RECOMPUTED = "recomputed"
TRIPS = 8
ENCODED_AGAIN = 0.9
"""Tokens encoded for each token restored, at least, where encoding again is the point."""
LOSSLESS = "bf16"
"""The representation that shows what everything but a codec does; its server's exact run is the common reference."""


class NotMeasured(HiqcacheError):
    """A server did not do what the arm says; there is nothing to report."""


@frozen
class Client:
    """A running server, and what is asked of it.

    Attributes:
        server: the server.
        shared: leading tokens that all prompts have in common, and that may therefore be in L1 at any time.
        asked: called after each answer.
    """

    server: HttpServer
    shared: int
    asked: Callable[[], None]

    def _ask(self, tokens: Sequence[int], new_tokens: int, **more: Any) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": new_tokens}
        body = {"input_ids": list(tokens), "sampling_params": sampling, **more}
        answer = requests.post(f"{self.server.url}/generate", json=body, timeout=START_SECONDS)
        if not answer.ok:
            raise NotMeasured(f"SGLang answered {answer.status_code}: {answer.text[:500]}")
        self.asked()
        return answer.json()

    def _require(self, prompt: Prompt, meta: dict[str, Any], source: str | None) -> None:
        """Raise unless the prefix came from where the arm needs it: L1 ("device"), L2 ("host"), or nowhere (None)."""
        details = meta.get("cached_tokens_details") or {}
        seen = {tier: details.get(tier, 0) for tier in ("device", "host")}
        whole = 0 if source is None else prompt.prefix_tokens
        from_source = seen[source] if source else 0
        if sum(seen.values()) > max(whole, self.shared) or from_source < whole - self.shared:
            wanted = {"device": "all from L1", "host": "all from L2", None: "nothing cached"}[source]
            raise NotMeasured(
                f"a prefix of {prompt.prefix_tokens} tokens ({prompt.origin}): {seen['device']} came from L1 and "
                f"{seen['host']} from L2; wanted {wanted}, so nothing is reported"
            )

    def fill(self, prompt: Prompt) -> None:
        """Compute the prefix alone; its KV stays in L1."""
        self._require(prompt, self._ask(prompt.prefix, 1)["meta_info"], None)

    def score(self, prompt: Prompt, source: str) -> Score:
        """Log-probabilities of the true continuation, but for its first token, which no asked position predicts."""
        # Reuse of cached KV ends where log-probabilities begin: at the end of the prefix.
        more = {"return_logprob": True, "logprob_start_len": prompt.prefix_tokens, "top_logprobs_num": TOP}
        meta = self._ask(prompt.tokens, 1, **more)["meta_info"]
        self._require(prompt, meta, source)
        true = meta["input_token_logprobs"][1:]
        top = meta["input_top_logprobs"][1:]
        expected = list(prompt.tokens[prompt.prefix_tokens + 1 :])
        if [entry[1] for entry in true] != expected or len(top) != len(expected):
            raise NotMeasured(f"SGLang scored {len(true)} tokens other than the {len(expected)} after {prompt.origin}")
        found = Score(
            true=np.array([entry[0] for entry in true], dtype=float),  # JSON has no NaN; a null becomes one here
            ids=np.array([[entry[1] for entry in position] for position in top]),
            logprobs=np.array([[entry[0] for entry in position] for position in top], dtype=float),
        )
        if not (np.isfinite(found.true).all() and np.isfinite(found.logprobs).all()):
            raise NotMeasured(f"SGLang's log-probabilities after {prompt.origin} are not all numbers: NaN or infinity")
        return found

    def restore(self, prompt: Prompt) -> None:
        """Bring the prefix back from L2; its continuation stays where it is."""
        self._require(prompt, self._ask(prompt.tokens[: prompt.prefix_tokens + 1], 1)["meta_info"], "host")

    def continue_greedily(self, prompt: Prompt, source: str) -> Greedy:
        """Generate after the prefix and one more token: the last token of a prompt is never taken from a cache."""
        answer = self._ask(prompt.tokens[: prompt.prefix_tokens + 1], GENERATED)
        self._require(prompt, answer["meta_info"], source)
        reason = answer["meta_info"]["finish_reason"]["type"]
        return Greedy(tokens=tuple(answer["output_ids"]), ended=reason == "stop")


@frozen(kw_only=True)
class Plan:
    """A server, and what is done with it.

    Attributes:
        name: in messages, and of its log.
        arguments: of `sglang.launch_server`, beyond those that all have.
        l1_tokens: size of L1.
        chunk: `--chunked-prefill-size`.
        measure: asks the questions.
        answers: how many answers that takes.
        float32: the model computes in float32, on KV in BF16.
        optional: without it there is still something to report.
    """

    name: str
    arguments: Sequence[str] = ()
    l1_tokens: int
    chunk: int
    measure: Callable[[Client], list[Arm]]
    answers: int
    float32: bool = False
    optional: bool = False


@frozen
class Run:
    """All that the arms have in common.

    Attributes:
        prompts: what is asked.
        float32: the model computes in float32, on KV in BF16. Nobody serves so: answers are scored, none is generated.

    Raises:
        HiqcacheError: the prompts are too few to push one another out of L1.
    """

    prompts: Prompts
    float32: bool = False

    def __attrs_post_init__(self) -> None:
        if self.total - self.longest < self.l1_tokens:
            raise HiqcacheError(
                f"{len(self.prompts.prompts)} prompts of {self.total:,} tokens do not push one another out of an L1 of "
                f"{self.l1_tokens:,} tokens: give more prompts (--prompts)"
            )

    @property
    def longest(self) -> int:
        return max(len(prompt.tokens) for prompt in self.prompts.prompts)

    @property
    def total(self) -> int:
        return sum(len(prompt.tokens) for prompt in self.prompts.prompts)

    @property
    def l1_tokens(self) -> int:
        """L1 that holds one prompt and its answers."""
        return self.longest + GENERATED + SPARE

    @property
    def one_piece(self) -> int:
        """Chunked prefill size of all arms but one."""
        return max(ONE_PIECE, self.longest)

    @property
    def small_pieces(self) -> int:
        """Chunked prefill size that cuts every prefix, but no continuation: that is computed alike in all arms."""
        third = min(prompt.prefix_tokens for prompt in self.prompts.prompts) // 3
        return max(third, self.prompts.continuation_tokens)

    @property
    def enough_for_trips(self) -> bool:
        """Whether both tiers can be small enough that restored prefixes are encoded again."""
        return self.total >= 8 * self.longest

    def exact(self, client: Client, name: str, against: str | None) -> Arm:
        """Everything asked while the prefix is in L1."""
        scores, greedy = [], []
        for prompt in self.prompts.prompts:
            client.fill(prompt)
            scores.append(client.score(prompt, "device"))
            if not self.float32:
                greedy.append(client.continue_greedily(prompt, "device"))
        return Arm(name=name, against=against, scores=scores, greedy=greedy or None)

    def restored(self, client: Client, name: str) -> list[Arm]:
        """Everything asked in L1, and again after a restore from L2."""
        before = self.exact(client, exact(name), None)
        scores = [client.score(prompt, "host") for prompt in self.prompts.prompts]
        asked = () if self.float32 else self.prompts.prompts
        greedy = [client.continue_greedily(prompt, "host") for prompt in asked]
        return [before, Arm(name=name, against=before.name, scores=scores, greedy=greedy or None)]

    def trips(self, client: Client, name: str) -> list[Arm]:
        """Scores in L1, and after the last restore, of what was encoded again before each."""
        before = []
        for prompt in self.prompts.prompts:
            client.fill(prompt)
            before.append(client.score(prompt, "device"))
        start = encoded_tokens(client.server)
        for _ in range(TRIPS - 1):
            for prompt in self.prompts.prompts:
                client.restore(prompt)
        # SGLang gives up second copies of prefixes before those of the continuations that hang on them.
        scores = [client.score(prompt, "host") for prompt in self.prompts.prompts]
        restored = TRIPS * sum(prompt.prefix_tokens for prompt in self.prompts.prompts)
        share = (encoded_tokens(client.server) - start) / restored
        if share < ENCODED_AGAIN:
            raise NotMeasured(f"L2 encoded {share:.2f} tokens for each restored; at least {ENCODED_AGAIN} wanted")
        reference = Arm(name=exact(name), scores=before)
        return [reference, Arm(name=name, against=reference.name, scores=scores, encoded_per_restored=share)]

    def plans(self, representations: Sequence[str]) -> Iterator[Plan]:
        """Every server: for the lossless representation, for those asked about, and for the two yardsticks."""
        count = len(self.prompts.prompts)
        generated = 0 if self.float32 else count
        plan = partial(Plan, l1_tokens=self.l1_tokens, chunk=self.one_piece, float32=self.float32)

        def l2(name: str, tokens: int, l1_tokens: int) -> list[str]:
            words = ["--enable-hierarchical-cache", "--hicache-representation", name]
            return [*words, "--hicache-ratio", f"{tokens / l1_tokens:.4f}"]

        for name in dict.fromkeys((LOSSLESS, *representations)):
            everything = self.total + count * (GENERATED + SPARE)
            yield plan(
                name=name,
                arguments=l2(name, everything, self.l1_tokens),
                measure=partial(self.restored, name=name),
                answers=3 * count + 2 * generated,
            )
        for name in dict.fromkeys(representations) if self.enough_for_trips else ():
            # L2 is a little too small for second copies: that of a restored prefix is given up while it is in L1.
            l1_tokens, spare = 4 * self.longest, 2 * self.longest
            words = l2(name, self.total - l1_tokens + spare, l1_tokens)
            yield plan(
                name=after_trips(name),
                arguments=[*words, "--hicache-write-policy", "write_back", "--enable-metrics"],
                measure=partial(self.trips, name=after_trips(name)),
                answers=(TRIPS + 2) * count,
                l1_tokens=l1_tokens,
                optional=True,
            )
        yield plan(
            name=YARDSTICK,
            arguments=["--kv-cache-dtype", FP8],
            measure=lambda client: [self.exact(client, YARDSTICK, exact(LOSSLESS))],
            answers=2 * count + generated,
            optional=True,
        )
        yield plan(
            name=RECOMPUTED,
            measure=lambda client: [self.exact(client, RECOMPUTED, LOSSLESS)],
            answers=2 * count + generated,
            chunk=self.small_pieces,
        )


def after_trips(name: str) -> str:
    """Name of the arm whose KV was encoded `TRIPS` times."""
    return f"{name} {TRIPS} trips"


def exact(name: str) -> str:
    """Name of the run before any eviction on the server of an arm."""
    return f"exact ({name})"


def encoded_tokens(server: HttpServer) -> float:
    page = requests.get(f"{server.url}/metrics", timeout=60).text
    return metric(page, BACKUP_TOKENS)


def serve(plan: Plan, model: Path, shared: int, log: Path, progress: Progress, stop: Event) -> list[Arm]:
    """One server, from its start to its end, which comes with the next answer once `stop` is set.

    Raises:
        NotMeasured: it did not come up, did not do what the plan says, or was stopped.
    """

    def asked() -> None:
        if stop.is_set():
            raise NotMeasured("stopped")
        progress.advance(task)

    task = progress.add_task(f"{plan.name}: starting", total=plan.answers)
    port = free_port()
    device = cpu.words(cpu.FLOAT32) if plan.float32 or not torch.cuda.is_available() else []
    arguments = ["--chunked-prefill-size", str(plan.chunk), *COMMON, *device, *plan.arguments]
    # Triton attention rounds float32 queries and attention weights to the BF16 of the KV; PyTorch's own widens the KV.
    attention = "torch_native" if plan.float32 else "triton"
    command = launch(
        model, port, l1_tokens=plan.l1_tokens, page_size=1, memory=MEMORY, attention=attention, arguments=arguments
    )
    try:
        with http(command, log, port, environment()) as server:
            progress.update(task, description=plan.name)
            arms = plan.measure(Client(server, shared, asked))
    except (AssertionError, requests.RequestException) as error:  # what `http` raises of a server that stopped
        causes = re.findall(r"^\w+(?:Error|Exception): .*$", log.read_text(), re.M) or str(error).splitlines()
        raise NotMeasured(causes[0]) from error
    progress.print(f"{plan.name}: done")
    return arms


def run_all(run: Run, model: Path, representations: Sequence[str], at_once: int, logs: Path) -> dict[str, Any]:
    """Serve every plan, some of them at a time; the part of the result that comes from the answers."""
    prompts = run.prompts
    plans = list(run.plans(representations))
    columns = (TimeElapsedColumn(), BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("{task.description}"))
    unavailable = {} if run.enough_for_trips else {f"{TRIPS} trips": "too few prompts (--prompts, --count)"}
    with Progress(*columns, console=Console(stderr=True)) as progress, ThreadPoolExecutor(at_once) as pool:
        stop = Event()
        try:
            served = {
                pool.submit(serve, plan, model, prompts.shared_tokens, logs / f"{plan.name}.log", progress, stop): plan
                for plan in plans
            }
            for future in as_completed(served):
                plan = served[future]
                try:
                    future.result()
                except NotMeasured as error:
                    if not plan.optional:
                        raise NotMeasured(f"{plan.name}: {error}; its log is {logs / plan.name}.log") from error
                    unavailable[plan.name] = str(error)
        except BaseException:  # Ctrl-C too: no other server is to start, nor to be asked to the end
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    arms = {arm.name: arm for future in served if not future.exception() for arm in future.result()}
    return summarise(prompts.prompts, arms, unavailable)


model_option = click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of a Hugging Face model, instead of SmolLM2-135M-Instruct.",
)
result_argument = click.argument("result", type=click.Path(exists=True, dir_okay=False, path_type=Path))


@click.group(cls=Commands, help=__doc__)
def main() -> None:
    pass


@main.command("prompts")
@model_option
@click.option("--out", required=True, type=click.Path(path_type=Path), callback=writable, help="JSON file to write.")
def prompts_command(model: Path | None, out: Path) -> None:
    """Download texts, cut them into prompts in a model's tokens, and keep them in one file."""
    prompts = make(model or sample_model.fetch())
    prompts.save(out)
    click.echo(
        f"{out}: {len(prompts.prompts)} prompts, {sum(len(prompt.tokens) for prompt in prompts.prompts):,} tokens"
    )


@main.command("run")
@model_option
@click.option("--prompts", "file", type=click.Path(exists=True, path_type=Path), help="File of the prompts command.")
@click.option("--count", type=click.IntRange(min=1), help="Use the first so many of the prompts only.")
@click.option(
    "--representation", "names", multiple=True, default=("int8", "k6v4", "int4"), show_default=True, help="Beside bf16."
)
@click.option("--float32", is_flag=True, help="Compute in float32 on KV in BF16: a lower noise floor. Scores only.")
@click.option("--at-once", default=1, show_default=True, type=click.IntRange(min=1), help="Servers side by side.")
@click.option("--out", required=True, type=click.Path(path_type=Path), callback=writable, help="JSON file to write.")
def run_command(
    model: Path | None,
    file: Path | None,
    count: int | None,
    names: tuple[str, ...],
    float32: bool,
    at_once: int,
    out: Path,
) -> None:
    """Serve every arm, compare the answers, write the result and print its tables.

    The exit status is 1 if nothing can be reported or a bar does not hold. On a GPU with room for them, --at-once 9
    runs all servers side by side.
    """
    for name in names:
        registry.get(name)  # refuses an unknown name before anything takes time
    model = model or sample_model.fetch()
    prompts = Prompts.load(file) if file else make(model)
    prompts = evolve(prompts, prompts=prompts.prompts[:count])
    prompts.require_ids_of(model)
    run = Run(prompts, float32)
    logs = Path(tempfile.mkdtemp(prefix="hiqcache-quality-"))
    end_servers_on_sigterm()
    found = run_all(run, model, names, at_once, logs)
    shutil.rmtree(logs)  # what failed keeps its logs
    result = {
        "what": "answers of a model whose prefixes were restored from an encoded L2, against exact KV",
        **provenance("python tools/quality.py run"),
        "model": {"name": model.name, "tokenizer": prompts.tokenizer},
        "settings": {
            "scored_tokens": prompts.continuation_tokens - 1,
            "generated_tokens": 0 if float32 else GENERATED,
            "top": TOP,
            "chunked_prefill_size": {"recomputed": run.small_pieces, "all others": run.one_piece},
            "arithmetic": "as the model's own" if torch.cuda.is_available() and not float32 else "float32, KV in BF16",
            "logits": "float32",
        },
        "prompts": [
            {"kind": p.kind, "prefix_tokens": p.prefix_tokens, "origin": p.origin, "sha256": p.sha256}
            for p in prompts.prompts
        ],
        **found,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    click.echo(markdown(result))
    sys.exit(any(bar["holds"] is False for bar in result["bars"].values()))


@main.command("report")
@result_argument
def report_command(result: Path) -> None:
    """Print a result's tables in Markdown."""
    click.echo(markdown(read_result(result, *PARTS)))


@main.command("plot")
@result_argument
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), callback=picture, help="SVG or PNG file to write."
)
def plot_command(result: Path, out: Path) -> None:
    """Draw a result."""
    plot(read_result(result, *PARTS), out)


if __name__ == "__main__":
    main()
