"""Packed weights stand for what they were made from, and their products are right and independent."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.gpu.fast.linear import FEW, NativeProduct, TorchPackedProduct
from regrow.gpu.fast.native import library, state
from regrow.gpu.fast.packing import Bits, Quantized, floats, quantize

pytestmark = pytest.mark.skipif(library() is None, reason=f"the native kernels are {state()}")
BITS = pytest.mark.parametrize("bits", [4, 8])
SHAPES = st.tuples(st.integers(1, 70), st.integers(1, 6).map(lambda blocks: blocks * 32))


def random_codes(outputs: int, inputs: int, bits: Bits, seed: int) -> Quantized:
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8, generator=draw)
    scale, offset = (torch.randn(outputs, inputs // 32, generator=draw).half() for _ in range(2))
    return Quantized(bits, codes, scale / 2**bits, offset)


def rows_of(count: int, inputs: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(seed)).to(dtype)


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@BITS
@given(shape=SHAPES, seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_codes_come_out_of_their_tiles_as_they_went_in(bits: Bits, shape: tuple[int, int], seed: int) -> None:
    packed = random_codes(*shape, bits, seed)
    product = NativeProduct.packed(packed, None)
    unit = torch.eye(shape[1])  # more rows than the native kernels take, or exact in 8 bits
    assert torch.equal(product(unit if shape[1] > FEW else unit.repeat(2, 1))[: shape[1]].T, floats(packed))


@BITS
@given(shape=SHAPES, rows=st.integers(1, FEW), bf16=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_a_product_of_few_rows_is_that_of_the_matrix_up_to_the_rounding_of_the_rows(
    bits: Bits, shape: tuple[int, int], rows: int, bf16: bool, seed: int
) -> None:
    packed, dtype = random_codes(*shape, bits, seed), torch.bfloat16 if bf16 else torch.float32
    x, bias = rows_of(rows, shape[1], dtype, seed), torch.randn(shape[0])
    wanted = x.float() @ floats(packed).T + bias
    found = NativeProduct.packed(packed, bias)(x)
    assert found.dtype == dtype
    spread = (x.float().abs().amax() / 127) * floats(packed).norm(dim=1)
    assert ((found.float() - wanted).abs() <= spread + 0.01 * wanted.abs() + 1e-3).all()


@BITS
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(bits: Bits) -> None:
    product = NativeProduct.packed(random_codes(48, 96, bits, 0), None)
    x = rows_of(FEW, 96, torch.bfloat16)
    together = product(x)
    assert all(torch.equal(product(x[i : i + 1])[0], together[i]) for i in range(FEW))
    assert torch.equal(product(x[3:9]), together[3:9])


def test_a_plain_row_has_the_same_bits_whatever_rows_are_beside_it() -> None:
    product = NativeProduct.plain(rows_of(50, 100, torch.bfloat16), torch.randn(50).bfloat16())
    x = rows_of(FEW, 100, torch.bfloat16, 2)
    together = product(x)
    assert all(torch.equal(product(x[i : i + 1])[0], together[i]) for i in range(FEW))


def weight_of(bits: int, outputs: int, inputs: int, bias: torch.Tensor) -> tuple[NativeProduct, torch.Tensor]:
    """Return a product, and the weight it stands for in float32."""
    if bits == 16:
        weight = rows_of(outputs, inputs, torch.bfloat16, 3)
        return NativeProduct.plain(weight, bias), weight.float()
    codes = random_codes(outputs, inputs, 4 if bits == 4 else 8, 3)
    return NativeProduct.packed(codes, bias), floats(codes)


@pytest.mark.parametrize("bits", [4, 8, 16])
@given(outputs=st.integers(1, 70), blocks=st.integers(1, 6), rows=st.integers(FEW + 1, 100))
@settings(max_examples=20, deadline=None)
def test_a_product_of_many_rows_is_that_of_the_matrix(
    bits: int, outputs: int, blocks: int, rows: int
) -> None:
    bias, x = torch.randn(outputs), rows_of(rows, 32 * blocks, torch.bfloat16, rows)
    product, weight = weight_of(bits, outputs, 32 * blocks, bias)
    found, wanted = product(x), x.float() @ weight.bfloat16().float().T + bias
    assert found.shape == (rows, outputs)
    assert ((found.float() - wanted).abs() <= 0.01 * wanted.abs() + 0.02 * wanted.std()).all()


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_one_of_many_rows_has_the_same_bits_whatever_rows_are_beside_it(bits: int) -> None:
    product, _ = weight_of(bits, 50, 96, torch.randn(50))
    if not product.takes_many:
        pytest.skip("this processor has no tile unit; the products are torch's")
    x = rows_of(90, 96, torch.bfloat16)
    together = product(x)
    for first in (0, 7, 40):
        assert torch.equal(product(x[first : first + FEW + 5]), together[first : first + FEW + 5])


@BITS
def test_the_number_of_threads_does_not_change_a_bit(bits: Bits) -> None:
    product, x = NativeProduct.packed(random_codes(200, 64, bits, 0), None), rows_of(4, 64, torch.bfloat16)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = product(x)
        torch.set_num_threads(2)
        assert torch.equal(product(x), alone)
    finally:
        torch.set_num_threads(before)


@given(outputs=st.integers(1, 40), inputs=st.integers(1, 130), rows=st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_a_plain_product_is_torchs_up_to_rounding(outputs: int, inputs: int, rows: int) -> None:
    weight, bias = rows_of(outputs, inputs, torch.bfloat16, 3), torch.randn(outputs).bfloat16()
    x = rows_of(rows, inputs, torch.bfloat16, 4)
    wanted = x.float() @ weight.float().T + bias.float()
    assert torch.allclose(NativeProduct.plain(weight, bias)(x).float(), wanted, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_in_a_row_stays_so_and_stays_in_that_row(bad: float) -> None:
    product, x = NativeProduct.packed(random_codes(32, 64, 4, 0), None), rows_of(3, 64, torch.bfloat16)
    clean = product(x)
    x[1, 40] = bad
    found = product(x)
    assert not found[1].isfinite().any()
    assert torch.equal(found[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize(("bits", "most"), [(8, 0.008), (4, 0.11)])
def test_rounding_costs_what_so_many_bits_must(bits: Bits, most: float) -> None:
    weight = rows_of(64, 256, torch.float32)
    assert off(floats(quantize(weight, bits)), weight) < most


def test_weights_that_lie_on_sixteen_levels_are_packed_without_loss() -> None:
    given_codes = random_codes(32, 64, 4, 5)
    given_codes.codes[:, ::32], given_codes.codes[:, 1::32] = 0, 15
    given_codes.scale.abs_()
    again = quantize(floats(given_codes), 4)
    assert off(floats(again), floats(given_codes)) < 2e-3


@BITS
def test_without_the_native_kernels_torchs_own_give_the_same_up_to_rounding(
    bits: Bits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regrow.gpu.fast.packing.library", lambda: None)
    weight = rows_of(64, 128, torch.float32)
    packed = quantize(weight, bits)
    assert off(floats(packed), weight) < (0.008 if bits == 8 else 0.11)
    bias, x = torch.randn(64).bfloat16(), rows_of(5, 128, torch.bfloat16, 6)
    wanted = x.float() @ floats(packed).T + bias.float()
    assert off(TorchPackedProduct(packed, bias)(x), wanted) < 0.02
