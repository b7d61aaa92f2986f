"""Log-probabilities of tokens, of the model's own distribution.

The log-softmax in float32 of the logits as the model gave them: before penalties, bias, bans and grammar, and
before temperature, top-k, top-p and min-p (vLLM's default, its raw_logprobs; OpenAI does not say of which
distribution its own are). So a prompt and an answer are measured alike, however the answer was drawn.
"""

from collections.abc import Iterator, Sequence

import torch

from regrow.gpu.types import Row, Scored
from regrow.policy.keys import Keys

_ROWS = 4  # places worked at together; with more, their copies of a large vocabulary are slow to get


def scores_of(row: Row, token: int | None, logits: torch.Tensor) -> tuple[Scored, ...]:
    """Return the score of the token that was drawn from `logits` [vocab]; nothing where none was, or where
    the request did not ask."""
    wanted = row.sampling.logprobs
    return () if token is None or wanted is None else tuple(scores(logits[None], (token,), wanted))


def prompt_scores(
    ids: Keys, start: int, stop: int, logits: torch.Tensor | None, alternatives: int | None
) -> tuple[Scored, ...] | None:
    """Return the scores that the chunk [start, stop) of a prompt tells where they are asked for, else
    nothing: those of the tokens of the prompt after each of it, and the first one's of all, which has none.
    None where `logits` [stop - start, vocab] are not finite."""
    if alternatives is None:
        return ()
    assert logits is not None
    if not bool(logits.isfinite().all()):
        return None
    first = (Scored(int(ids[0]), None),) if start == 0 else ()
    tokens = ids[start + 1 : stop + 1].tolist()
    return (*first, *scores(logits[: len(tokens)], tokens, alternatives))


def scores(logits: torch.Tensor, tokens: Sequence[int], alternatives: int) -> Iterator[Scored]:
    """Yield the score of each of `tokens` [n] by its row of `logits` [n, vocab], with the most likely tokens
    there: as many `alternatives` as asked for, equally likely ones in the order of their ids."""
    vocab = logits.shape[-1]
    ids = torch.arange(vocab, device=logits.device)
    for start in range(0, len(tokens), _ROWS):
        named = torch.tensor(tokens[start : start + _ROWS], device=logits.device)[:, None]
        logprobs = torch.log_softmax(logits[start : start + _ROWS].float(), dim=1)
        order = logprobs.abs().view(torch.int32).long()  # floats above zero rise as their bits do
        order <<= 32
        order += ids
        top = order.topk(min(alternatives, vocab), largest=False).indices
        values = logprobs.gather(1, torch.cat([named, top], dim=1)).tolist()
        for token, (value, *others), best in zip(named[:, 0].tolist(), values, top.tolist(), strict=True):
            yield Scored(token, value, tuple(zip(best, others, strict=True)))
