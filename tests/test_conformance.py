"""The conformance tool: its exact arithmetic, the committed vectors, and that a wrong bit is found."""

import random
from fractions import Fraction

import conformance
import pytest
import torch
from click.testing import CliRunner, Result
from conformance import VECTORS, int8_head, main, nearest, value
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hiqcache.backends.int8 import Int8

CHECKS = 15 * 10 * 3
"""Files x cases x roads: the codec, and the transfer in two arrangements."""


def verify(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["verify", *map(str, arguments)])


def test_rounding_is_that_of_ieee():
    rng = random.Random(0)
    bits = torch.tensor([rng.getrandbits(32) - 2**31 for _ in range(4000)], dtype=torch.int32)
    numbers = bits.view(torch.float32)
    numbers = numbers[numbers.isfinite() & (numbers.abs() <= torch.finfo(torch.bfloat16).max)]
    assert (numbers.abs() < 2.0**-126).any(), "subnormal numbers were to be among them"
    expected = (numbers.bfloat16().view(torch.int16).int() & 0xFFFF).tolist()
    assert [nearest(Fraction(number)) for number in numbers.tolist()] == expected
    assert [float(value(bits)) for bits in expected] == numbers.bfloat16().double().tolist()


@pytest.mark.parametrize(
    ("number", "bits"),
    [
        (Fraction(257, 256), 0x3F80),  # a tie between 1 and 1 + 2**-7, to even
        (Fraction(259, 256), 0x3F82),
        (Fraction(1) - Fraction(1, 2**60), 0x3F80),  # float64 would have rounded it already
        (-(Fraction(2) ** -133), 0x8001),  # the smallest subnormal number
        (Fraction(2) ** -134, 0x0000),
        (Fraction(2) ** 200, 0x7F7F),
    ],
)
def test_rounding_at_the_edges(number, bits):
    assert nearest(number) == bits


def test_int8_by_hand():
    # Largest magnitude 127: the scale is 1. Halves go to even; the decoded values are the INT8 ones.
    head = [nearest(Fraction(x)) for x in (-127, 2.5, 3.5, -0.5, 0)]
    assert int8_head(head) == ([-127, 2, 4, 0, 0], 0x3F80, [0xC2FE, 0x4000, 0x4080, 0, 0])


def test_an_int8_block_by_hand():
    one, two = nearest(Fraction(127)), nearest(Fraction(254))  # scales 1 and 2
    block, decoded = conformance.int8_block([[[one, 0], [two, two]], [[two, one], [0, one]]])
    assert block[:8] == bytes([127, 0, 127, 127, 127, 64, 0, 127]), "63.5 rounds to the even 64"
    assert block[8:16] == bytes([0x80, 0x3F, 0x00, 0x40, 0x00, 0x40, 0x80, 0x3F])
    assert block[16:] == bytes(112)
    assert decoded[1][0] == [two, nearest(Fraction(128))]


def test_committed_vectors_are_what_the_tool_generates(tmp_path):
    result = CliRunner().invoke(main, ["generate", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    made, kept = ({path.name: path for path in folder.glob("*.safetensors")} for folder in (tmp_path, VECTORS))
    assert made.keys() == kept.keys()
    for name, path in kept.items():
        assert safe_open(path, "pt").metadata() == safe_open(made[name], "pt").metadata()
        old, new = load_file(path), load_file(made[name])
        assert old.keys() == new.keys()
        for key, tensor in old.items():
            assert torch.equal(tensor.view(torch.uint8), new[key].view(torch.uint8)), (name, key)
    assert sum(path.stat().st_size for path in kept.values()) < 1_200_000


def test_committed_vectors_hold_on_the_cpu():
    result = verify("--device", "cpu")
    assert result.exit_code == 0, result.output
    assert f"cpu: {CHECKS} of {CHECKS} checks agree in every bit" in result.output


@pytest.mark.gpu
def test_committed_vectors_hold_on_cuda(tmp_path):
    result = verify("--device", "cuda", "--out", tmp_path / "cuda.json")
    assert result.exit_code == 0, result.output
    assert "CudaTransfer" in result.output
    assert f"cuda: {CHECKS} of {CHECKS} checks agree in every bit" in result.output


@pytest.mark.parametrize("kind", ["blocks", "decoded"])
def test_one_wrong_bit_is_found(kind, tmp_path):
    name = "int8-8x128.safetensors"
    tensors = load_file(VECTORS / name)
    tensors[f"random-unit.{kind}"].view(torch.uint8).view(-1)[0] ^= 1
    with safe_open(VECTORS / name, "pt") as file:
        save_file(tensors, tmp_path / name, file.metadata())
    result = verify("--vectors", tmp_path)
    assert result.exit_code == 1
    assert "cpu: 27 of 30 checks agree" in result.output


def test_a_codec_that_truncates_is_found(monkeypatch):
    def encode(self, values, part, out):
        right(self, values, part, out)
        out[..., 0] += 1

    right = Int8.encode
    monkeypatch.setattr(Int8, "encode", encode)
    result = verify()
    assert result.exit_code == 1
    assert f"cpu: {CHECKS * 12 // 15} of {CHECKS} checks agree" in result.output, "no other format is touched"


def test_what_is_no_vector_file_is_refused(tmp_path):
    assert "no *.safetensors in" in verify("--vectors", tmp_path).output
    (tmp_path / "a.safetensors").write_bytes(b"no")
    assert "cannot be read" in verify("--vectors", tmp_path).output
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    assert "holds no vectors of this tool" in verify("--vectors", tmp_path).output
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors", {"representation": "int8", "format_tag": "int8-v0"})
    result = verify("--vectors", tmp_path)
    assert "holds 'int8-v0', but 'int8' here is 'int8-head-v2'" in result.output
    assert result.exit_code == 1


@pytest.mark.parametrize(
    ("tensors", "about", "message"),
    [
        ({}, {"heads": "8", "dim": "128", "page_size": "1"}, "has no vectors, or parts of some are missing"),
        ({"a.values": 1}, {"heads": "8", "dim": "128", "page_size": "1"}, "parts of some are missing"),
        ({"a.values": 1, "a.blocks": 1, "a.decoded": 1}, {}, "does not say which heads, dim and page_size"),
    ],
)
def test_vectors_that_check_nothing_do_not_pass(tensors, about, message, tmp_path):
    about = {"representation": "int8", "format_tag": "int8-head-v2", **about}
    save_file({name: torch.zeros(size) for name, size in tensors.items()}, tmp_path / "a.safetensors", about)
    result = verify("--vectors", tmp_path)
    assert result.exit_code == 1
    assert message in result.output


@pytest.mark.parametrize(
    "change",
    [
        lambda kind, tensor: tensor[:0],  # no block: nothing would be compared
        lambda kind, tensor: tensor[:1] if kind == "blocks" else torch.cat([tensor, tensor]),
        lambda kind, tensor: tensor[:, :10] if kind == "blocks" else tensor,
        lambda kind, tensor: tensor.int() if kind == "blocks" else tensor,
        lambda kind, tensor: tensor.half() if kind == "values" else tensor,
        lambda kind, tensor: tensor[..., :1] if kind == "decoded" else tensor,
    ],
)
def test_vectors_of_another_shape_are_refused(change, tmp_path):
    name = "int8-3x64.safetensors"
    tensors = {key: change(key.rpartition(".")[2], value) for key, value in load_file(VECTORS / name).items()}
    with safe_open(VECTORS / name, "pt") as file:
        save_file({key: value.contiguous() for key, value in tensors.items()}, tmp_path / name, file.metadata())
    result = verify("--vectors", tmp_path)
    assert result.exit_code == 1
    assert f"{name}: all-zero holds" in result.output


@pytest.mark.parametrize(("field", "wrong"), [("heads", "4"), ("page_size", "1"), ("heads", "-1"), ("dim", "3.0")])
def test_vectors_of_another_geometry_are_refused(field, wrong, tmp_path):
    name = "int8-3x64.safetensors"
    with safe_open(VECTORS / name, "pt") as file:
        save_file(load_file(VECTORS / name), tmp_path / name, file.metadata() | {field: wrong})
    result = verify("--vectors", tmp_path)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), "a sentence, no traceback"


@pytest.mark.skipif(conformance.available("mps"), reason="there is one")
def test_a_device_that_is_not_there():
    result = verify("--device", "mps")
    assert result.exit_code == 1
    assert "PyTorch sees no mps device here; choose another with --device" in result.output
