"""Does a running server really keep encoded KV in L2 and serve from it? For operators.

    python tools/smoke.py --url http://localhost:30000

Sends prompts of random tokens, one to three times as many as L1 holds, until the first of them are gone from L1, and
asks for those again. Nothing is flushed: what others have cached moves from L1 to L2 as under any other traffic, and
leaves L2 if that is full. Needs `attrs`, `click` and `requests` alone, so it may run on another machine.

Exit status 0 if tokens were restored from L2 and every counter agrees with the representation; 1 otherwise.
"""

import random
import time
from typing import Any

import click
import requests
from attrs import define
from counters import BACKUP_BYTES, BACKUP_TOKENS, RESTORE_BYTES, RESTORE_TOKENS, metric

PROBES = 4
PROBE_TOKENS, FILLER_TOKENS = 1024, 4096
LEAST_TOKENS = 32
"""Of a probe; SGLang does not restore fewer than 10."""
TIMEOUT = 600
ASKED = ("version", "dp_size", "max_total_num_tokens", "page_size", "max_req_input_len", "hicache_write_policy")
"""What is read from `/server_info`."""


class Failed(click.ClickException):
    """The server does not do what it should, or is not there; the text says what would help."""


@define
class Client:
    """A server, asked with its key."""

    url: str
    key: str | None

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> requests.Response:
        """
        Raises:
            Failed: nobody answers, or the key is wrong.
        """
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            answer = requests.request(method, self.url + path, json=body, headers=headers, timeout=TIMEOUT)
        except requests.RequestException as error:
            raise Failed(f"no server answers at {self.url}: {error}") from error
        if answer.status_code in (401, 403):
            given = "not the one given with --api-key" if self.key else "given with --api-key"
            raise Failed(f"{self.url} wants a key, {given}: the one that the server was started with")
        return answer

    def info(self) -> dict[str, Any]:
        """`/server_info` of a server with hiqcache.

        Raises:
            Failed: it is none.
        """
        answer = self.ask("GET", "/server_info")
        try:
            info = answer.json() if answer.ok else {}
        except requests.JSONDecodeError:
            info = {}
        missing = [name for name in ASKED if not isinstance(info, dict) or name not in info]
        if missing:
            raise Failed(
                f"what answers at {self.url} is not SGLang: /server_info has status {answer.status_code} and no "
                f"{', '.join(missing)}"
            )
        if not info.get("hiqcache"):
            raise Failed(
                f"SGLang {info['version']} at {self.url} serves without hiqcache; start it with "
                "--enable-hierarchical-cache --hicache-representation NAME"
            )
        if info["dp_size"] != 1:
            raise Failed(
                f"the server has --dp-size {info['dp_size']}; allowed: 1, as a prompt may not come back to the replica "
                "that has it. Ask a replica of its own."
            )
        return info

    def generate(self, prompts: list[list[int]]) -> list[dict[str, int]]:
        """Tokens of each prompt that came from L1 ("device") and from L2 ("host").

        Raises:
            Failed: the server could not answer.
        """
        sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        answer = self.ask("POST", "/generate", {"input_ids": prompts, "sampling_params": sampling})
        try:
            answer.raise_for_status()
            details = [entry["meta_info"].get("cached_tokens_details") for entry in answer.json()]
        except (requests.RequestException, KeyError, TypeError, AttributeError) as error:
            raise Failed(f"the server could not answer: status {answer.status_code}, {answer.text[:500]!r}") from error
        return [found or {"device": 0, "host": 0} for found in details]

    def metrics(self) -> str | None:
        """The `/metrics` page; None where the server has none."""
        answer = self.ask("GET", "/metrics")
        return answer.text if answer.ok else None


@define
class Sizes:
    """What is sent, in tokens.

    Attributes:
        l1: tokens in L1.
        probe: of a prompt that is to come back, in whole pages and one.
        filler: of a prompt that pushes others out.
    """

    l1: int
    probe: int
    filler: int

    @classmethod
    def of(cls, info: dict[str, Any]) -> "Sizes":
        """
        Raises:
            Failed: the server's limits leave no room for a prompt that could come back.
        """
        l1, page, longest = info["max_total_num_tokens"], info["page_size"], info["max_req_input_len"] - 1
        probe = min(PROBE_TOKENS, longest - 1, l1 // (2 * PROBES)) // page * page
        if probe < LEAST_TOKENS:
            raise Failed(
                f"L1 holds {l1:,} tokens and a prompt {longest:,}, in pages of {page}: too few for {PROBES} prompts of "
                f"{max(page, LEAST_TOKENS)}"
            )
        return cls(l1, probe + 1, min(FILLER_TOKENS, longest, l1 // 4))


def prompt(tokens: int) -> list[int]:
    """Never seen before, and within every vocabulary."""
    return [random.randrange(100, 1000) for _ in range(tokens)]


def fill(client: Client, sizes: Sizes, tokens: int) -> None:
    """Push this many tokens out of L1."""
    sent = tenths = 0
    while sent < tokens:
        client.generate([prompt(sizes.filler) for _ in range(2)])
        sent += 2 * sizes.filler
        if 10 * sent // tokens > tenths:
            tenths = 10 * sent // tokens
            click.echo(f"  {sent:,} of {tokens:,} tokens")


def restore(client: Client, sizes: Sizes) -> int:
    """Tokens that came back from L2; 0 if none did, however much was pushed out of L1."""
    probes = [prompt(sizes.probe) for _ in range(PROBES)]
    for probe in probes:
        for _ in range(2):  # the second time matters to --hicache-write-policy write_through_selective
            client.generate([probe])
    click.echo(f"{PROBES} prompts of {sizes.probe:,} tokens are cached; filling L1 with others:")
    tokens = sizes.l1
    while probes:
        fill(client, sizes, tokens)
        while probes:
            (found,) = client.generate([probes.pop(0)])
            if found["host"]:
                return found["host"] + sum(entry["host"] for probe in probes for entry in client.generate([probe]))
            if found["device"]:
                break  # asked too early, and new in L1 again
        tokens = sizes.l1 // 2
    return 0


def moved(before: str, after: str, tokens: str, size: str) -> tuple[float, float]:
    """Tokens moved meanwhile, and their bytes."""
    return metric(after, tokens) - metric(before, tokens), metric(after, size) - metric(before, size)


@click.command(help=__doc__)
@click.option("--url", required=True, help="Where the server listens, such as http://localhost:30000.")
@click.option("--api-key", help="The server's --api-key, if it has one.")
def main(url: str, api_key: str | None) -> None:
    client = Client(url.rstrip("/"), api_key)
    info = client.info()
    report, sizes = info["hiqcache"][0], Sizes.of(info)
    click.echo(
        f"SGLang {info['version']} keeps L2 as {report['representation']} ({report['format_tag']}): "
        f"{report['bytes_per_token']:,} bytes per token, {report['tokens']:,} tokens; L1 holds {sizes.l1:,}"
    )
    before = client.metrics()
    restored = restore(client, sizes)
    if not restored:
        raise Failed(
            f"FAIL: nothing was restored from L2 (L1 {sizes.l1:,} tokens, L2 {report['tokens']:,}, write policy "
            f"{info['hicache_write_policy']}); an L2 smaller than L1 or much other traffic may have dropped the prompts"
        )
    time.sleep(1)  # transfers are counted a moment after they are used
    after = client.metrics()
    if before is None or after is None:
        click.echo("bytes per token were not measured: the server has no /metrics; start it with --enable-metrics")
    else:
        for what, counters in {
            "backed up": (BACKUP_TOKENS, BACKUP_BYTES),
            "restored": (RESTORE_TOKENS, RESTORE_BYTES),
        }.items():
            tokens, size = moved(before, after, *counters)
            if not tokens or size / tokens != report["bytes_per_token"]:
                raise Failed(
                    f"FAIL: SGLang counted {size:,.0f} bytes {what} for {tokens:,.0f} tokens; "
                    f"{report['representation']} has {report['bytes_per_token']:,} bytes per token"
                )
            click.echo(f"{what} meanwhile: {tokens:,.0f} tokens, {size / tokens:,.0f} bytes per token")
    click.echo(f"PASS: {restored:,} tokens of this tool's prompts came back from L2 as {report['representation']}")


if __name__ == "__main__":
    main()
