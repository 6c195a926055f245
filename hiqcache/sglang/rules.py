"""Server settings under which an encoded L2 cannot be served, checked before any process is started.

What only the built pools show (the model's geometry, the device layout, pools beside the KV pool) is checked by the
host pool and by `proof.py`.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from attrs import frozen

from hiqcache.arena import LAYOUTS
from hiqcache.geometry import Violation


@frozen
class _Rule:
    field: str
    """Name of the setting in SGLang's resolved configuration."""
    holds: Callable[[Any], bool]
    allowed: str
    why: str

    @property
    def flag(self) -> str:
        return "--" + self.field.replace("_", "-")


def _off(field: str, why: str) -> _Rule:
    return _Rule(field, lambda value: not value, "unset", why)


_RULES = (
    _Rule("enable_hierarchical_cache", bool, "on", "HiCache itself"),
    _Rule("disable_radix_cache", lambda value: not value, "off", "HiCache needs the radix cache"),
    _Rule("hicache_mem_layout", LAYOUTS.__contains__, " or ".join(LAYOUTS), "host memory layout"),
    _Rule("hicache_io_backend", "kernel".__eq__, "kernel", "host transfer backend"),
    _Rule("hicache_host_memory_mode", "cache".__eq__, "cache", "host memory as a tier, not a buffer before storage"),
    _off("hicache_storage_backend", "storage tier (L3): its pages would hold encoded bytes under BF16 keys"),
    _Rule("kv_cache_dtype", {"auto", "bf16", "bfloat16"}.__contains__, "auto or bf16", "element type of device KV"),
    _off("speculative_algorithm", "speculative decoding: its draft model has a KV pool of its own"),
    _Rule("disaggregation_mode", "null".__eq__, "null", "prefill/decode disaggregation writes raw bytes past the pool"),
    _off("disaggregation_decode_enable_offload_kvcache", "decode offload builds a host pool of its own"),
    _off("enable_hisparse", "HiSparse builds a host pool of its own"),
    _off("enable_unified_memory", "unified memory: its device rows are strided and move"),
    _off("enable_kv_cache_sharding", "page interleave: its pool wraps the host pool"),
    _off("enable_dsa_cache_layer_split", "layer sharding"),
    _Rule("dcp_size", (1).__eq__, "1", "decode context parallelism: SGLang has it for MLA only"),
    _off("radix_cache_backend", "another radix cache"),
    _off("enable_lmcache", "LMCache replaces HiCache"),
    _off("enable_flexkv", "FlexKV replaces HiCache"),
    _off("enable_unified_cache_external_linker", "an external cache replaces HiCache"),
    _Rule(
        "elastic_ep_backend", {None, "none"}.__contains__, "none", "elastic EP: nobody compares ranks that join later"
    ),
    _off("dllm_algorithm", "diffusion language models run without HiCache"),
)

_DUMP_RULES = (
    _Rule("tokenizer_worker_num", (1).__eq__, "1", "a live dump is asked for through the one process with its route"),
    _Rule("dp_size", (1).__eq__, "1", "a live dump is of one replica"),
    _Rule("pp_size", (1).__eq__, "1", "a live dump begins on all ranks in one step"),
)


def violations(settings: Any) -> Iterator[Violation]:
    """Every rule that a server's resolved settings break.

    Args:
        settings: SGLang's resolved configuration, settings as attributes (`resolving_view(server_args)`).

    Raises:
        AttributeError: SGLang no longer has one of the settings; a rule that cannot be checked is not passed over.
    """
    yield from _broken(_RULES, settings)


def dump_violations(settings: Any) -> Iterator[Violation]:
    """The same for a server that is asked to write dumps, beside `violations`."""
    yield from _broken(_DUMP_RULES, settings)


def _broken(rules: Iterable[_Rule], settings: Any) -> Iterator[Violation]:
    for rule in rules:
        value = getattr(settings, rule.field)
        if not rule.holds(value):
            yield Violation(rule=rule.why, seen=repr(value), allowed=rule.allowed, flag=rule.flag)
