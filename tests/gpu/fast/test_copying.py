"""Copies by the native kernels: every byte, and no other one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regrow.gpu.fast import native
from regrow.gpu.fast.copying import copy_cells

DTYPES = (torch.float32, torch.bfloat16, torch.uint8)


@given(
    st.sampled_from(DTYPES),
    *(st.integers(1, 5), st.integers(0, 300), st.integers(1, 200)),
    *(st.integers(0, 7), st.integers(0, 7)),
)
def test_cells_anywhere_are_copied_and_nothing_beside_them(
    dtype: torch.dtype, heads: int, cells: int, dim: int, at: int, source_at: int
) -> None:
    source = torch.randint(1, 200, (heads, cells + 9, dim)).to(dtype)
    target = torch.zeros(heads, cells + 11, dim, dtype=dtype)
    wanted = target.clone()
    wanted[:, at : at + cells] = source[:, source_at : source_at + cells]
    copy_cells([(target[:, at : at + cells], source[:, source_at : source_at + cells])])
    assert torch.equal(target, wanted)


@pytest.mark.parametrize("bytes_", [64 * 1024 - 1, 64 * 1024, 64 * 1024 + 1, 9 * 64 * 1024 + 3])
def test_long_rows_are_shared_by_the_threads(bytes_: int) -> None:
    source = torch.randint(0, 255, (3, bytes_, 1), dtype=torch.uint8)
    target = torch.zeros(3, bytes_ + 1, 1, dtype=torch.uint8)
    copy_cells([(target[:, 1:], source)])
    assert torch.equal(target[:, 1:], source)
    assert not target[:, 0].any()


@given(st.lists(st.tuples(st.sampled_from(DTYPES), *[st.integers(0, 40)] * 3), max_size=8))
def test_many_are_copied_in_one_call(shapes: list[tuple[torch.dtype, int, int, int]]) -> None:
    sources = [torch.randint(1, 200, shape).to(dtype) for dtype, *shape in shapes]
    targets = [torch.zeros_like(source) for source in sources]
    copy_cells(list(zip(targets, sources, strict=True)))
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source)


@pytest.mark.parametrize("how", ["turned", "of another dtype", "without the kernels"])
def test_what_the_kernel_does_not_take_is_copied_all_the_same(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = torch.randn(3, 8, 16)
    target = torch.zeros(3, 8, 16)
    match how:
        case "turned":
            target = torch.zeros(3, 16, 8).transpose(1, 2)
        case "of another dtype":
            target = target.double()
        case _:
            monkeypatch.setattr(native, "library", lambda: None)
    copy_cells([(target, source)])
    assert torch.equal(target.float(), source)
