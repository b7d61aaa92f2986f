"""The codes of a GGUF file are kept as they are, under the layers that were made of them."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from torch import nn
from transformers import PreTrainedModel

from regrow.models.directory import load_directory
from regrow.models.gguf import convert_gguf
from regrow.models.gguf_header import read_header
from regrow.models.gguf_packing import packed_tensors
from regrow.models.load import load_model
from regrow.models.packed import PackedWeights
from regrow.models.progress import silent
from tests.models.gguf_files import tiny, write_gguf, write_lfm2, write_llama_cpp

KIND = gguf.GGMLQuantizationType
QUANTISED = pytest.mark.parametrize("kind", [KIND.Q4_0, KIND.Q4_1, KIND.Q8_0], ids=lambda kind: kind.name)
NAMES = {"blk.0.ffn_up.weight": "model.layers.0.mlp.up_proj.weight", "output.weight": "lm_head.weight"}


def converted(path: Path) -> tuple[PreTrainedModel, PackedWeights]:
    copy = convert_gguf(path, path.parent, silent)
    return load_directory(copy, torch.bfloat16, torch.device("cpu"))[0], PackedWeights(copy)


def expect_all(model: PreTrainedModel, packed: PackedWeights, bits: int, within: float = 0.0) -> None:
    """Every linear layer is packed, and its codes stand for its weights, which lost so much to rounding."""
    layers = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    assert set(packed) == set(layers)
    for name, layer in layers.items():
        assert packed[name].bits == bits
        off = packed[name].floats.bfloat16() - layer.weight
        assert off.abs().max() <= within, name


@QUANTISED
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
def test_the_reader_that_rounds_at_the_end(
    tmp_path: Path, kind: gguf.GGMLQuantizationType, tied: bool
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny("gemma3_text", tied), "gemma3", kind)
    expect_all(*converted(path), 8 if kind is KIND.Q8_0 else 4)


@QUANTISED
def test_rows_that_llama_cpp_reordered(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    original = tiny("llama")
    model, packed = converted(write_llama_cpp(tmp_path / "tiny.gguf", original, kind))
    expect_all(model, packed, 8 if kind is KIND.Q8_0 else 4)
    name = "model.layers.0.self_attn.q_proj"
    assert torch.allclose(packed[name].floats, original.get_submodule(name).weight, atol=0.2)


@QUANTISED
def test_the_reader_that_rounds_at_every_step(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    layers = ["conv", "full_attention"]
    original = tiny("lfm2", layer_types=layers, block_auto_adjust_ff_dim=False)
    model, packed = converted(write_lfm2(tmp_path / "tiny.gguf", original, kind))
    expect_all(model, packed, 8 if kind is KIND.Q8_0 else 4, within=0.02)


@QUANTISED
def test_codes_stand_for_what_the_file_says_before_any_rounding(
    tmp_path: Path, kind: gguf.GGMLQuantizationType
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny("llama"), "llama", kind)
    header = read_header(path)
    _, packed = converted(path)
    for tensor in header.tensors:
        if tensor.name == "blk.1.ffn_down.weight":
            raw = np.memmap(path, np.uint8, "r", tensor.start, tensor.size).reshape(tensor.shape[0], -1)
            wanted = torch.from_numpy(dequantize(raw, kind))
            assert torch.equal(packed["model.layers.1.mlp.down_proj"].floats, wanted)


def test_a_layer_with_other_rows_than_the_file_is_not_packed(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny("llama"), "llama", KIND.Q4_1)
    model, _ = converted(path)
    header = read_header(path)
    assert {name.rpartition(".")[0] for name in packed_tensors(header, model, NAMES)} == {
        "model.layers.0.mlp.up_proj",
        "lm_head",
    }
    model.model.layers[0].mlp.up_proj.weight.data[3, 3] += 1
    assert {name.rpartition(".")[0] for name in packed_tensors(header, model, NAMES)} == {"lm_head"}


def test_a_file_without_blocks_has_nothing_packed(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny("llama"), "llama")
    _, packed = converted(path)
    assert not packed


def test_a_model_brings_its_packed_weights_along(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny("llama"), "llama", KIND.Q8_0)
    model = load_model(str(path), model_dir=tmp_path)
    assert "lm_head" in model.packed
    with pytest.raises(KeyError):
        model.packed["model.norm"]
    other = write_gguf(tmp_path / "other.gguf", tiny("llama"), "llama", KIND.Q4_0)
    digests = {load_model(str(file), model_dir=tmp_path).packed.digest for file in (path, other)}
    assert len(digests) == 2
    assert not load_model("random:llama").packed
