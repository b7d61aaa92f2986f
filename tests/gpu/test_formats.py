"""A model gives the same logits, so the same tokens, and digests whichever format it is stored in."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from regrow.gpu.runner import ModelRunner
from regrow.gpu.types import Digest
from regrow.models.load import load_model
from tests.gpu.drive import follow, plan_of, poison, read
from tests.models.dialects import CHATML
from tests.models.gguf_files import original_tokenizer, tiny, write_lfm2, write_llama_cpp

TEXT = "".join(
    f"<|im_start|>user\n{n} times {n * n}?<|im_end|>\n<|im_start|>assistant\n" for n in range(12, 90, 13)
)
HYBRID = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}


@pytest.mark.parametrize(
    ("family", "theta", "settings", "write"),
    [("llama", 12_345.0, {}, write_llama_cpp), ("lfm2", 10_000.0, HYBRID, write_lfm2)],
)
def test_gguf_and_safetensors_of_a_model_give_the_same_tokens(
    tmp_path: Path,
    family: str,
    theta: float,
    settings: dict[str, Any],
    write: Callable[[Path, PreTrainedModel], Path],
) -> None:
    rope = {"rope_type": "default", "rope_theta": theta}
    model = tiny(family, **settings, rope_parameters=rope)
    gguf = write(tmp_path / "tiny.gguf", model)
    directory = tmp_path / "directory"
    model.save_pretrained(directory, max_shard_size="100KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=original_tokenizer(), eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML.template
    tokenizer.save_pretrained(directory)
    (first, parts), (second, other_parts) = (continued(path, tmp_path) for path in (directory, gguf))
    assert len(set(first.argmax(-1).tolist())) > 10
    assert torch.equal(second, first)
    assert other_parts == parts


def continued(path: Path, model_dir: Path) -> tuple[torch.Tensor, Digest]:
    """Load the model, read the text and step through its end; return the logits of the steps and a digest."""
    loaded = load_model(str(path), dtype="float32", model_dir=model_dir)
    ids = loaded.tokenizer.encode(TEXT)
    start = len(ids) - 40
    runner = ModelRunner(loaded.module, 2, len(ids), "full")
    poison(runner)
    read(runner, 1, ids[: start + 1], plan_of(start + 1))
    return follow(runner, 1, ids[start:].tolist()), runner.digest(1)
