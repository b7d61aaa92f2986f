"""Drawing tokens: each step by its formula, and the draw by exact inversion."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from regrow.gpu.sampling import adjust, draw, draw_all, invert, kept, uniform
from regrow.gpu.types import Row
from regrow.policy.keys import as_keys
from regrow.policy.request import SamplingParams

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 2.5])


def a_row(
    params: SamplingParams, *, answer: tuple[int, ...] = (), prompt: tuple[int, ...] = (), counter: int = 0
) -> Row:
    return Row(0, 0, 0, params, counter=counter, prompt_ids=as_keys(prompt), answer_ids=answer)


def chances(**params: float) -> dict[int, float]:
    tokens, weights = kept(LOGITS, SamplingParams(**params))  # type: ignore[arg-type]
    return dict(zip(tokens.tolist(), (weights / weights.sum()).tolist(), strict=True))


def softmax(logits: dict[int, float], temperature: float) -> dict[int, float]:
    weights = {token: math.exp(value / temperature) for token, value in logits.items()}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


def test_rows_that_are_drawn_together_get_what_each_gets_alone() -> None:
    rows = [
        a_row(SamplingParams()),
        a_row(SamplingParams(logit_bias={0: 9.0})),
        a_row(SamplingParams(repetition_penalty=2.0), answer=(1,)),
        a_row(SamplingParams(temperature=1.0, seed=3)),
        a_row(SamplingParams()),
    ]
    logits = LOGITS.repeat(5, 1)
    logits[4, 2] = math.nan
    alone = [draw(row, own) for row, own in zip(rows, logits, strict=True)]
    assert draw_all(rows, logits) == alone
    assert (alone[:3], alone[4]) == ([1, 0, 4], None)


def test_greedy_takes_the_largest_logit() -> None:
    assert draw(a_row(SamplingParams()), LOGITS) == 1


@pytest.mark.parametrize("tiny", [5e-324, 1e-310, 1e-45, 1e-20])
def test_a_number_next_to_zero_is_a_very_small_one_and_no_error(tiny: float) -> None:
    assert draw(a_row(SamplingParams(temperature=tiny)), LOGITS) == 1
    assert draw(a_row(SamplingParams(temperature=1.0, top_p=tiny)), LOGITS) == 1
    row = a_row(SamplingParams(temperature=1.0, repetition_penalty=tiny), prompt=(2,))
    assert draw(row, LOGITS) == 2
    assert bool(torch.isfinite(adjust(row, LOGITS)).all())


def test_the_logits_are_left_as_they_were() -> None:
    before = LOGITS.clone()
    draw(a_row(SamplingParams(logit_bias={0: 9.0}, repetition_penalty=2.0), prompt=(1,)), LOGITS)
    assert torch.equal(LOGITS, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_give_no_token(bad: float) -> None:
    logits = LOGITS.clone()
    logits[3] = bad
    assert draw(a_row(SamplingParams()), logits) is None
    assert draw(a_row(SamplingParams(temperature=1.0)), logits) is None


def test_repetition_counts_prompt_and_answer_once() -> None:
    row = a_row(SamplingParams(repetition_penalty=2.0), prompt=(1, 1, 3, -7), answer=(2, 1))
    assert adjust(row, LOGITS).tolist() == [1.0, 1.5, 1.0, -2.0, 2.5]


def test_presence_and_frequency_count_the_answer_only() -> None:
    row = a_row(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), prompt=(0, 3), answer=(1, 1, 2))
    assert adjust(row, LOGITS).tolist() == [1.0, 2.0, 1.25, -1.0, 2.5]


def test_bias_and_bans_come_after_the_penalties() -> None:
    row = a_row(SamplingParams(repetition_penalty=2.0, logit_bias={0: 2.0, 1: -100.0}), prompt=(0,))
    row.banned = frozenset({4})
    assert adjust(row, LOGITS).tolist() == [2.5, -97.0, 2.0, -1.0, -math.inf]


def test_a_grammar_has_the_last_word() -> None:
    class OnlyThree:
        def apply(self, logits: torch.Tensor) -> None:
            logits[[0, 1, 2, 4]] = -math.inf

        def accept(self, token: int) -> None:
            raise AssertionError("the loop that owns the answer says what was accepted")

    for params in (SamplingParams(), SamplingParams(temperature=2.0, top_p=0.5)):
        row = a_row(params)
        row.mask = OnlyThree()
        assert draw(row, LOGITS) == 3


def test_temperature_alone_keeps_everything() -> None:
    wanted = softmax(dict(enumerate(LOGITS.tolist())), 0.7)
    assert chances(temperature=0.7) == pytest.approx(wanted, rel=1e-6)


def test_top_k_keeps_the_k_most_likely() -> None:
    assert chances(temperature=1.0, top_k=2) == pytest.approx(softmax({1: 3.0, 4: 2.5}, 1.0), rel=1e-6)
    assert len(chances(temperature=1.0, top_k=50)) == 5


def test_top_p_keeps_tokens_until_their_mass_is_reached() -> None:
    full = softmax(dict(enumerate(LOGITS.tolist())), 1.0)
    assert set(chances(temperature=1.0, top_p=full[1] - 1e-6)) == {1}
    assert set(chances(temperature=1.0, top_p=full[1] + 1e-6)) == {1, 4}
    assert set(chances(temperature=1.0, top_p=full[1] + full[4] + 1e-6)) == {1, 4, 2}
    assert set(chances(temperature=1.0, top_p=1e-9)) == {1}


def test_top_p_counts_within_what_top_k_kept() -> None:
    half = softmax({1: 3.0, 4: 2.5}, 1.0)[1]
    assert set(chances(temperature=1.0, top_k=2, top_p=half + 1e-6)) == {1, 4}
    assert set(chances(temperature=1.0, top_k=2, top_p=half - 1e-6)) == {1}


def test_min_p_drops_what_is_far_less_likely_than_the_best() -> None:
    assert set(chances(temperature=1.0, min_p=math.exp(-1.0) - 1e-6)) == {1, 4, 2}
    assert set(chances(temperature=1.0, min_p=math.exp(-1.0) + 1e-6)) == {1, 4}
    assert set(chances(temperature=0.5, min_p=math.exp(-1.0) - 1e-6)) == {1, 4}


def test_the_draw_inverts_the_distribution_function() -> None:
    weights = torch.tensor([0.5, 0.0, 1.0, 0.25, 0.0], dtype=torch.float64)
    edges = {0.0: 0, 0.5 / 1.75 - 1e-12: 0, 0.5 / 1.75 + 1e-12: 2, 1.5 / 1.75 + 1e-12: 3, 1.0 - 2.0**-53: 3}
    assert {u: invert(weights, u) for u in edges} == edges
    assert invert(weights, 1.0) == 3, "rounding up never draws a token of no weight"


def test_random_numbers_are_a_pure_function_of_seed_and_counter() -> None:
    numbers = [uniform(seed, i) for seed in (0, 1, 2**63) for i in range(3000)]
    assert numbers[:3] == [uniform(0, 0), uniform(0, 1), uniform(0, 2)]
    assert len(set(numbers)) == len(numbers)
    assert all(0.0 <= u < 1.0 for u in numbers)
    assert np.histogram(numbers, bins=10, range=(0, 1))[0] == pytest.approx(900, abs=120)
    lag = np.corrcoef(numbers[:-1], numbers[1:])[0, 1]
    assert abs(lag) < 0.05


def test_draws_are_as_frequent_as_the_distribution_says() -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=11)
    wanted = chances(temperature=0.8, top_p=0.95)
    drawn = Counter(draw(a_row(params, counter=i), LOGITS) for i in range(4000))
    assert set(drawn) == set(wanted)
    for token, chance in wanted.items():
        assert drawn[token] / 4000 == pytest.approx(chance, abs=4 * math.sqrt(chance * (1 - chance) / 4000))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, top_p=0.5),
        SamplingParams(temperature=1.0, top_p=0.999),
        SamplingParams(temperature=1.0, top_k=40, top_p=0.9),
        SamplingParams(temperature=1.0, top_k=2000),
        SamplingParams(temperature=0.2, top_p=0.9, min_p=0.05),
    ],
)
def test_a_large_vocabulary_is_cut_as_a_small_one(params: SamplingParams) -> None:
    logits = torch.randn(20_000, generator=torch.Generator().manual_seed(3)) * 3
    by_rank = sorted(
        enumerate(torch.softmax(logits.double() / params.temperature, 0).tolist()), key=lambda x: -x[1]
    )
    by_rank = by_rank[: params.top_k or None]
    total, wanted, mass = sum(w for _, w in by_rank), [], 0.0
    for token, weight in by_rank:
        if (mass < params.top_p * total or params.top_p == 1) and weight >= params.min_p * by_rank[0][1]:
            wanted.append(token)
        mass += weight
    assert kept(logits, params)[0].tolist() == wanted


def test_order_of_equal_logits_is_that_of_the_vocabulary() -> None:
    flat = torch.zeros(6)
    tokens, _ = kept(flat, SamplingParams(temperature=1.0, top_k=3))
    assert tokens.tolist() == [0, 1, 2]
    assert draw(a_row(SamplingParams()), flat) == 0
