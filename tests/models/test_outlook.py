"""What `doctor` says of a model, without reading its weights."""

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType
from transformers import GenerationConfig

from regrow.errors import BadConfig
from regrow.models import demo
from regrow.models.byte_tokenizer import byte_tokenizer
from regrow.models.chosen import chosen_once
from regrow.models.gguf import convert_gguf, converted_path
from regrow.models.identity import file_digest
from regrow.models.load import load_model
from regrow.models.outlook import model_rows_of
from regrow.models.progress import silent
from regrow.models.report import Row
from regrow.policy.chunks import ChosenChunks
from regrow.policy.plan import ChunkTable
from tests.models.gguf_files import tiny, write_gguf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with a model whose makers recommend a sampling."""
    tiny("llama", vocab_size=259).save_pretrained(tmp_path / "tiny")
    byte_tokenizer(259, 512).save_pretrained(tmp_path / "tiny")
    GenerationConfig(do_sample=True, temperature=0.6, top_k=20).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def outlook(name: object, **options: object) -> dict[str, Row]:
    return {row.subject: row for row in model_rows_of(str(name), **options)}


def test_a_directory_is_told_with_what_a_request_gets_by_default(folder: Path) -> None:
    rows = outlook(folder)
    assert rows["model"].note == f"llama, from {folder}"
    assert rows["context"].fact == "512 tokens"
    assert rows["chat template"] == ("chat template", "the model's own", "marks where every message ends")
    assert rows["default sampling"].fact == "temperature 0.6, top_k 20"
    loaded = load_model(str(folder))
    assert (loaded.context, loaded.default_sampling.temperature, loaded.default_sampling.top_k) == (
        512,
        0.6,
        20,
    )


def test_the_chunks_that_were_chosen_for_it_are_told_and_whether_they_keep_the_bound(
    folder: Path, tmp_path: Path
) -> None:
    assert outlook(folder, model_dir=tmp_path)["chunks"].fact == "not measured yet"
    chosen = ChosenChunks(ChunkTable(((0, 256), (2048, 64))), "from token 4,096 on a chunk takes longer")
    chosen_once(tmp_path, str(folder), ("w",), 150.0, lambda: chosen, silent)
    chosen_once(tmp_path, "another", ("w2",), 150.0, lambda: chosen, silent)
    row = outlook(folder, model_dir=tmp_path)["chunks"]
    assert row.fact == "256, 64 from 2,048 (tokens)"
    assert row.note == "--max-stall-ms 150: from token 4,096 on a chunk takes longer"


def test_what_its_file_holds_as_codes_is_told_and_what_an_option_makes_of_it(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "some.gguf", tiny("llama"), "llama", GGMLQuantizationType.Q8_0)
    convert_gguf(file, tmp_path, silent)
    row = outlook(file, model_dir=tmp_path)["linear layers"]
    assert row.fact == "15 as codes of 8 bits"
    assert row.note.startswith("--quant auto uses these")
    assert "rounds" in outlook(file, model_dir=tmp_path, quant="int4")["linear layers"].note


def test_a_directory_without_codes_is_told_so(folder: Path) -> None:
    row = outlook(folder)["linear layers"]
    assert (row.fact, row.note) == ("as weights alone", "--quant auto leaves all as they are")


def test_a_model_that_recommends_no_sampling_is_greedy(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert outlook(folder)["default sampling"].fact == "greedy"
    assert load_model(str(folder)).default_sampling.temperature == 0.0


def test_a_model_without_a_chat_template_is_for_completions_only_unless_one_is_given(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    assert outlook(folder)["chat template"].fact == "none"
    assert "completions only" in outlook(folder)["chat template"].note
    given = outlook(folder, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    assert given["chat template"].fact == "--chat-template"
    assert "does not mark where a user message ends" in given["chat template"].note
    with pytest.raises(BadConfig):
        outlook(folder, chat_template="no/such/file")


def test_a_random_model_is_told_without_being_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regrow.models.random_models.random_model", None)
    rows = outlook("random:gemma3:135m")
    assert rows["context"].fact == "32,768 tokens"
    assert "chat template" in rows


@pytest.mark.parametrize("name", ["nosuch", "random:nosuch", "missing.gguf"])
def test_what_cannot_be_served_is_told_with_the_reason(name: str, tmp_path: Path) -> None:
    (row,) = model_rows_of(name, tmp_path)
    assert row.note.startswith("cannot be served: ")
    assert "nosuch" in row.note or "missing" in row.note


def test_a_damaged_directory_is_told_with_the_reason(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"x")
    (row,) = model_rows_of(str(folder))
    assert "model.safetensors is damaged" in row.note


def test_what_must_be_fetched_or_converted_first_is_not_fetched_or_converted(
    folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "some.gguf"
    file.write_bytes(b"GGUF")
    for name in ("demo", str(file), "nobody/nothing"):
        assert outlook(name, model_dir=tmp_path / "kept")["model"].note.startswith("not here yet")
    assert not (tmp_path / "kept").exists()
    for kept, name in (
        (converted_path(file, tmp_path / "kept", file_digest(file)), str(file)),
        (converted_path(demo.demo_path(tmp_path), tmp_path / "kept", demo.SHA256), "demo"),
    ):
        kept.parent.mkdir(parents=True, exist_ok=True)
        folder.rename(kept)
        assert outlook(name, model_dir=tmp_path / "kept")["model"].note == f"llama, from {kept}"
        kept.rename(folder)
