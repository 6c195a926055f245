"""Which channels of K does this model's bias raise? Each scheduler looks at its own heads, once their pool is built.

Nothing here may stop a server: where a model cannot be read, no channel is divided, and the log says so.
"""

import logging
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from sglang.srt.layers.linear import QKVParallelLinear
from sglang.srt.layers.radix_attention import RadixAttention
from torch import nn

from hiqcache.exponents import KeyExponents
from hiqcache.geometry import KVGeometry
from hiqcache.key_biases import PAGE, amplitudes, exponents
from hiqcache.sglang.pool import RepresentationHostPool

logger = logging.getLogger(__name__)

KEY = "hiqcache_key_biases"
"""Field of a scheduler's init info: the layers and the number of heads whose channels it divides, and by how much."""
INPUT_NORMS = ("input_layernorm", "ln_1", "self_attn_layer_norm")
"""What models call the norm in front of their attention."""
SAMPLES = 256
"""Hidden states to try: enough for a standard deviation within a tenth."""

Module = TypeVar("Module", bound=nn.Module)


def scale(runner: Any, pool: RepresentationHostPool) -> None:
    """Divide the channels that a bias raises, from the first transfer of a pool on.

    Args:
        runner: SGLang's model runner, its weights loaded.
        pool: over its KV pool; nothing has been transferred.
    """
    if not pool.representation.scales_keys:
        return
    try:
        first_layer = getattr(runner.token_to_kv_pool, "start_layer", None) or 0
        pool.scale_keys(exponents_of(runner.model, runner.dtype, pool.representation.geometry, first_layer))
    except Exception as error:  # whatever a model is like, the server goes on
        logger.warning(
            "hiqcache: whether this model has key biases is unknown (%s: %s). If it has large ones, what comes back "
            "from L2 is inaccurate: %s",
            type(error).__name__,
            error,
            PAGE,
        )


def findings(pool: RepresentationHostPool) -> list[tuple[int, int, int]]:
    """(layer, heads, largest exponent) of each layer of a pool in which channels are divided."""
    largest = pool.key_exponents.values.amax(-1)
    return [
        (layer, int((heads > 0).sum()), int(heads.max())) for layer, heads in enumerate(largest) if bool(heads.any())
    ]


def merged(infos: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """What all schedulers found, taken out of their init infos."""
    return [layer for info in infos for layer in info.pop(KEY, ())]


def tell(infos: list[dict[str, Any]]) -> None:
    """Log once what all schedulers found, and take it out of their init infos."""
    if found := merged(infos):
        logger.info(
            "hiqcache: K has biases; in %d layer(s) channels are divided by powers of two, up to %d, before they are "
            "encoded: %s",
            len({layer for layer, _, _ in found}),
            2 ** max(exponent for _, _, exponent in found),
            PAGE,
        )


@torch.inference_mode()
def exponents_of(model: nn.Module, dtype: torch.dtype, geometry: KVGeometry, first_layer: int) -> KeyExponents:
    """Exponents of the K heads on this rank.

    The model's own norm and projection are run on random hidden states. K's mean is its bias then, and its standard
    deviation is the norm of its row of weights, times the norm's. This way any weight format is understood, whether
    quantised, packed or offloaded. Models without biases are told by their parameters alone.

    Args:
        model: as SGLang loaded it.
        dtype: of its hidden states.
        geometry: of the rank's KV.
        first_layer: number, in the whole model, of the rank's first layer.

    Raises:
        LookupError: it has no attention with a fused QKV projection, or one with a bias behind an unknown norm.
    """
    values = torch.zeros(geometry.layers, geometry.heads, geometry.head_dim, dtype=torch.int8)
    seen = False
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
        values[cache.layer_id - first_layer] = exponents(amplitudes(k.mean(0), rotary_dim, interleaved), k.std(0))
    if not seen:
        raise LookupError(f"{type(model).__name__} has no attention with a fused QKV projection")
    return KeyExponents(values)


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
