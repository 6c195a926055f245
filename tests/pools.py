"""Host pools over SGLang's real device pools, without a server."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from sglang.srt.mem_cache.device_pool_info import MHABufferInfo
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from hiqcache import registry
from hiqcache.sglang import pool as pool_module
from hiqcache.sglang.pool import RepresentationHostPool


def device_pool(**more: Any) -> MHATokenToKVPool:
    shape = {"size": 64, "page_size": 4, "head_num": 3, "head_dim": 64, "layer_num": 2, "dtype": torch.bfloat16}
    return MHATokenToKVPool(**shape | {"device": "cpu", "enable_memory_saver": False} | more)


def buffer_info(**more: Any) -> MHABufferInfo:
    info = device_pool(**more).get_device_pool_infos()[0].buffer_info
    assert isinstance(info, MHABufferInfo)
    return info


def host_pool(
    info: MHABufferInfo,
    *,
    name: str = "int8",
    layout: str = "page_first",
    page_size: int = 4,
    tp_size: int = 1,
    **more: Any,
) -> RepresentationHostPool:
    options = {"device_capacity_tokens": 64, "start_layer": 0, "end_layer": 1} | more
    with mock.patch.object(pool_module, "get_parallel", return_value=SimpleNamespace(attn_tp_size=tp_size)):
        return RepresentationHostPool(info, 2.0, 0, page_size, layout, representation=registry.get(name), **options)
