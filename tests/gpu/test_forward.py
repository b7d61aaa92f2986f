"""One pass of a model over slots: what it computes, and what it does not."""

import torch

from regrow.gpu.runner import ModelRunner
from regrow.gpu.types import Chunk
from regrow.models.random_models import build_random
from tests.gpu.drive import prompt


def test_the_head_gets_the_last_row_of_a_chunk_alone_and_side_by_side() -> None:
    model = build_random("llama")
    runner = ModelRunner(model, 1, 64, "cache")
    seen: list[torch.Tensor] = []
    model.get_output_embeddings().register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    runner.read(Chunk(0, 0, prompt(20)))
    [row] = seen
    hidden = model.config.hidden_size
    assert (row.shape, row.stride()) == ((1, 1, hidden), (hidden, hidden, 1))
