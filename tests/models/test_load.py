"""From the name of a model to a model that can be served."""

from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from regrow.errors import BadConfig, ModelRefused
from regrow.models import sources
from regrow.models.byte_tokenizer import byte_tokenizer
from regrow.models.load import load_model, sampling_of
from tests.models.gguf_files import tiny


def save(path: Path, seed: int = 0, **more: object) -> Path:
    model = tiny("llama", vocab_size=259, **more)
    torch.manual_seed(seed)
    model.model.norm.weight.data.normal_()
    model.save_pretrained(path)
    byte_tokenizer(259, 512).save_pretrained(path)
    return path


def test_a_directory_is_served_under_its_own_name(tmp_path: Path) -> None:
    model = load_model(str(save(tmp_path / "tiny")))
    assert (model.name, model.source, model.context) == ("tiny", tmp_path / "tiny", 512)
    assert not model.module.training
    assert not any(parameter.requires_grad for parameter in model.module.parameters())


def test_a_random_model_is_the_same_each_time() -> None:
    first, second = load_model("random:llama"), load_model("random:llama:tiny")
    assert first.fingerprint == second.fingerprint
    assert first.source is None
    assert first.context == 32_768
    assert first.tokenizer.has_template
    assert first.eos_ids
    assert load_model("random:gemma3").fingerprint != first.fingerprint


def test_every_end_of_configuration_and_tokenizer_ends_an_answer(tmp_path: Path) -> None:
    path = save(tmp_path / "tiny", eos_token_id=[3, 4])
    GenerationConfig(eos_token_id=5).save_pretrained(path)
    model = load_model(str(path))
    own = byte_tokenizer(259, 512).eos_token_id
    assert model.eos_ids == {3, 4, 5, own}
    assert model.tokenizer.eos_ids == model.eos_ids


def test_the_fingerprint_differs_where_one_weight_or_the_configuration_differs(tmp_path: Path) -> None:
    prints = [
        load_model(str(path)).fingerprint
        for path in (
            save(tmp_path / "a"),
            save(tmp_path / "same"),
            save(tmp_path / "b", seed=1),
            save(tmp_path / "c", rope_parameters={"rope_type": "default", "rope_theta": 77.0}),
        )
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_the_fingerprint_does_not_depend_on_how_the_files_are_cut(tmp_path: Path) -> None:
    model = load_model(str(save(tmp_path / "one")), dtype="float32")
    model.module.save_pretrained(tmp_path / "many", max_shard_size="100KB")
    byte_tokenizer(259, 512).save_pretrained(tmp_path / "many")
    assert load_model(str(tmp_path / "many"), dtype="float32").fingerprint == model.fingerprint


def test_of_a_large_model_every_tensor_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regrow.models.identity.WHOLE", 0)
    first, second = load_model(str(save(tmp_path / "a"))), load_model(str(save(tmp_path / "b", seed=1)))
    assert first.fingerprint != second.fingerprint


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, (0.0, 0, 1.0)),
        ({"do_sample": False}, (0.0, 0, 1.0)),
        ({"do_sample": True}, (1.0, 0, 1.0)),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}, (0.6, 20, 0.95)),
    ],
)
def test_the_default_sampling_is_what_the_makers_recommend(
    generation: dict[str, object], expected: tuple[float, int, float]
) -> None:
    sampling = sampling_of(GenerationConfig(**generation))
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == expected


def test_a_given_template_is_used(tmp_path: Path) -> None:
    model = load_model("random:llama", chat_template="{{ messages[0].content }}!")
    assert model.tokenizer.render([{"role": "user", "content": "Hi"}]) == "Hi!"
    with pytest.raises(BadConfig):
        load_model("random:llama", chat_template=str(tmp_path / "none.jinja"))


@pytest.mark.parametrize("name", ["nosuch", "./no/such/folder/here", "missing.gguf", "", "a b/c"])
def test_a_name_of_nothing_is_refused_with_the_forms_there_are(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"there is no model.*random:FAMILY"):
        load_model(name, model_dir=tmp_path)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"x")
    with pytest.raises(ModelRefused, match=r"model\.bin is a file, but not a \.gguf file"):
        load_model(str(file))


def test_a_model_of_the_hub_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetch(name: str, **kwargs: object) -> str:
        asked.append(name)
        return str(save(tmp_path / "snapshot"))

    monkeypatch.setattr(sources, "snapshot_download", fetch)
    model = load_model("some-org/some-model", model_dir=tmp_path)
    assert asked == ["some-org/some-model"]
    assert model.name == "some-org/some-model"


def test_without_a_network_a_model_of_the_hub_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(name: str, **kwargs: object) -> str:
        raise OSError("no route to host\nand more")

    monkeypatch.setattr(sources, "snapshot_download", offline)
    with pytest.raises(
        ModelRefused, match=r"some-org/some-model.*could not be fetched.*no route to host"
    ) as caught:
        load_model("some-org/some-model")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("units", "dtype"), [({"avx512_bf16": True}, "bfloat16"), ({"avx2": True}, "float32")]
)
def test_auto_means_bfloat16_where_the_cpu_has_units_for_it(
    units: dict[str, bool], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": False, **units})
    assert load_model("random:llama").module.dtype == getattr(torch, dtype)
    assert load_model("random:llama", dtype="float16").module.dtype == torch.float16
