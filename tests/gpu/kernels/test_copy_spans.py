"""The batched copy kernel: its very source, compiled for three GPUs, and run on the CPU against torch."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.gpu.kernels.spans import MAX_GRID, SOURCE, TILE_BYTES, Pair, launch_of
from tests.gpu.kernels.on_cpu import needs_compiler, run_on_cpu

NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin:/usr/local/bin")
DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128)


@pytest.mark.skipif(NVCC is None, reason="needs nvcc to compile for a GPU")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_120"])
def test_the_kernel_compiles_for(architecture: str, tmp_path: Path) -> None:
    assert NVCC is not None
    cubin = tmp_path / "copy_spans.cubin"
    command = [
        NVCC,
        "-cubin",
        f"-arch={architecture}",
        "-Werror",
        "all-warnings",
        f"{SOURCE}",
        "-o",
        f"{cubin}",
    ]
    subprocess.run(command, check=True, capture_output=True)
    assert b"copy_spans" in cubin.read_bytes()


def noise(nbytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


@st.composite
def layouts(draw: st.DrawFn, dtype: torch.dtype, shape: tuple[int, int, int]) -> tuple[int, list[int]]:
    """An offset and strides, in elements, at which a tensor of `shape` can lie: rows apart by any gap, and
    now and then elements too."""
    _, cells, dim = shape
    step = draw(st.sampled_from([1, 1, 1, 2]))
    cell = dim * step + draw(st.sampled_from([0, 0, 0, 3]))
    head = cells * cell + draw(st.integers(0, 40))
    return draw(st.integers(0, 16)), [head, cell, step]


Drawn = tuple[torch.dtype, tuple[int, int, int], tuple[int, list[int]], tuple[int, list[int]]]


@st.composite
def parts(draw: st.DrawFn) -> Drawn:
    dtype = draw(st.sampled_from(DTYPES))
    shape = (draw(st.integers(1, 4)), draw(st.integers(0, 20)), draw(st.sampled_from([1, 3, 8, 64])))
    return dtype, shape, draw(layouts(dtype, shape)), draw(layouts(dtype, shape))


def placed(
    memory: torch.Tensor, at: int, dtype: torch.dtype, shape: tuple[int, ...], layout: tuple[int, list[int]]
) -> torch.Tensor:
    """A tensor that lies in `memory` (bytes) from about `at` on."""
    offset, strides = layout
    return (
        memory[at:].view(dtype).as_strided(shape, strides, memory[at:].view(dtype).storage_offset() + offset)
    )


@needs_compiler
@settings(max_examples=150, deadline=None)
@given(st.lists(parts(), max_size=6), st.integers(1, 5), st.sampled_from([1, 7, 32]), st.integers(0, 2**20))
def test_any_parts_are_copied_as_torch_copies_them_and_nothing_beside_them(
    drawn: list[Drawn], grid: int, block: int, seed: int
) -> None:
    room = 1 << 18  # bytes for each part, at both ends
    ours, source = noise(room * max(len(drawn), 1), seed), noise(room * max(len(drawn), 1), seed + 1)
    theirs = ours.clone()
    pairs: list[Pair] = []
    for i, (dtype, shape, to, origin) in enumerate(drawn):
        origin_view = placed(source, i * room, dtype, shape, origin)
        pairs.append((placed(ours, i * room, dtype, shape, to), origin_view))
        placed(theirs, i * room, dtype, shape, to).copy_(origin_view)
    run_on_cpu(launch_of(pairs), grid=grid, block=block)
    assert torch.equal(ours, theirs)


@needs_compiler
@given(st.integers(0, 31), st.integers(0, 31), st.integers(1, 200), st.integers(0, 2**20))
@settings(max_examples=150, deadline=None)
def test_any_number_of_bytes_is_copied_from_any_address_to_any_other(
    to: int, origin: int, nbytes: int, seed: int
) -> None:
    ours, source = noise(256, seed), noise(256, seed + 1)
    theirs = ours.clone()
    run_on_cpu(launch_of([(ours[to : to + nbytes], source[origin : origin + nbytes])]))
    theirs[to : to + nbytes] = source[origin : origin + nbytes]
    assert torch.equal(ours, theirs)


@needs_compiler
@pytest.mark.parametrize("back", [False, True], ids=["out of the arena", "into the arena"])
def test_a_span_of_every_layer_moves_in_one_launch_whatever_its_elements(back: bool) -> None:
    shapes = {torch.bfloat16: (2, 700, 64), torch.float32: (3, 700, 24), torch.int64: (1, 700, 1)}
    arenas = [
        noise(3 * heads * cells * dim * dtype.itemsize, 1).view(dtype).view(3, heads, cells, dim)
        for dtype, (heads, cells, dim) in shapes.items()
    ]
    spans = [arena[1, :, 11:650] for arena in arenas]
    packed = [noise(span.nbytes, 2).view(span.dtype).view(span.shape) for span in spans]
    pairs = list(zip(spans, packed, strict=True)) if back else list(zip(packed, spans, strict=True))
    launch = launch_of(pairs)
    run_on_cpu(launch)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
    assert len(launch.table) == len(shapes)


def test_a_span_is_one_part_a_tensor_whole_where_it_lies_whole_and_by_heads_where_not() -> None:
    arena = torch.zeros(4, 3, 1001, 64, dtype=torch.bfloat16)
    span, packed = arena[2, :, 100:1000], torch.zeros(3, 900, 64, dtype=torch.bfloat16)
    run = 900 * 64 * 2
    launch = launch_of([(packed, span), (packed, packed.clone()), (packed[:0], span[:0])])
    assert launch.table[0].tolist() == [span.data_ptr(), packed.data_ptr(), 1001 * 128, run, run, 0]
    assert launch.table[1, 2:].tolist() == [0, 0, 3 * run, 3 * -(-run // TILE_BYTES)]
    assert launch.tiles == 3 * -(-run // TILE_BYTES) + -(-3 * run // TILE_BYTES)
    assert launch.scalars == (2, launch.tiles, TILE_BYTES)


def test_a_launch_takes_no_more_blocks_than_tiles_nor_the_whole_gpu() -> None:
    small, large = torch.zeros(10), torch.zeros(TILE_BYTES * MAX_GRID)
    assert launch_of([]).tiles == launch_of([]).grid == 0
    assert launch_of([(small, small.clone())]).grid == 1
    assert launch_of([(large, large.clone())]).grid == MAX_GRID


def test_tensors_that_differ_are_refused() -> None:
    for other in (torch.zeros(3, 4), torch.zeros(4, 3, dtype=torch.float64)):
        with pytest.raises(ValueError, match="is not"):
            launch_of([(torch.zeros(4, 3), other)])
