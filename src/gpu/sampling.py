"""Drawing the next token from one row's logits.

The random number of draw i is a pure function of (seed, i), and the draw inverts the distribution function,
so a row's sample depends on nothing but its own request: not on other rows, not on what was drawn elsewhere.
Order, as usual in the field: repetition over prompt and answer, presence and frequency over the answer, bias,
bans, grammar; then temperature, top-k, top-p, min-p.
"""

import hashlib
import math
from collections import Counter

import torch

from regrow.gpu.types import Row
from regrow.policy.request import SamplingParams


def uniform(seed: int, counter: int) -> float:
    """Return the number in [0, 1) that belongs to (seed, counter): 53 random bits."""
    digest = hashlib.blake2b(f"{seed}/{counter}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def draw(row: Row, logits: torch.Tensor) -> int | None:
    """Return the next token of `row` from its logits [vocab]; None where they are not finite."""
    if not bool(torch.isfinite(logits).all()):
        return None
    scores = adjust(row, logits)
    if row.sampling.temperature <= 0:
        return int(scores.argmax())
    tokens, weights = kept(scores, row.sampling)
    return int(tokens[invert(weights, uniform(row.sampling.seed, row.counter))])


def adjust(row: Row, logits: torch.Tensor) -> torch.Tensor:
    """Return a float32 copy of `logits` with penalties, bias, bans and the grammar of `row` applied."""
    params = row.sampling
    scores = logits.float().clone()
    if params.repetition_penalty != 1.0:
        prompt = () if row.prompt_ids is None else row.prompt_ids.tolist()
        seen = _index({token for token in (*prompt, *row.answer_ids) if token >= 0}, scores)
        old = scores[seen]
        scores[seen] = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
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
        weights, tokens = weights.sort(descending=True, stable=True)
        if params.top_k:
            weights, tokens = weights[: params.top_k], tokens[: params.top_k]
        if params.top_p < 1.0:
            before = weights.cumsum(0) - weights  # a token stays while those before it do not fill top_p
            stay = before < params.top_p * weights.sum()
            stay[0] = True
            weights, tokens = weights[stay], tokens[stay]
    if params.min_p > 0.0:
        stay = weights >= params.min_p * weights.max()
        weights, tokens = weights[stay], tokens[stay]
    return tokens, weights


def invert(weights: torch.Tensor, u: float) -> int:
    """Return the first index whose cumulative weight exceeds u times the total."""
    cumulative = weights.cumsum(0)
    at = int(torch.searchsorted(cumulative, u * cumulative[-1], right=True))
    return min(at, int(weights.nonzero()[-1]))  # rounding of the last sum never yields a forbidden token


def _index(tokens: object, scores: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(tokens), dtype=torch.int64, device=scores.device)  # type: ignore[call-overload]
