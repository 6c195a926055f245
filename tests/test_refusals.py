"""Whoever asked for a representation gets it or gets a sentence: settings, geometries and pools that are refused.

Servers here are `sgl.Engine` and SGLang's own command-line parsing; each is stopped before a process is started. The
rest builds host pools over SGLang's real device pools.
"""

import importlib
import inspect
import json
import logging
import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from serving import device_settings, environment, start_refused

from hiqcache.geometry import HiqcacheError, UnsupportedGeometry
from hiqcache.representation import HostRepresentation

sglang = pytest.importorskip("sglang", reason="needs the sglang extra")

from pools import buffer_info, device_pool, host_pool  # noqa: E402
from sglang.srt.managers.scheduler import Scheduler  # noqa: E402
from sglang.srt.mem_cache.device_pool_info import (  # noqa: E402
    KVBufferLayout,
    KVScaleBuffers,
    KVScaleLayout,
    MHABufferInfo,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402
from sglang.srt.plugins import load_plugins  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402
from sglang.srt.server_args import ServerArgs, prepare_server_args  # noqa: E402

from hiqcache.sglang import asking, choice, hooks, pool, proof, rules, support  # noqa: E402
from hiqcache.sglang.choice import ALIAS, FLAG, PARSED, Choice, Refused, chosen  # noqa: E402
from hiqcache.sglang.pool import RepresentationHostPool  # noqa: E402
from hiqcache.sglang.versions import ALLOW_UNTESTED  # noqa: E402

load_plugins()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A model that is only a config.json: enough for SGLang to resolve its settings."""
    directory = tmp_path_factory.mktemp("model")
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 192,
        "intermediate_size": 256,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "num_hidden_layers": 2,
        "vocab_size": 256,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


@pytest.fixture(autouse=True)
def no_command_line_yet():
    """hiqcache remembers that this process parsed its flag."""
    yield
    os.environ.pop(PARSED, None)


# -- settings of a server ------------------------------------------------------------------------------------------

REFUSED_SETTINGS = [
    ({"enable_hierarchical_cache": False}, "add --enable-hierarchical-cache"),
    ({"hicache_representation": "int9"}, r"unknown representation 'int9'; registered: .*bf16.*int8"),
    ({"hicache_mem_layout": "page_head"}, "saw 'page_head'; allowed: layer_first or page_first"),
    ({"hicache_mem_layout": "page_first_kv_split"}, "saw 'page_first_kv_split'; allowed: layer_first or page_first"),
    ({"hicache_mem_layout": "page_first_direct"}, "--hicache-mem-layout(.|\n)*--hicache-io-backend"),
    ({"hicache_io_backend": "direct"}, "saw 'direct'; allowed: kernel; changed by --hicache-io-backend"),
    ({"hicache_io_backend": "kernel_ascend"}, "saw 'kernel_ascend'; allowed: kernel"),
    ({"hicache_storage_backend": "file"}, r"storage tier \(L3\).*saw 'file'; allowed: unset"),
    (
        {"hicache_host_memory_mode": "buffer_only", "hicache_storage_backend": "file"},
        "saw 'buffer_only'; allowed: cache(.|\n)*saw 'file'",
    ),
    ({"kv_cache_dtype": "fp8_e4m3"}, "saw 'fp8_e4m3'; allowed: auto or bf16; changed by --kv-cache-dtype"),
    ({"kv_cache_dtype": "fp8_e5m2"}, "saw 'fp8_e5m2'; allowed: auto or bf16"),
    ({"speculative_algorithm": "NGRAM"}, "speculative decoding.*saw 'NGRAM'; allowed: unset"),
    ({"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "{config}"}, "saw 'EAGLE'; allowed: unset"),
    ({"disaggregation_mode": "prefill"}, "saw 'prefill'; allowed: null; changed by --disaggregation-mode"),
    ({"radix_cache_backend": "other"}, "saw 'other'; allowed: unset; changed by --radix-cache-backend"),
    ({"enable_flexkv": True}, "FlexKV replaces HiCache.*changed by --enable-flexkv"),
    ({"use_ray": True}, "--use-ray starts schedulers that hiqcache's launcher cannot verify"),
    ({"smg_grpc_mode": True}, "--smg-grpc-mode starts schedulers"),
    ({"encoder_only": True}, "--encoder-only starts schedulers"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED_SETTINGS, ids=lambda value: str(value)[:60])
def test_engine_with_refused_settings(config: pathlib.Path, settings: dict[str, Any], message: str):
    settings = {name: str(config) if value == "{config}" else value for name, value in settings.items()}
    with pytest.raises(Refused, match=message):
        start_refused(config, **settings)


STOPPED_BY_SGLANG = [
    {"disable_radix_cache": True},
    {"disaggregation_mode": "decode"},
    {"disaggregation_mode": "decode", "disaggregation_decode_enable_offload_kvcache": True},
    {"enable_hisparse": True},
    {"enable_unified_memory": True},
    {"enable_kv_cache_sharding": True},
    {"enable_dsa_cache_layer_split": True},
    {"dcp_size": 2},
    {"enable_lmcache": True},
    {"enable_unified_cache_external_linker": True},
    {"dllm_algorithm": "LowConfidence"},
]


@pytest.mark.parametrize("settings", STOPPED_BY_SGLANG, ids=str)
def test_settings_that_sglang_itself_stops(config: pathlib.Path, settings: dict[str, Any]):
    """With this model SGLang's own checks come first; where they would let the setting pass, ours does not."""
    with pytest.raises((ValueError, AssertionError, NotImplementedError, RuntimeError)):
        start_refused(config, **settings)
    resolved = dict.fromkeys((rule.field for rule in rules._RULES), None) | {
        "enable_hierarchical_cache": True,
        "hicache_mem_layout": "page_first",
        "hicache_io_backend": "kernel",
        "hicache_host_memory_mode": "cache",
        "kv_cache_dtype": "auto",
        "disaggregation_mode": "null",
        "dcp_size": 1,
    }
    assert not list(rules.violations(SimpleNamespace(**resolved)))
    broken = list(rules.violations(SimpleNamespace(**resolved | settings)))
    assert {violation.flag for violation in broken} == {"--" + name.replace("_", "-") for name in settings}


def test_every_broken_setting_is_listed(config: pathlib.Path):
    with pytest.raises(Refused) as refused:
        start_refused(
            config, hicache_io_backend="kernel_ascend", kv_cache_dtype="fp8_e4m3", hicache_mem_layout="page_head"
        )
    assert str(refused.value).count("allowed:") == 3


def test_a_setting_that_sglang_no_longer_has_is_not_passed_over():
    with pytest.raises(AttributeError):
        list(rules.violations(SimpleNamespace(enable_hierarchical_cache=True)))


# -- asking ----------------------------------------------------------------------------------------------------------


def parse(config: pathlib.Path, *words: str) -> ServerArgs:
    return prepare_server_args(["--model-path", str(config), *words])


def test_the_flag_travels_on_the_record(config: pathlib.Path):
    import pickle

    record = parse(config, "--enable-hierarchical-cache", "--hicache-representation", "int8")
    for copy in (record, pickle.loads(pickle.dumps(record))):
        assert chosen(copy) == Choice("int8", "--hicache-representation", command_line=True)
    assert chosen(parse(config, "--enable-hierarchical-cache")) is None


def test_yaml_config(config: pathlib.Path, tmp_path: pathlib.Path):
    file = tmp_path / "serve.yaml"
    file.write_text("enable-hierarchical-cache: true\nhicache-representation: bf16\n")
    asked = chosen(parse(config, "--config", str(file)))
    assert asked is not None
    assert asked.name == "bf16"
    # The command line wins over the file, as with SGLang's own flags.
    asked = chosen(parse(config, "--config", str(file), "--hicache-representation", "int8"))
    assert asked is not None
    assert asked.name == "int8"


@pytest.mark.parametrize("key", ["hicache-representation", "hicache_representation", "hicache-representat"])
@pytest.mark.parametrize("form", ["--config={}", "--conf={}", "--conf {}"])
def test_yaml_config_in_a_form_that_sglang_ignores(config: pathlib.Path, tmp_path: pathlib.Path, key: str, form: str):
    file = tmp_path / "serve.yaml"
    file.write_text(f"enable-hierarchical-cache: true\n{key}: int8\n")
    words = form.format(file).split()
    with pytest.raises(SystemExit, match=r"ignores '--con.*Write it as two words: --config FILE"):
        parse(config, *words)
    file.write_text("log-level: info\n")
    assert chosen(parse(config, *words)) is None
    with pytest.raises(SystemExit, match="a host representation is asked for"):
        parse(config, *words, "--enable-hierarchical-cache", "--hicache-representation=int8")


def test_yaml_config_that_nobody_can_read_in_a_form_that_sglang_ignores(config: pathlib.Path, tmp_path: pathlib.Path):
    file = tmp_path / "serve.yaml"
    file.write_bytes("# caf\xe9\nhicache-representation: int8\n".encode("latin-1"))
    with pytest.raises(SystemExit, match="a host representation is asked for"):
        parse(config, f"--config={file}")
    file.write_bytes("# caf\xe9\nlog-level: info\n".encode("latin-1"))
    assert chosen(parse(config, f"--config={file}")) is None


def test_a_name_that_is_refused_on_a_command_line_leaves_nothing_behind(
    config: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(PARSED, raising=False)
    with pytest.raises(SystemExit, match="unknown representation 'nope'"):
        parse(config, "--enable-hierarchical-cache", "--hicache-representation", "nope")
    assert PARSED not in os.environ


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"hicache_representation": ["int8"]}, r"saw \['int8'\]; allowed: .*bf16.*int8.*None"),
        ({"hicache_representation": "int8", "hicache_dump_dir": 5}, "saw 5; allowed: a folder that exists"),
        ({"hicache_representation": "int8", "hicache_dump_dir": ""}, "saw ''; allowed: a folder that exists"),
    ],
)
def test_keywords_of_another_type(config: pathlib.Path, keywords: dict[str, object], message: str):
    with pytest.raises(Refused, match=message):
        asking.engine_server_args(ServerArgs, model_path=str(config), enable_hierarchical_cache=True, **keywords)


@pytest.mark.parametrize("name", ["hicache_representaton", "hicache_representations", "hicache_dumpdir"])
def test_a_misspelt_name_beside_a_record_is_refused(config: pathlib.Path, name: str):
    fields: dict[str, Any] = {"model_path": str(config), "enable_hierarchical_cache": True}
    record = ServerArgs(**fields)
    with pytest.raises(Refused, match=f"saw '{name}'; allowed: 'hicache_representation'"):
        choice.settle(record, {name: "int8"})
    setattr(record, name, "int8")
    with pytest.raises(Refused, match=f"saw '{name}'"):
        choice.settle(record, {})


def test_command_line_refusals_exit_with_a_sentence(config: pathlib.Path):
    with pytest.raises(SystemExit, match="add --enable-hierarchical-cache"):
        parse(config, "--hicache-representation", "int8")
    with pytest.raises(SystemExit, match=r"registered: .*bf16.*int8"):
        parse(config, "--enable-hierarchical-cache", "--hicache-representation", "nf4")


@pytest.mark.parametrize(("value", "asks"), [("1", True), (" 1 ", True), ("0", False), ("", False)])
def test_values_of_the_alias(config: pathlib.Path, monkeypatch: pytest.MonkeyPatch, value: str, asks: bool):
    monkeypatch.setenv(ALIAS, value)
    assert (chosen(parse(config, "--enable-hierarchical-cache")) is not None) == asks
    words = ("--enable-hierarchical-cache", "--config=nowhere.yaml")
    if asks:
        with pytest.raises(SystemExit, match="a host representation is asked for"):
            parse(config, *words)
    else:
        assert chosen(parse(config, *words)) is None


@pytest.mark.parametrize("value", ["true", "yes", "on", "int8", "2"])
def test_other_values_of_the_alias(config: pathlib.Path, monkeypatch: pytest.MonkeyPatch, value: str):
    monkeypatch.setenv(ALIAS, value)
    with pytest.raises(SystemExit, match=f"{ALIAS}={value} asked for(.|\n)*Allowed: 1 .*, 0 or unset"):
        parse(config, "--enable-hierarchical-cache")


def test_rocm(monkeypatch: pytest.MonkeyPatch):
    info = replaced(buffer_info(), device=torch.device("cuda"))
    assert not list(pool._pool_violations(info, "page_first", {}))
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    (violation,) = pool._pool_violations(info, "page_first", {})
    assert str(violation) == "GPU runtime: saw ROCm 6.4.1; allowed: CUDA; changed by PyTorch (one built for CUDA)"


def test_alias(config: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(ALIAS, "1")
    asked = chosen(parse(config, "--enable-hierarchical-cache"))
    assert asked == Choice("int8", f"{ALIAS}=1", command_line=True)
    with pytest.raises(SystemExit, match=f"{ALIAS}=1 asked for .*\n.*add --enable-hierarchical-cache"):
        parse(config)
    with pytest.raises(SystemExit, match=f"{ALIAS}=1 asks for 'int8'"):
        parse(config, "--enable-hierarchical-cache", "--hicache-representation", "bf16")
    # A record that somebody built without asking hiqcache, given to Engine as it is.
    settings = device_settings() | {"model_path": str(config), "load_format": "dummy", "skip_tokenizer_init": True}
    record = ServerArgs(**settings)
    with pytest.raises(Refused, match="add --enable-hierarchical-cache"):
        sglang.Engine(server_args=record)
    monkeypatch.setenv(ALIAS, "maybe")
    with pytest.raises(SystemExit, match=f"{ALIAS}=maybe asked for(.|\n)*Allowed: 1"):
        parse(config)
    with pytest.raises(Refused, match=f"{ALIAS}=maybe asked for(.|\n)*Allowed: 1"):
        start_refused(config)
    monkeypatch.setenv(ALIAS, "0")
    assert chosen(parse(config, "--enable-hierarchical-cache")) is None


def test_untested_sglang(config: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(support, "sglang_version", "0.6.0")
    words = ("--enable-hierarchical-cache", FLAG, "int8")
    with pytest.raises(
        SystemExit, match=rf"(?s)'int8', which.*SGLang 0.6.0 is not supported; supported: 0.5.23. {ALLOW_UNTESTED}=1"
    ):
        parse(config, *words)
    with pytest.raises(Refused, match=r"SGLang 0\.6\.0 is not supported"):
        start_refused(config)
    assert chosen(parse(config, "--enable-hierarchical-cache")) is None
    monkeypatch.setenv(ALLOW_UNTESTED, "1")
    assert chosen(parse(config, *words)) is not None


def test_a_hook_that_did_not_apply_stops_the_server(config: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    target = "sglang.srt.managers.scheduler.Scheduler.get_init_info"
    monkeypatch.setattr(Scheduler, "get_init_info", inspect.unwrap(Scheduler.get_init_info))
    with pytest.raises(Refused, match=f"does not call hiqcache's hooks on {target}\\."):
        start_refused(config)
    with pytest.raises(SystemExit, match=f"(?s)'int8', which.*does not call hiqcache's hooks on {target}"):
        parse(config, "--enable-hierarchical-cache", FLAG, "int8")


def test_an_engine_that_starts_schedulers_its_own_way(config: pathlib.Path):
    from sglang.srt.entrypoints.engine import Engine

    class Another(Engine):  # as SGLang's RayEngine is
        @classmethod
        def _launch_scheduler_processes(cls, *args, **kwargs):
            raise AssertionError("never reached")

    settings = device_settings() | {"model_path": str(config), "load_format": "dummy", "skip_tokenizer_init": True}
    with pytest.raises(Refused, match="Another starts schedulers that hiqcache cannot verify; allowed: Engine"):
        Another(**settings, enable_hierarchical_cache=True, hicache_representation="int8")


def serve(config: pathlib.Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`sglang serve` from a shell, until it stops."""
    command = [pathlib.Path(sys.executable).parent / "sglang", "serve", "--model-path", config, "--device", "cpu"]
    command += ["--load-format", "dummy", "--skip-tokenizer-init", "--enable-hierarchical-cache", *words]
    return subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_without_the_plugin_the_flag_is_unknown(config: pathlib.Path):
    finished = serve(config, "--hicache-representation", "int8", SGLANG_PLUGINS="another")
    assert finished.returncode == 2
    assert "unrecognized arguments: --hicache-representation int8" in finished.stderr


@pytest.mark.slow
def test_sglang_serve_refuses_with_a_sentence(config: pathlib.Path):
    """Status 1, the reason, no traceback."""
    finished = serve(config, "--hicache-representation", "int8", "--hicache-io-backend", "kernel_ascend")
    assert finished.returncode == 1
    assert "saw 'kernel_ascend'; allowed: kernel; changed by --hicache-io-backend" in finished.stderr
    assert "Traceback" not in finished.stderr


# -- the pool's construction -----------------------------------------------------------------------------------------


def replaced(info: MHABufferInfo, **changes: Any) -> MHABufferInfo:
    fields = {name: getattr(info, name) for name in info.__struct_fields__}
    return MHABufferInfo(**fields | changes)


def with_buffers(info: MHABufferInfo, **changes: Any) -> MHABufferInfo:
    fields = {name: getattr(info.buffers, name) for name in info.buffers.__struct_fields__}
    return replaced(info, buffers=type(info.buffers)(**fields | changes))


def strided(info: MHABufferInfo) -> MHABufferInfo:
    wide = [torch.zeros(68, 3, 128, dtype=torch.bfloat16) for _ in range(2)]
    rows = tuple(buffer[..., :64] for buffer in wide)
    return with_buffers(info, k=rows, v=rows)


def scaled(info: MHABufferInfo) -> MHABufferInfo:
    scales = (torch.zeros(1), torch.zeros(1))
    return replaced(info, scales=KVScaleBuffers(k=scales, v=scales, layout=KVScaleLayout.MXFP8_INTERLEAVED))


def on_meta(info: MHABufferInfo) -> MHABufferInfo:
    return replaced(info, device=torch.device("meta"))


REFUSED_POOLS = [
    (lambda: buffer_info(head_num=1, head_dim=32), {"tp_size": 8}, r"64 \(1 local KV heads x 32 at TP=8.*-size \(8 or"),
    (lambda: buffer_info(dtype=torch.float16), {}, "saw float16; allowed: bfloat16; changed by --kv-cache-dtype"),
    (lambda: buffer_info(dtype=torch.float8_e4m3fn), {}, "saw uint8; allowed: bfloat16"),
    (lambda: buffer_info(v_head_dim=32), {}, "saw 64 and 32; allowed: the same width"),
    (buffer_info, {"layout": "page_first_direct"}, "saw page_first_direct; allowed: layer_first or page_first"),
    (buffer_info, {"layout": "page_head"}, "saw page_head; allowed"),
    (lambda: with_buffers(buffer_info(), layout=KVBufferLayout.HND), {}, "saw hnd; allowed: nhd"),
    (lambda: with_buffers(buffer_info(), layout=KVBufferLayout.VECTORIZED_5D), {}, "saw vectorized_5d; allowed: nhd"),
    (lambda: strided(buffer_info()), {}, "saw strided rows; allowed: contiguous rows"),
    (lambda: scaled(buffer_info()), {}, "saw mxfp8_interleaved scales; allowed: none; changed by --kv-cache-dtype"),
    (lambda: replaced(buffer_info(), transfer_buffers=lambda: ()), {}, "relocatable device pool"),
    (lambda: on_meta(buffer_info()), {}, "saw meta; allowed: cuda or cpu; changed by --device"),
    (buffer_info, {"draft_buffer_infos": (None,)}, "1 packed draft layers; allowed: none"),
    (buffer_info, {"pool_label": "draft"}, "pool beside the KV pool: saw 'draft'; allowed: 'kv'"),
    (buffer_info, {"allocator_type": "mooncake"}, r"\(L3\): saw mooncake; allowed: default"),
    (buffer_info, {"dcp_size": 2}, "decode context parallelism: saw 2; allowed: 1"),
]


@pytest.mark.parametrize(
    ("info", "options", "message"), REFUSED_POOLS, ids=lambda value: "" if callable(value) else str(value)[:50]
)
def test_refused_pools(info: Any, options: dict[str, Any], message: str):
    with pytest.raises(UnsupportedGeometry, match=message):
        host_pool(info(), **options)


def test_every_broken_rule_of_a_pool_is_listed():
    with pytest.raises(UnsupportedGeometry) as refused:
        host_pool(
            buffer_info(head_num=1, head_dim=32, v_head_dim=16, dtype=torch.float16), layout="page_head", tp_size=8
        )
    flags = [violation.flag for violation in refused.value.violations]
    assert len(flags) == 5  # layout, dtype, widths, and no gain for either width
    assert len({"--hicache-mem-layout", "--kv-cache-dtype bf16 (and --dtype bfloat16)"} & set(flags)) == 2


@pytest.mark.parametrize("more", [{"v_head_dim": 32}], ids=["asymmetric"])
def test_pool_classes_that_are_not_the_plain_one(more: dict[str, Any]):
    from sglang.srt.mem_cache.pool_host import mha

    token = hooks._building.set(Choice("int8", "a test", command_line=False))
    try:
        with pytest.raises(Refused, match="SGLang chose AsymmetricMHATokenToKVPoolHost for this model; allowed: MHA"):
            mha.get_mha_host_pool_cls(buffer_info(**more))
    finally:
        hooks._building.reset(token)
    assert mha.get_mha_host_pool_cls(buffer_info()) is MHATokenToKVPoolHost, "untouched when nobody asked"


def test_raw_pages_are_not_handed_out():
    pool = host_pool(buffer_info())
    for read in (
        lambda: pool.get_data_page(0),
        lambda: pool.get_page_buffer_meta(torch.arange(4)),
        lambda: pool.set_from_flat_data_page(0, torch.zeros(1)),
        lambda: pool.k_buffer,
        lambda: pool.host_kv_data_refs,
    ):
        with pytest.raises(NotImplementedError, match="encoded as 'int8'"):
            read()
    with pytest.raises(NotImplementedError, match="saw --hicache-io-backend direct; allowed: kernel"):
        pool.backup_from_device_all_layer(None, torch.arange(4), torch.arange(4), "direct")


@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_a_pool_that_is_held(name: str):
    """The same construction, with nothing wrong: the refusals above refuse what they say."""
    pool = host_pool(buffer_info(), name=name)
    assert pool.page_num == 64 * 2 // 4 + 1
    assert pool.kv_buffer is not None
    assert pool.kv_buffer is pool.arena.buffer
    assert pool.kv_buffer.numel() == pool.size * pool.size_per_token
    pool.destroy()
    pool.destroy()


# -- the catch-all ---------------------------------------------------------------------------------------------------


def tree(host: object, *, device: object = None, extra: tuple = (), sidecars: tuple = ()) -> UnifiedRadixCache:
    """A radix cache with these pools, as far as the check looks."""
    cache = object.__new__(UnifiedRadixCache)
    entry = SimpleNamespace(
        name=SimpleNamespace(value="kv"),
        host_pool=host,
        device_pool=device or device_pool(),
        packed_draft_device_pools=(),
    )
    cache.host_pool_group = SimpleNamespace(entries=[entry, *extra])  # type: ignore[assignment]
    cache.cache_controller = SimpleNamespace()  # type: ignore[assignment]
    cache.sidecar_pool_specs = list(sidecars)
    return cache


def stock_pool() -> MHATokenToKVPoolHost:
    return MHATokenToKVPoolHost(
        buffer_info(), 2.0, 0, 4, "layer_first", pin_memory=False, device_capacity_tokens=64, start_layer=0, end_layer=1
    )


def test_catch_all():
    ours = host_pool(buffer_info())
    assert proof.pool_in_force(tree(ours)) is ours

    with pytest.raises(Refused, match="saw host pool MHATokenToKVPoolHost over device pool MHATokenToKVPool"):
        proof.pool_in_force(tree(stock_pool()))

    subclass = type("Subclass", (RepresentationHostPool,), {})
    imposter = object.__new__(subclass)
    with pytest.raises(Refused, match="saw host pool Subclass"):
        proof.pool_in_force(tree(imposter))

    beside = SimpleNamespace(name=SimpleNamespace(value="mamba"))
    with pytest.raises(Refused, match=r"saw host pools \['kv', 'mamba'\]; allowed: kv alone"):
        proof.pool_in_force(tree(ours, extra=(beside,)))
    sidecar = SimpleNamespace(pool_name=SimpleNamespace(value="draft"))
    with pytest.raises(Refused, match=r"saw host pools \['draft', 'kv'\]"):
        proof.pool_in_force(tree(ours, sidecars=(sidecar,)))

    no_hicache = tree(ours)
    no_hicache.cache_controller = None
    with pytest.raises(Refused, match="saw a prefix cache without HiCache"):
        proof.pool_in_force(no_hicache)
    with pytest.raises(Refused, match="saw prefix cache SimpleNamespace; allowed: UnifiedRadixCache"):
        proof.pool_in_force(SimpleNamespace())

    sharded = device_pool()
    sharded.layer_shard_enabled = True
    with pytest.raises(Refused, match="layer-sharded"):
        proof.pool_in_force(tree(ours, device=sharded))
    moving = device_pool()
    moving.host_transfer_translate = lambda indices: indices
    with pytest.raises(Refused, match="relocates its rows"):
        proof.pool_in_force(tree(ours, device=moving))


def build(original: Any, *, device: Any = None, asked: Choice | None = None, **attributes: Any) -> Any:
    """SGLang building a scheduler's cache with `original`, as far as the hook looks."""
    settings = {"model_path": "none", "enable_hierarchical_cache": True}
    record: Any = ServerArgs(**settings)
    for name, value in attributes.items():
        setattr(record, name, value)
    if asked is not None:
        setattr(record, choice._ATTRIBUTE, asked)
    worker = SimpleNamespace(model_runner=SimpleNamespace(token_to_kv_pool=device or device_pool()))
    with get_parallel().override(attn_tp_size=1, num_dp_ranks=1, pp_rank=0):
        return hooks.around_build_kv_cache(original, server_args=record, tp_worker=worker)


def failing(error: Exception) -> Any:
    def original(**options: Any):
        raise error

    return original


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch):
    """A scheduler that ends itself raises this instead."""

    class Stopped(Exception):
        pass

    def stop(code: int):
        raise Stopped(code)

    monkeypatch.setattr(hooks.os, "_exit", stop)
    monkeypatch.setattr(hooks.logging, "shutdown", lambda: None)
    return Stopped


ASKED = Choice("int8", "a test", command_line=False)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("Not enough host memory available."),
        NotImplementedError("not with this model"),
        AssertionError("page_size must divide"),
        MemoryError("no memory"),
        OSError("no huge pages"),
        Refused("not ours"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_a_user_can_change_ends_in_a_sentence(stopped: Any, error: Exception, caplog: pytest.LogCaptureFixture):
    with pytest.raises(stopped, match="1"):
        build(failing(error), asked=ASKED)
    (line,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert line.getMessage().startswith("hiqcache: host representation 'int8' (a test): ")
    assert line.getMessage().endswith(str(error))
    assert not line.exc_info
    with pytest.raises(type(error)):
        build(failing(error))  # asked by nobody, it is SGLang's business


@pytest.mark.parametrize("error", [RuntimeError("broken"), TypeError("broken"), KeyError("broken"), AssertionError()])
def test_a_bug_keeps_its_traceback(stopped: Any, error: Exception):
    with pytest.raises(type(error)):
        build(failing(error), asked=ASKED)


@pytest.mark.parametrize(
    ("error", "asked", "traced"),
    [
        (ValueError("too large"), ASKED, False),
        (RuntimeError("broken"), ASKED, True),
        (ValueError("too large"), None, True),
    ],
)
def test_sglang_logs_no_traceback_of_what_ends_in_a_sentence(
    stopped: Any, caplog: pytest.LogCaptureFixture, error: Exception, asked: Choice | None, traced: bool
):
    from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler

    def original(**options: Any):
        try:
            raise error
        except Exception:
            hybrid_pool_assembler.logger.exception("failed")
            raise

    with pytest.raises((stopped, type(error))):
        build(original, asked=asked)
    (line,) = [record for record in caplog.records if record.name == hybrid_pool_assembler.logger.name]
    assert bool(line.exc_info) == traced


@pytest.mark.parametrize(
    ("class_name", "module", "kind"),
    [
        ("SWAKVPool", "swa_memory_pool", "sliding-window layers in a pool of their own; --disable-hybrid-swa-memory"),
        ("HybridLinearKVPool", "memory_pool", "recurrent or linear-attention layers"),
        ("MLATokenToKVPool", "memory_pool", "multi-head latent attention"),
    ],
)
def test_models_with_another_device_pool(
    stopped: Any, caplog: pytest.LogCaptureFixture, class_name: str, module: str, kind: str
):
    """They are told what they are, before host memory is taken for them."""
    pool_class = getattr(importlib.import_module(f"sglang.srt.mem_cache.{module}"), class_name)
    with pytest.raises(stopped):
        build(failing(RuntimeError("never reached")), device=object.__new__(pool_class), asked=ASKED)
    assert f"saw device pool {class_name} ({kind}" in caplog.text


@pytest.mark.parametrize("way", ["attribute", "alias"])
def test_a_scheduler_started_past_the_launcher(
    stopped: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, way: str
):
    monkeypatch.setenv(ALIAS, "1" if way == "alias" else "0")
    attributes: dict[str, Any] = {"hicache_representation": "int8"} if way == "attribute" else {}
    with pytest.raises(stopped):
        build(failing(RuntimeError("never reached")), **attributes)
    assert "'int8', which cannot be served.\nIts scheduler was started past SGLang's Engine" in caplog.text


def test_a_scheduler_that_was_asked_for_nothing():
    device: Any = "as it is"
    assert build(lambda **options: options["tp_worker"].model_runner.token_to_kv_pool, device=device) == device


def test_mla_is_caught():
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    device = MLATokenToKVPool(64, 4, torch.bfloat16, 512, 64, 2, "cpu", False)
    host = object.__new__(MLATokenToKVPoolHost)
    with pytest.raises(Refused, match="saw host pool MLATokenToKVPoolHost over device pool MLATokenToKVPool"):
        proof.pool_in_force(tree(host, device=device))


def test_the_launcher_demands_a_report_from_every_scheduler():
    asked = Choice("int8", "a test", command_line=False)
    report = attrs.asdict(proof.Report.of(host_pool(buffer_info())))
    proof.verify(asked, [{proof.KEY: [report]}, {proof.KEY: [report, report]}])
    with pytest.raises(Refused, match="1 of 2 schedulers reported"):
        proof.verify(asked, [{proof.KEY: [report]}, {"status": "ready"}])
    with pytest.raises(Refused, match="1 of 2 schedulers reported"):
        proof.verify(asked, [{proof.KEY: [report, None]}])
    with pytest.raises(Refused, match="0 of 0 schedulers reported"):
        proof.verify(asked, [])
    with pytest.raises(Refused, match=r"serves representation and format \('bf16', 'int8-head-v2'\)"):
        proof.verify(asked, [{proof.KEY: [report | {"representation": "bf16"}]}])
    with pytest.raises(Refused, match="another-tag"):
        proof.verify(asked, [{proof.KEY: [report | {"format_tag": "another-tag"}]}])


@pytest.mark.parametrize(
    ("bytes_per_token", "tokens", "size"),
    [(2_048, 897, "1.84 MB"), (2_048, 225, "0.46 MB"), (82_944, 96_451, "8.00 GB"), (82_944, 6_000_000, "497.66 GB")],
)
def test_the_start_line_gives_the_size_of_l2(bytes_per_token: int, tokens: int, size: str):
    report = attrs.evolve(proof.Report.of(host_pool(buffer_info())), bytes_per_token=bytes_per_token, tokens=tokens)
    assert f"{tokens:,} tokens in {size} where BF16 would hold" in str(report)


def test_reports_pass_through_the_data_parallel_controller():
    from sglang.srt.managers.data_parallel_controller import DataParallelController

    settings = {"model_path": "none"}
    record: Any = ServerArgs(**settings)
    controller: Any = object.__new__(DataParallelController)
    controller.server_args = record
    controller._scheduler_init_infos = [{proof.KEY: [{"a": 1}]}, {}]
    assert hooks.after_controller_init_info({"status": "ready"}, controller) == {"status": "ready"}
    setattr(record, choice._ATTRIBUTE, Choice("int8", "a test", command_line=False))
    assert hooks.after_controller_init_info({}, controller)[proof.KEY] == [{"a": 1}, None]


def test_storage_cannot_be_attached_at_run_time():
    cache = tree(host_pool(buffer_info()))
    attached, message = cache.attach_storage_backend("file")
    assert not attached
    assert "'int8' pages, which no storage backend (L3) can take" in message


# -- sizing ----------------------------------------------------------------------------------------------------------


def test_automatic_size_counts_encoded_bytes():
    from sglang.srt.mem_cache import hicache_auto_size

    pool = device_pool(size=1024)
    params: Any = SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
        req_to_token_pool=None,
        mtp_draft_device_pools=(),
        page_size=4,
    )
    stock = hicache_auto_size._estimate_hicache_bytes(params, None)
    assert stock == (1024 + 4) * 2 * 2 * 3 * 64 * 2
    token = hooks._building.set(Choice("int8", "a test", command_line=False))
    try:
        with get_parallel().override(attn_tp_size=1):
            encoded = hicache_auto_size._estimate_hicache_bytes(params, None)
    finally:
        hooks._building.reset(token)
    assert encoded == (1024 + 4) * 2 * 2 * 224  # 4 tokens x 198 bytes, padded to 896


def test_representation_without_a_whole_number_of_bytes_per_token():
    """A page whose bytes do not divide among its tokens cannot be sized by SGLang, and says so."""
    from hiqcache.representation import BlockLayout

    class Odd(HostRepresentation):
        name = "odd"
        format_tag = "odd"
        summary = ""

        def block_layout(self, part):
            return BlockLayout.records(1, 1, payload=(torch.uint8, (7,)))

        def encode(self, values, part, out): ...

        def decode(self, blocks, part, out): ...

    from hiqcache.geometry import KVGeometry

    with pytest.raises(HiqcacheError, match="14 bytes a page are not a whole number"):
        Odd(KVGeometry(layers=1, heads=1, head_dim=8, v_head_dim=8, page_size=4)).bytes_per_token()
