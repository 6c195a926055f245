"""Does this model have key biases that its representation does not bear? Each scheduler looks at the heads it holds.

Nothing here may stop a server: a model that cannot be read is not warned of, and the log says so at debug level.
"""

import logging
import math
from collections.abc import Iterator
from typing import Any, TypeVar

import attrs
import torch
from sglang.srt.distributed.utils import get_group_rank_size
from sglang.srt.layers.linear import QKVParallelLinear
from sglang.srt.layers.radix_attention import RadixAttention
from torch import nn

from hiqcache import registry
from hiqcache.key_biases import BiasedHead, amplitudes, biased_heads, warning
from hiqcache.representation import HostRepresentation

logger = logging.getLogger(__name__)

KEY = "hiqcache_key_biases"
"""Field of a scheduler's init info: the heads that it would warn of."""
INPUT_NORMS = ("input_layernorm", "ln_1", "self_attn_layer_norm")
"""What models call the norm in front of their attention."""
SAMPLES = 256
"""Hidden states to try: enough for a standard deviation within a tenth."""

Module = TypeVar("Module", bound=nn.Module)


def findings(scheduler: Any, representation: HostRepresentation) -> list[tuple]:
    """Heads on this rank whose bias is beyond `representation.key_bias_limit`, as tuples of `BiasedHead`."""
    try:
        if representation.key_bias_limit == math.inf:
            return []
        runner = scheduler.tp_worker.model_runner
        return [attrs.astuple(head) for head in heads_of(runner.model, runner.dtype, representation.key_bias_limit)]
    except Exception as error:  # whatever a model is like, the server goes on
        logger.debug("hiqcache: key biases were not checked: %s: %s", type(error).__name__, error)
        return []


def merged(infos: list[dict[str, Any]]) -> list[tuple]:
    """What all schedulers found, taken out of their init infos."""
    return [head for info in infos for head in info.pop(KEY, ())]


def warn(name: str, infos: list[dict[str, Any]]) -> None:
    """Log once what all schedulers found, and take it out of their init infos."""
    found = {BiasedHead(*head) for head in merged(infos)}  # replicas find the same heads
    if found:
        logger.warning("hiqcache: %s", warning(name, registry.get(name).key_bias_limit, found))


@torch.inference_mode()
def heads_of(model: nn.Module, dtype: torch.dtype, limit: float) -> list[BiasedHead]:
    """Heads of `model`, on this rank, with a bias beyond `limit`.

    The model's own norm and projection are run on random hidden states. K's mean is its bias then, and its standard
    deviation is the norm of its row of weights, times the norm's. This way any weight format is understood, whether
    quantised, packed or offloaded. Models without biases are told by their parameters alone.

    Args:
        model: as SGLang loaded it.
        dtype: of its hidden states.
        limit: a representation's `key_bias_limit`.

    Raises:
        LookupError: it has no attention with a fused QKV projection, or one with a bias behind an unknown norm.
    """
    found, seen = [], False
    for layer, attention, projection, cache in _attentions(model):
        seen = True
        if projection.bias is None:
            continue
        norm = next((child for name, child in layer.named_children() if name in INPUT_NORMS), None)
        if norm is None:
            raise LookupError(f"{type(layer).__name__} has none of {', '.join(INPUT_NORMS)}")
        k = _keys(attention, projection, norm, dtype)
        rope = getattr(attention, "rotary_emb", None)
        rotary_dim, interleaved = (rope.rotary_dim, not rope.is_neox_style) if rope is not None else (0, False)
        rank, _ = get_group_rank_size(projection.kv_tp_group)
        first_head = rank // projection.num_kv_head_replicas * projection.num_kv_heads
        biases = amplitudes(k.mean(0), rotary_dim, interleaved)
        found += biased_heads(cache.layer_id, first_head, biases, k.std(0), limit)
    if not seen:
        raise LookupError(f"{type(model).__name__} has no attention with a fused QKV projection")
    return found


def _attentions(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module, QKVParallelLinear, RadixAttention]]:
    """(layer, attention, projection, cache) wherever a layer's attention has a fused projection and a KV cache."""
    for layer in model.modules():
        for attention in layer.children():
            projection, cache = _child(attention, QKVParallelLinear), _child(attention, RadixAttention)
            if projection is not None and cache is not None:
                yield layer, attention, projection, cache


def _child(parent: nn.Module, kind: type[Module]) -> Module | None:
    children = (getattr(child, "base_layer", child) for child in parent.children())  # beneath LoRA's wrapper
    return next((child for child in children if isinstance(child, kind)), None)


def _keys(attention: nn.Module, projection: QKVParallelLinear, norm: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """K before RoPE for random hidden states, `[SAMPLES, heads, dim]` float32 on the CPU."""
    noise = torch.randn(SAMPLES, projection.hidden_size, generator=torch.Generator().manual_seed(0))
    qkv, _ = projection(norm(noise.to(next(projection.parameters()).device, dtype)))
    k = qkv[:, projection.q_proj_shard_size :][:, : projection.kv_proj_shard_size]
    k = k.reshape(-1, projection.head_size)
    if (k_norm := getattr(attention, "k_norm", None)) is not None:
        k = k_norm(k)
    return k.view(SAMPLES, projection.num_kv_heads, projection.head_size).float().cpu()
