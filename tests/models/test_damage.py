"""No damage to the files of a model gives more than a refusal in one line (GGUF: `test_gguf.py`)."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow import cli
from regrow.config import EngineSettings, ServerSettings
from regrow.errors import BadConfig, ModelRefused
from regrow.models.byte_tokenizer import byte_tokenizer
from regrow.models.directory import load_directory
from regrow.options import read_file, resolve
from tests.models.gguf_files import tiny

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
HEAD = 4096  # bytes of a file that are damaged: of the weights, their head
VALUES = st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=5) | st.just([1])
WORDS = st.text(max_size=8) | st.sampled_from(
    ["auto", "on", "-1", "0", "1e9", "nan", "inf", "64", "\x00", "a,b", ",", "\n", "full", "٣", "1_0"]
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny("llama", vocab_size=259).save_pretrained(path)
    byte_tokenizer(259, 512).save_pretrained(path)
    return path


def load_or_refuse(folder: Path) -> None:
    try:
        load_directory(folder, torch.float32, CPU)
    except ModelRefused as error:
        assert "\n" not in str(error)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_damaged_byte_of_any_file_gives_more_than_a_refusal(folder: Path, data: st.DataObject) -> None:
    damaged = folder.with_name("damaged")
    shutil.copytree(folder, damaged, dirs_exist_ok=True)
    path = damaged / data.draw(st.sampled_from(FILES))
    blob = bytearray(path.read_bytes())
    for place in data.draw(st.lists(st.integers(0, min(HEAD, len(blob)) - 1), min_size=1, max_size=4)):
        blob[place] = data.draw(st.integers(0, 255))
    path.write_bytes(blob[: data.draw(st.just(len(blob)) | st.integers(0, len(blob)))])
    load_or_refuse(damaged)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_value_in_a_configuration_gives_more_than_a_refusal(folder: Path, data: st.DataObject) -> None:
    damaged = folder.with_name("configured")
    shutil.copytree(folder, damaged, dirs_exist_ok=True)
    said = json.loads((folder / "config.json").read_text())
    for name in data.draw(st.lists(st.sampled_from(sorted(said)), min_size=1, max_size=3)):
        said[name] = data.draw(VALUES)
    (damaged / "config.json").write_text(json.dumps(said))
    load_or_refuse(damaged)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_word_in_the_table_of_the_weights_gives_more_than_a_refusal(
    folder: Path, data: st.DataObject
) -> None:
    """A table that is JSON still, about other tensors than those that follow."""
    damaged = folder.with_name("tabled")
    shutil.copytree(folder, damaged, dirs_exist_ok=True)
    blob = (folder / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(blob[:8], "little")
    table = json.loads(blob[8:end])
    for name in data.draw(st.lists(st.sampled_from(sorted(table)), min_size=1, max_size=3, unique=True)):
        match data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "gone", "other", "renamed"])):
            case "dtype" as field:
                table[name][field] = data.draw(st.sampled_from(["F16", "I64", "BOOL", "F4", ""]))
            case "shape" | "data_offsets" as field:
                table[name][field] = data.draw(st.lists(st.integers(-1, 2**62), max_size=3))
            case "gone":
                del table[name]
            case "other":
                table[name] = data.draw(VALUES)
            case "renamed":
                table[data.draw(st.text(max_size=9))] = table.pop(name)
    head = json.dumps(table).encode()
    (damaged / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + blob[end:])
    load_or_refuse(damaged)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_no_value_of_an_option_gives_more_than_a_clear_line(data: st.DataObject) -> None:
    options = cli.all_options(cli.SERVE)
    some = st.lists(st.sampled_from(options), min_size=1, max_size=3, unique_by=lambda option: option.name)
    values = {option.name: data.draw(WORDS | VALUES) for option in data.draw(some)}
    environment = {option.variable: data.draw(WORDS) for option in data.draw(some)}
    try:
        told = resolve(options, {}, environment, values, "here.toml")
    except BadConfig as error:
        places = [*environment, *(f"{name} in here.toml" for name in values)]
        assert str(error).startswith(tuple(f"{place}: " for place in places))
        assert "\n" not in str(error)
    else:
        fields = {field.name for of in (EngineSettings, ServerSettings) for field in dataclasses.fields(of)}
        assert fields & told.keys()
        assert not any(isinstance(value, float) and math.isnan(value) for value in told.values())


@settings(max_examples=200, deadline=None)
@given(text=st.text() | st.binary().map(lambda blob: blob.decode("latin-1")))
def test_no_text_in_a_configuration_file_gives_more_than_a_clear_line(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "options.toml"
    path.write_text(text, errors="surrogatepass")
    try:
        assert read_file(path, {"port"}).keys() <= {"port"}
    except BadConfig as error:
        assert str(error).startswith("--config: ")
