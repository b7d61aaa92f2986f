"""Hugging Face directories: loaded without a network, or refused in one line with the reason."""

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from regrow.errors import ModelRefused
from regrow.models.byte_tokenizer import byte_tokenizer
from regrow.models.directory import load_directory
from tests.models.gguf_files import tiny

CPU = torch.device("cpu")
WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    tiny("llama", vocab_size=259).save_pretrained(path)
    byte_tokenizer(259, 512).save_pretrained(path)
    return path


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_it_loads_in_the_asked_type_with_its_tokenizer(folder: Path) -> None:
    model, tokenizer = load_directory(folder, torch.bfloat16, CPU)
    assert model.dtype == torch.bfloat16
    assert not model.training
    stored = load_file(folder / WEIGHTS)
    for name, tensor in stored.items():
        assert torch.equal(model.state_dict()[name], tensor.bfloat16()), name
    assert tokenizer.decode(tokenizer.encode("Gr\u00fc\u00dfe")) == "Gr\u00fc\u00dfe"


def test_shards_are_one_model(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = load_directory(folder, torch.float32, CPU)
    sharded = tmp_path / "sharded"
    model.save_pretrained(sharded, max_shard_size="100KB")
    tokenizer.save_pretrained(sharded)
    assert len(list(sharded.glob("*.safetensors"))) > 1
    again, _ = load_directory(sharded, torch.float32, CPU)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_tied_weights_stay_tied(folder: Path) -> None:
    tiny("llama", tied=True, vocab_size=259).save_pretrained(folder)
    model, _ = load_directory(folder, torch.float32, CPU)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_no_network_is_needed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    load_directory(folder, torch.float32, CPU)


def test_nothing_is_printed(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_directory(folder, torch.float32, CPU)
    assert capfd.readouterr() == ("", "")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def forget(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).unlink()


def without_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors["model.norm.weight"]
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def without_a_shard(folder: Path) -> None:
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


REFUSALS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no configuration": (lambda f: forget(f, "config.json"), "has no config.json"),
    "damaged configuration": (lambda f: cut(f / "config.json"), "cannot be loaded"),
    "configuration of another shape": (lambda f: (f / "config.json").write_text("[]"), "cannot be loaded"),
    "unknown architecture": (lambda f: edit(f / "config.json", model_type="oddity"), "architecture 'oddity'"),
    "code of its own": (
        lambda f: edit(f / "config.json", model_type="oddity", auto_map={"AutoConfig": "x.Y"}),
        "code that comes with a model is not run",
    ),
    "encoder-decoder": (
        lambda f: edit(f / "config.json", model_type="t5", is_encoder_decoder=True),
        "encoder-decoder",
    ),
    "an encoder": (
        lambda f: edit(f / "config.json", model_type="bert", architectures=["BertForMaskedLM"]),
        "no causal language model, but BertForMaskedLM",
    ),
    "not a language model": (
        lambda f: edit(f / "config.json", model_type="vit", architectures=["ViTModel"]),
        "no causal language model",
    ),
    "no weights": (lambda f: forget(f, WEIGHTS), "has no model.safetensors"),
    "pickled weights": (pickled, "pytorch_model.bin is not used"),
    "truncated weights": (lambda f: cut(f / WEIGHTS), "model.safetensors is damaged"),
    "foreign weights": (lambda f: (f / WEIGHTS).write_bytes(b"PK" * 50), "model.safetensors is damaged"),
    "a missing shard": (without_a_shard, "has no model-00002-of-00002.safetensors"),
    "a missing tensor": (without_a_tensor, "no weights for 1 parameters, such as model.norm.weight"),
    "tensors of another shape": (
        lambda f: edit(f / "config.json", intermediate_size=80),
        "has the shape (64, 96), its configuration says (64, 80)",
    ),
    "an impossible configuration": (
        lambda f: edit(f / "config.json", num_attention_heads="four"),
        "cannot be loaded",
    ),
    "no tokenizer": (lambda f: forget(f, "tokenizer.json"), "has no tokenizer"),
    "a damaged tokenizer": (lambda f: cut(f / "tokenizer.json"), "tokenizer of"),
}


@pytest.mark.parametrize(("damage", "reason"), REFUSALS.values(), ids=REFUSALS.keys())
def test_what_cannot_be_served_is_refused_with_the_reason(
    folder: Path, damage: Callable[[Path], object], reason: str
) -> None:
    damage(folder)
    with pytest.raises(ModelRefused) as caught:
        load_directory(folder, torch.float32, CPU)
    message = str(caught.value)
    assert reason in message
    assert str(folder) in message
    assert "\n" not in message
