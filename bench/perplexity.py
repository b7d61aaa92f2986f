"""What packed weights cost in quality: perplexity on a fixed text, over that of weights as they are.

The text (bench/text.txt, written for this) is cut into eight passages. Each is read in one chunk, and once
more fed token by token in decode steps of eight rows, since packed weights are used in another way there. The
first tokens of a passage are not counted.
"""

import math
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import harness
from regrow.config import Quant
from regrow.gpu.fast import native
from regrow.gpu.fast.prepare import prepare
from regrow.gpu.runner import ModelRunner
from regrow.gpu.types import Chunk, Row
from regrow.models.load import load_model
from regrow.policy.request import SamplingParams

TEXT = Path(__file__).parent / "text.txt"
QUANTS: tuple[Quant, ...] = ("none", "int8", "int4", "auto")
PASSAGES = 8
UNCOUNTED = 16  # tokens
LONGEST = 512


def loss(logits: torch.Tensor, tokens: torch.Tensor) -> float:
    """Return the sum of what each token [n] costs by the logits [n, vocab] before it."""
    return float(cross_entropy(logits.float(), tokens, reduction="sum"))


def by_reading(runner: ModelRunner, passages: torch.Tensor) -> float:
    """Return the perplexity of passages [count, n], each read in one chunk."""
    total = 0.0
    for ids in passages:
        logits = runner.read(Chunk(0, 0, ids[:-1].numpy(), want_logits="all")).logits
        assert logits is not None
        total += loss(logits[UNCOUNTED - 1 :], ids[UNCOUNTED:])
        runner.empty(0)
    return math.exp(total / passages[:, UNCOUNTED:].numel())


def by_decoding(runner: ModelRunner, passages: torch.Tensor) -> float:
    """The same, what counts fed token by token by decode steps of all passages."""
    total, slots = 0.0, range(len(passages))
    for slot in slots:
        runner.read(Chunk(slot, 0, passages[slot, : UNCOUNTED - 1].numpy()))
        runner.join(slot)
    for at in range(UNCOUNTED - 1, passages.shape[1] - 1):
        logits = runner.decode([Row(slot, int(passages[slot, at]), at, SamplingParams()) for slot in slots])
        for slot in slots:
            runner.commit(slot, 1)
        total += loss(logits, passages[:, at + 1])
    for slot in slots:
        runner.empty(slot)
    return math.exp(total / passages[:, UNCOUNTED:].numel())


@torch.inference_mode()
def measure(opts: harness.Options) -> list[dict[str, harness.Cell]]:
    rows: list[dict[str, harness.Cell]] = []
    plain: tuple[float, float] | None = None
    for quant in QUANTS:
        loaded = load_model(opts.model)
        prepared = prepare(loaded.module, quant, loaded.packed)
        ids = torch.tensor(loaded.tokenizer.encode(TEXT.read_text()))
        length = min(len(ids) // PASSAGES, 64 if opts.quick else LONGEST)
        passages = ids[: PASSAGES * length].view(PASSAGES, length)
        runner = ModelRunner(loaded.module, PASSAGES, length, opts.exact)
        read, decoded = by_reading(runner, passages), by_decoding(runner, passages)
        plain = plain or (read, decoded)
        rows.append(
            {
                "quant": quant,
                "linear layers": str(prepared),
                "MiB": prepared.nbytes / 2**20,
                "reading": read,
                "ratio": read / plain[0],
                "decoding": decoded,
                "ratio ": decoded / plain[1],
                "tokens": passages.numel(),
            }
        )
    return rows


def main() -> None:
    opts = harness.options("perplexity", __doc__ or "")
    harness.report("perplexity", opts, f"Perplexity; native kernels {native.state()}", measure(opts))


if __name__ == "__main__":
    main()
