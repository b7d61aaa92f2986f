"""Drawing the next token from one row's logits.

The random number of draw i is a pure function of (seed, i), and the draw inverts the distribution function,
so a row's sample depends on nothing but its own request: not on other rows, not on what was drawn elsewhere.
Order, as usual in the field: repetition over prompt and answer, presence and frequency over the answer, bias,
bans, grammar; then temperature, top-k, top-p, min-p.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from regrow.gpu.types import Row
from regrow.policy.request import SamplingParams

GREEDY = 1e-5  # at this temperature or below the most likely token is taken: less would overflow
LEAST_PENALTY = 0.01  # of repetition; less would overflow too
_HEAD = 1024  # tokens looked at before a whole vocabulary is sorted


def uniform(seed: int, counter: int) -> float:
    """Return the number in [0, 1) that belongs to (seed, counter): 53 random bits."""
    digest = hashlib.blake2b(f"{seed}/{counter}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def draw_all(rows: Sequence[Row], logits: torch.Tensor) -> list[int | None]:
    """Return the next token of each of `rows` from the logits [rows, vocab]; None where they are not finite.

    What rows need that take the likeliest token comes to the host at once.
    """
    finite, likeliest = torch.stack([logits.isfinite().all(-1), logits.argmax(-1)]).tolist()
    return [
        None if not sound else first if _takes_likeliest(row) else _drawn(row, own)
        for row, own, sound, first in zip(rows, logits, finite, likeliest, strict=True)
    ]


def draw(row: Row, logits: torch.Tensor) -> int | None:
    """Return the next token of `row` from its logits [vocab]; None where they are not finite."""
    return draw_all([row], logits[None])[0]


def _takes_likeliest(row: Row) -> bool:
    params = row.sampling
    plain = params.repetition_penalty == 1.0 and not params.presence_penalty and not params.frequency_penalty
    free = not params.logit_bias and not row.banned and row.mask is None
    return params.temperature <= GREEDY and plain and free


def _drawn(row: Row, logits: torch.Tensor) -> int:
    scores = adjust(row, logits)
    if row.sampling.temperature <= GREEDY:
        return int(scores.argmax())
    tokens, weights = kept(scores, row.sampling)
    return int(tokens[invert(weights, uniform(row.sampling.seed, row.counter))])


def adjust(row: Row, logits: torch.Tensor) -> torch.Tensor:
    """Return a float32 copy of `logits` with penalties, bias, bans and the grammar of `row` applied."""
    params = row.sampling
    scores = logits.float().clone()
    if params.repetition_penalty != 1.0:
        seen = torch.zeros_like(scores, dtype=torch.bool)
        if row.prompt_ids is not None:
            text = row.prompt_ids[row.prompt_ids >= 0]  # image positions are no tokens
            seen[torch.from_numpy(text).to(scores.device)] = True
        seen[_index(row.answer_ids, scores)] = True
        penalty = max(params.repetition_penalty, LEAST_PENALTY)
        factor = torch.where(scores > 0, 1 / penalty, penalty)
        scores = torch.where(seen, scores * factor, scores)
    if params.presence_penalty or params.frequency_penalty:
        counts = Counter(row.answer_ids)
        times = torch.tensor(list(counts.values()), dtype=torch.float32, device=scores.device)
        scores[_index(counts, scores)] -= params.presence_penalty + params.frequency_penalty * times
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    if row.banned:
        scores[_index(row.banned, scores)] = -math.inf
    if row.mask is not None:
        row.mask.apply(scores)
    return scores


def kept(scores: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what may be drawn: (token ids, their weights in float64, not normalised).

    Without top-k and top-p the order is that of the vocabulary and nothing is sorted, else most likely first.
    """
    weights = torch.softmax(scores.double() / params.temperature, dim=0)
    tokens = torch.arange(len(weights), device=weights.device)
    if params.top_k or params.top_p < 1.0:
        weights, tokens = _ranked(weights, params)
        if params.top_k:
            weights, tokens = weights[: params.top_k], tokens[: params.top_k]
        if params.top_p < 1.0:
            whole = weights.sum() if params.top_k else 1.0
            stay = weights.cumsum(0) - weights < params.top_p * whole  # those before it do not fill top_p
            stay[0] = True
            weights, tokens = weights[stay], tokens[stay]
    if params.min_p > 0.0:
        stay = weights >= params.min_p * weights.max()
        weights, tokens = weights[stay], tokens[stay]
    return tokens, weights


def _ranked(weights: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Return probabilities, most likely first, and their tokens: all, or a head that is sure to suffice.

    Sorting a whole vocabulary takes milliseconds, finding its head a fraction of one.
    """
    if len(weights) > _HEAD:
        head, tokens = weights.topk(_HEAD)
        if 0 < params.top_k <= _HEAD or (not params.top_k and bool(head.sum() > params.top_p)):
            return head, tokens
    return weights.sort(descending=True, stable=True)


def invert(weights: torch.Tensor, u: float) -> int:
    """Return the first index whose cumulative weight exceeds u times the total."""
    cumulative = weights.cumsum(0)
    at = int(torch.searchsorted(cumulative, u * cumulative[-1], right=True))
    return min(at, int(weights.nonzero()[-1]))  # rounding of the last sum never yields a forbidden token


def _index(tokens: Iterable[int], scores: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(tokens), dtype=torch.int64, device=scores.device)
