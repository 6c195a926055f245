"""int4 and k6v4 against the definition of their formats, written here in exact arithmetic and not from the code."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch

from hiqcache.geometry import KVGeometry, Part, UnsupportedGeometry
from hiqcache.numerics import planes
from hiqcache.numerics.rotation import block_of, rotate, rotate_back
from hiqcache.registry import get
from hiqcache.representation import HostRepresentation

WIDTHS = (64, 80, 96, 112, 128, 192, 256)
FORMATS = [(name, part) for name in ("int4", "k6v4") for part in Part]
GROUP = {("int4", Part.K): 16, ("int4", Part.V): 16, ("k6v4", Part.V): 32}
"""Values of a group, where scales are of groups."""


def representation(name: str, heads: int, dim: int, page_size: int, layers: int = 1) -> HostRepresentation:
    return get(name)(KVGeometry(layers=layers, heads=heads, head_dim=dim, v_head_dim=dim, page_size=page_size))


def encoded(format_: HostRepresentation, values: torch.Tensor, part: Part, poison: int = 0x55) -> torch.Tensor:
    blocks = torch.full((len(values), format_.layouts[part].block_bytes), poison, dtype=torch.uint8)
    format_.encode(values, part, blocks)
    return blocks


def decoded(format_: HostRepresentation, blocks: torch.Tensor, part: Part) -> torch.Tensor:
    geometry = format_.geometry
    shape = (len(blocks), geometry.page_size, geometry.heads, geometry.dim(part))
    out = torch.full(shape, 0x7FA5, dtype=torch.int16).view(torch.bfloat16)  # an odd NaN
    format_.decode(blocks, part, out)
    return out


def hadamard(block: int) -> np.ndarray:
    """By its definition: the sign is the parity of the bits that row and column share."""
    return np.array([[(-1) ** (row & column).bit_count() for column in range(block)] for row in range(block)])


def rotation(dim: int) -> np.ndarray:
    """Matrix of `rotate`, but for the division by the block."""
    block = next(2**power for power in range(10, -1, -1) if dim % 2**power == 0)
    return np.kron(np.eye(dim // block), hadamard(block))


def scale(largest: Fraction, levels: Fraction, bits: int) -> Fraction:
    """`largest / levels`, rounded half up to 1 + bits significant bits."""
    if largest == 0:
        return Fraction(0)
    wanted, exponent = largest / levels, 0
    while wanted >= 2 ** (exponent + 1):
        exponent += 1
    while wanted < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent - bits)
    return (wanted / unit + Fraction(1, 2)).__floor__() * unit


def exponent_of(x: Fraction) -> int:
    return next(e for e in itertools.count(-200) if Fraction(2) ** (e + 1) > x)


def expected_head(y: list[Fraction], name: str, part: Part) -> tuple[list[int], list[Fraction]]:
    """Codes and the scale of each value, of one rotated head, by the format's text."""
    size = min(GROUP.get((name, part), len(y)), block_of(len(y)) if (name, part) in GROUP else len(y))
    levels, bits = (8, 3) if (name, part) in GROUP else (32, 5)
    groups = [y[i : i + size] for i in range(0, len(y), size)]
    scales = [scale(max(map(abs, group)), levels - Fraction(1, 2), bits) for group in groups]
    if (name, part) in GROUP and any(scales):
        top = exponent_of(max(scales))
        scales = [max(s, Fraction(2) ** (top - 3)) for s in scales]
    codes, steps = [], []
    for group, s in zip(groups, scales, strict=True):
        for value in group:
            reciprocal = np.float32(1) / np.float32(s) if s else np.float32(1)
            quotient = np.float32(value) * reciprocal + np.float32(levels)
            codes.append(int(min(max(quotient, 0), 2 * levels - 1)))
            steps.append(s)
    return codes, steps


def codes_of(format_: HostRepresentation, blocks: torch.Tensor, part: Part) -> torch.Tensor:
    layout = format_.layouts[part]

    def bits(name: str, width: int) -> torch.Tensor:
        packed = layout.view(blocks, name)
        return torch.stack([packed >> width * i & 2**width - 1 for i in range(8 // width)], -1).flatten(-2)

    return bits("codes", 4) if "codes" in layout else bits("upper", 4) * 4 + bits("lower", 2)


@pytest.mark.parametrize("dim", [*WIDTHS, 16, 32])
def test_a_rotation_is_a_hadamard_matrix_of_each_block(dim):
    x = torch.randint(-255, 256, (50, dim), generator=torch.Generator().manual_seed(0)).float() * 2.0**-40
    exact = x.double().numpy() @ rotation(dim).T / block_of(dim)
    assert np.array_equal(rotate(x).double().numpy(), exact), "sums of small whole numbers are exact"
    assert torch.equal(rotate_back(rotate(x)), x)


def test_huge_and_tiny_values_survive_a_rotation():
    largest = torch.finfo(torch.bfloat16).max
    huge = torch.full((1, 128), largest) * torch.tensor([1.0, -1.0]).repeat(64)
    assert torch.equal(rotate_back(rotate(huge)), huge)
    assert not rotate(torch.full((1, 128), 2.0**-101)).any(), "taken for zero"
    assert torch.equal(rotate_back(torch.full((1, 128), largest))[0, :2], torch.tensor([largest, 0.0])), "saturated"


@pytest.mark.parametrize("bits", [2, 4])
def test_packing_loses_nothing(bits):
    codes = torch.randint(2**bits, (5, 48), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    packed = planes.pack(codes, bits)
    assert packed.shape == (5, 48 * bits // 8)
    assert torch.equal(planes.unpack(packed, bits), codes)
    assert packed[0, 0] & 2**bits - 1 == codes[0, 0], "the first is in the lowest bits"


@pytest.mark.parametrize(("name", "part"), FORMATS)
@pytest.mark.parametrize("dim", [64, 80, 128, 192])
def test_codes_and_values_are_those_of_exact_arithmetic(name, part, dim):
    format_ = representation(name, heads=3, dim=dim, page_size=8)
    generator = torch.Generator().manual_seed(dim)
    # Whole numbers, so that every sum is exact, of like size in some heads and with outliers or few values in others.
    shape = (2, 8, 3, dim)
    x = torch.randint(-16, 17, shape, generator=generator).float()
    x *= (
        torch.randint(0, 8, shape, generator=generator) * (torch.rand(shape[:-1], generator=generator) < 0.5)[..., None]
        + 1
    )
    x *= torch.rand((*shape[:-1], 1), generator=generator) < 0.9
    x *= 2.0 ** torch.randint(-60, 60, (*shape[:-1], 1), generator=generator)
    values = x.bfloat16()
    assert torch.equal(values.float(), x)
    blocks = encoded(format_, values, part)
    codes, back = codes_of(format_, blocks, part), decoded(format_, blocks, part).double()
    matrix = rotation(dim).astype(int)
    for index in itertools.product(*map(range, shape[:-1])):
        head = [Fraction(v) for v in x[index].tolist()]
        y = [
            sum((int(s) * v for s, v in zip(row, head, strict=True) if s), Fraction(0)) / block_of(dim)
            for row in matrix
        ]
        wanted, steps = expected_head(y, name, part)
        assert codes[index].tolist() == wanted
        levels = 8 if (name, part) in GROUP else 32
        stands_for = np.array([float((u - levels + Fraction(1, 2)) * s) for u, s in zip(wanted, steps, strict=True)])
        exact = matrix @ stands_for
        assert np.all(
            np.abs(back[index].numpy() - exact) <= 2.0**-8 * np.abs(exact) + 2.0**-20 * np.abs(stands_for).sum()
        )


def distributions(shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    normal = torch.randn(shape, generator=generator)
    spread = torch.exp(3 * torch.randn((*shape[:-1], 1), generator=generator))
    spikes = torch.zeros(shape)
    spikes[..., 5] = 100.0
    return {
        "normal": normal * spread,
        "laplace": normal.sign() * -torch.rand(shape, generator=generator).clamp(min=1e-6).log() * spread,
        "uniform": (torch.rand(shape, generator=generator) - 0.5) * spread,
        "heavy": normal**3 * spread,
        "one channel": normal + 300 * spikes / 100,
        "spike": spikes + normal * 1e-3,
        "constant": torch.ones(shape) * spread,
        "alternating": torch.ones(shape) * torch.tensor([1.0, -1.0]).repeat(shape[-1] // 2) * spread,
        "sparse": normal * (torch.rand(shape, generator=generator) < 0.02),
        "ramp": torch.arange(shape[-1]) * spread,
        "tiny": normal * 2.0**-95,
        "huge": normal.clamp(-3, 3) * 2.0**125,
        "zeros": torch.zeros(shape),
    }


@pytest.mark.parametrize(("name", "part"), FORMATS)
@pytest.mark.parametrize("dim", WIDTHS)
def test_errors_stay_within_the_bound_and_eight_trips_are_as_one(name, part, dim):
    format_ = representation(name, heads=3, dim=dim, page_size=16)
    for what, x in distributions((6, 16, 3, dim)).items():
        values = x.bfloat16()
        first = encoded(format_, values, part)
        back = decoded(format_, first, part)
        bound = format_.error_bound(values, back, part)
        assert bound is not None
        assert bool(back.isfinite().all()), what
        assert bool(((back.double() - values.double()).abs() <= bound).all()), what
        for _ in range(7):
            again = encoded(format_, back, part, poison=0xAA)
            assert torch.equal(again, first), what
            back = decoded(format_, again, part)
        if what == "zeros":
            assert not back.any()


@pytest.mark.parametrize(("name", "part"), FORMATS)
def test_the_error_is_that_of_the_steps(name, part):
    """Of normal values a step of width s adds an error of s / sqrt(12), and s follows from the largest of a group."""
    format_ = representation(name, heads=8, dim=128, page_size=64)
    values = torch.randn((8, 64, 8, 128), generator=torch.Generator().manual_seed(1)).bfloat16()
    y = values.double() @ torch.from_numpy(hadamard(128)).double() / 128**0.5
    size, levels = GROUP.get((name, part), 128), 7.5 if (name, part) in GROUP else 31.5
    largest = y.unflatten(-1, (-1, size)).abs().amax(-1)
    predicted = (largest.square().mean() / levels**2 / 12).sqrt()
    error = (decoded(format_, encoded(format_, values, part), part).double() - values.double()).square().mean().sqrt()
    assert 0.97 < error / predicted < 1.05


@pytest.mark.parametrize(("name", "part"), FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_head_that_is_not_finite_is_lost_and_no_other(name, part, bad):
    format_ = representation(name, heads=3, dim=64, page_size=16)
    values = torch.randn((2, 16, 3, 64), generator=torch.Generator().manual_seed(2)).bfloat16()
    clean = decoded(format_, encoded(format_, values, part), part)
    values[1, 7, 2, 33] = bad
    blocks = encoded(format_, values, part)
    back = decoded(format_, blocks, part)
    lost = torch.zeros(2, 16, 3, dtype=torch.bool)
    lost[1, 7, 2] = True
    assert torch.equal(back.isnan().all(-1), lost)
    assert torch.equal(back[~lost], clean[~lost])
    assert torch.equal(encoded(format_, back, part), blocks)


@pytest.mark.parametrize(
    ("name", "heads", "dim", "page_size", "layers", "bytes_per_token"),
    [
        ("int4", 8, 128, 64, 36, 42_048),  # Qwen3-8B: 2 x 8 x (64 + 8 + 1) bytes a layer
        ("k6v4", 8, 128, 64, 36, 48_096),  # 8 x (96 + 2) of K and 8 x (64 + 4 + 1) of V
        ("int4", 1, 128, 64, 80, 11_840),  # Llama-3-70B at TP=8: 64 x 73 = 4,672 bytes are padded to 4,736
        ("k6v4", 1, 128, 64, 80, 13_440),  # V of 64 x 69 = 4,416 bytes is padded to 4,480
        ("int4", 8, 128, 1, 36, 46_080),  # 584 bytes of K and of V are padded to 640
        ("k6v4", 8, 128, 1, 36, 55_296),  # 784 and 552 to 896 and 640
        ("int4", 8, 80, 64, 1, 736),  # 2 x 8 x (40 + 5 + 1)
    ],
)
def test_bytes_of_a_token(name, heads, dim, page_size, layers, bytes_per_token):
    assert representation(name, heads, dim, page_size, layers).bytes_per_token() == bytes_per_token


@pytest.mark.parametrize("name", ["int4", "k6v4"])
def test_geometries_that_are_refused(name):
    with pytest.raises(UnsupportedGeometry, match="saw 72; allowed: a multiple of 16"):
        representation(name, heads=8, dim=72, page_size=64)
    with pytest.raises(
        UnsupportedGeometry, match=r"saw 128 \(1 local KV heads x 64 .* page size 1.*--page-size \(2 or"
    ):
        representation(name, heads=1, dim=64, page_size=1)
