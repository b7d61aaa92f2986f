"""GGUF files become Hugging Face directories that hold what transformers itself would read, once."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.errors import ModelRefused
from regrow.models import gguf as converter
from regrow.models.directory import load_directory
from regrow.models.gguf import convert_gguf
from regrow.models.gguf_header import read_header
from regrow.models.load import load_model
from regrow.models.progress import silent
from tests.models.dialects import CHATML
from tests.models.gguf_files import (
    TOKENS,
    original_tokenizer,
    read_slowly,
    read_tokenizer_slowly,
    tiny,
    write_gguf,
    write_lfm2,
    write_llama_cpp,
)

CPU = torch.device("cpu")
KIND = gguf.GGMLQuantizationType
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "gemma3": "gemma3_text"}


@pytest.fixture(scope="module")
def llama_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("llama") / "tiny.gguf", tiny("llama"), "llama", KIND.Q8_0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kind", [KIND.F32, KIND.Q8_0, KIND.Q4_1], ids=lambda kind: kind.name)
def test_the_weights_are_those_that_transformers_reads(
    tmp_path: Path, architecture: str, kind: gguf.GGMLQuantizationType
) -> None:
    model = tiny(ARCHITECTURES[architecture], tied=architecture == "gemma3")
    path = write_gguf(tmp_path / "tiny.gguf", model, architecture, kind)
    dtype = torch.float32 if kind is KIND.F32 else torch.bfloat16
    ours, _ = load_directory(convert_gguf(path, tmp_path, silent), dtype, CPU)
    theirs = read_slowly(path, dtype)
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    ours_config, theirs_config = ours.config.to_dict(), theirs.config.to_dict()
    for volatile in ("dtype", "architectures", "_name_or_path", "quantization_config"):
        ours_config.pop(volatile, None), theirs_config.pop(volatile, None)
    assert ours_config == theirs_config


def test_a_file_in_llama_cpps_layout_gives_the_original_weights(tmp_path: Path) -> None:
    original = tiny("llama")
    path = write_llama_cpp(tmp_path / "tiny.gguf", original)
    ours, _ = load_directory(convert_gguf(path, tmp_path, silent), torch.float32, CPU)
    for name, tensor in original.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name


def test_what_a_file_says_of_its_shape_holds_where_transformers_takes_a_default(tmp_path: Path) -> None:
    original = tiny("qwen3", head_dim=48, vocab_size=len(TOKENS) + 15)
    path = write_gguf(tmp_path / "tiny.gguf", original, "qwen3")
    ours, _ = load_directory(convert_gguf(path, tmp_path, silent), torch.float32, CPU)
    for name, tensor in original.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name


def test_an_architecture_with_a_reader_of_its_own_is_converted_too(tmp_path: Path) -> None:
    layers = ["conv", "full_attention"]
    original = tiny("lfm2", layer_types=layers, block_auto_adjust_ff_dim=False)
    path = tmp_path / "tiny.gguf"
    write_lfm2(path, original)
    ours, tokenizer = load_directory(convert_gguf(path, tmp_path, silent), torch.float32, CPU)
    for name, tensor in original.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name
    assert tokenizer.encode("user\n") == original_tokenizer().encode("user\n").ids


def test_the_tokenizer_is_the_one_that_transformers_reads(llama_file: Path, tmp_path: Path) -> None:
    _, ours = load_directory(convert_gguf(llama_file, tmp_path, silent), torch.float32, CPU)
    theirs = read_tokenizer_slowly(llama_file)
    for text in ("user\n\nHello.\n", "<|im_start|>user\nx 12  3<|im_end|>", "\u4e2d\u00e9\U0001f600 '\"}"):
        assert ours.encode(text) == theirs.encode(text).ids == original_tokenizer().encode(text).ids
    assert ours.chat_template == CHATML.template


def test_a_vocabulary_learned_without_joined_digits_is_split_that_way(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny("llama"), "llama", pre="smollm")
    _, tokenizer = load_directory(convert_gguf(path, tmp_path, silent), torch.float32, CPU)
    assert tokenizer.tokenize("a  1") == ["a", "\u0120\u0120", "1"]


def test_every_end_token_of_the_file_ends_an_answer(llama_file: Path, tmp_path: Path) -> None:
    model = load_model(str(llama_file), model_dir=tmp_path)
    assert model.eos_ids == {len(TOKENS) - 1, len(TOKENS) - 2}
    assert model.name == "tiny"
    assert model.context == 512


def test_a_recommended_sampling_becomes_the_default(tmp_path: Path, llama_file: Path) -> None:
    path = write_gguf(
        tmp_path / "tiny.gguf",
        tiny("llama"),
        "llama",
        extra=lambda writer: (
            writer.add_float32("general.sampling.temp", 0.5),
            writer.add_int32("general.sampling.top_k", 7),
        ),
    )
    sampling = load_model(str(path), model_dir=tmp_path).default_sampling
    assert (sampling.temperature, sampling.top_k) == (0.5, 7)
    assert load_model(str(llama_file), model_dir=tmp_path).default_sampling.temperature == 0.0


def test_it_is_converted_once(llama_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = convert_gguf(llama_file, tmp_path, silent)

    def again(*args: object, **kwargs: object) -> None:
        raise AssertionError("converted twice")

    monkeypatch.setattr(converter, "_convert", again)
    assert convert_gguf(llama_file, tmp_path, silent) == first


def test_another_content_under_the_same_name_is_another_copy(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    first = convert_gguf(write_gguf(path, tiny("llama"), "llama"), tmp_path, silent)
    second = convert_gguf(write_gguf(path, tiny("llama"), "llama", KIND.Q8_0), tmp_path, silent)
    assert first != second


def test_progress_is_told(llama_file: Path, tmp_path: Path) -> None:
    told: list[float | None] = []
    convert_gguf(llama_file, tmp_path, lambda text, share: told.append(share))
    shares = [share for share in told if share is not None]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


# What cannot be converted is refused in one line that names the file.


def refusal(path: Path, tmp_path: Path) -> str:
    with pytest.raises(ModelRefused) as caught:
        convert_gguf(path, tmp_path, silent)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    assert not [file for file in (tmp_path / "converted").glob("*") if not file.name.startswith(".")]
    return message


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "damaged, truncated or no GGUF file"),
        (b"GGUF", "ends inside its header"),
        (b"PK\x03\x04" + bytes(100), "does not start with GGUF"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(100), "version 1"),
        (b"GGUF" + (3).to_bytes(4, "little") + bytes(16), "names no architecture"),
        (b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 64, "damaged, truncated"),
    ],
)
def test_what_is_no_gguf_file_is_refused(tmp_path: Path, content: bytes, cause: str) -> None:
    path = tmp_path / "foreign.gguf"
    path.write_bytes(content)
    assert cause in refusal(path, tmp_path)


def test_a_truncated_file_is_refused_with_the_tensor_that_is_cut(llama_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(llama_file.read_bytes()[:-1000])
    assert "ends at byte" in refusal(path, tmp_path)


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    writer = gguf.GGUFWriter(path, "oddity")
    writer.add_tensor("token_embd.weight", np.zeros((8, 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "oddity" in refusal(path, tmp_path)


def test_a_missing_tensor_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "part.gguf", tiny("llama"), "llama", without="blk.1.ffn_up")
    assert "model.layers.1.mlp.up_proj.weight" in refusal(path, tmp_path)


def test_tensors_of_a_wrong_shape_are_refused(tmp_path: Path) -> None:
    model = tiny("llama")
    model.config.intermediate_size = 80
    path = write_gguf(tmp_path / "wrong.gguf", model, "llama")
    refusal(path, tmp_path)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_damage_to_a_header_gives_more_than_a_refusal(
    llama_file: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    blob = bytearray(llama_file.read_bytes())
    end = read_header(llama_file).tensors[0].start
    for place in data.draw(st.lists(st.integers(0, end - 1), max_size=4)):
        blob[place] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(blob[: data.draw(st.integers(0, end) | st.just(len(blob)))])
    try:
        header = read_header(path)
    except ModelRefused as error:
        assert "\n" not in str(error)
        return
    assert all(tensor.start + tensor.size <= len(blob) for tensor in header.tensors)
