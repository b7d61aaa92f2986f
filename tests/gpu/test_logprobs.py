"""Log-probabilities: the log-softmax of the raw logits, the same bits however a place was reached, and those
of a prompt what one forward pass says."""

import math
import weakref
from collections.abc import Sequence
from itertools import count

import pytest
import torch

from regrow.gpu.device_loop import ChunkRead, DeviceEvent, DeviceLoop, Job, JobEnded, TokenDrawn
from regrow.gpu.logprobs import scores, scores_of
from regrow.gpu.types import Chunk, ReadResult, Row, Runner, Scored
from regrow.models.random_models import build_random
from regrow.policy.request import SamplingParams, StopRules
from tests.gpu.drive import FAMILIES, first_logits, follow, fresh_runner, plan_of, prompt, read
from tests.world.fake_runner import FakeRunner

GREEDY = SamplingParams(logprobs=4)
WILD = SamplingParams(
    temperature=1.7,
    top_k=40,
    top_p=0.9,
    min_p=0.01,
    seed=3,
    presence_penalty=1.0,
    frequency_penalty=0.5,
    repetition_penalty=1.3,
    logit_bias={7: 5.0},
    logprobs=4,
)
N, STEPS, ENDS = 131, 5, (37, 100)


def a_job(
    slot: int = 0,
    n: int = N,
    *,
    seed: int = 0,
    start: int = 0,
    sampling: SamplingParams = GREEDY,
    prompt_logprobs: int | None = None,
) -> Job:
    return Job(
        slot=slot,
        epoch=slot,
        generation=0,
        ids=prompt(n, seed),
        start=start,
        chunks=plan_of(n, ENDS).chunks_from(start),
        snapshot_at=frozenset(),
        sampling=sampling,
        stops=StopRules(max_tokens=STEPS),
        prompt_logprobs=prompt_logprobs,
    )


def run(runner: Runner, *jobs: Job) -> list[DeviceEvent]:
    """Do the jobs side by side; return the events of the first."""
    events: list[DeviceEvent] = []
    loop = DeviceLoop(runner, decode_share=0.5, now=count().__next__, deliver=events.extend)
    for job in jobs:
        loop.post(job)
    while loop.step():
        pass
    assert sum(isinstance(event, JobEnded) for event in events) == len(jobs)
    return [event for event in events if getattr(event, "slot", None) == jobs[0].slot]


def drawn(events: Sequence[DeviceEvent]) -> list[Scored]:
    found = [(event.token, event.score) for event in events if isinstance(event, TokenDrawn)]
    assert len(found) == STEPS
    assert all(score is not None and score.token == token for token, score in found)
    return [score for _, score in found if score is not None]


def of_prompt(events: Sequence[DeviceEvent]) -> list[Scored]:
    return [score for event in events if isinstance(event, ChunkRead) for score in event.scores]


def check(score: Scored, logits: torch.Tensor, tolerance: float) -> None:
    """Hold a score against the formula."""
    wanted = torch.log_softmax(logits.float(), 0)
    assert score.logprob == pytest.approx(float(wanted[score.token]), abs=tolerance)
    for token, logprob in score.top:
        assert logprob == pytest.approx(float(wanted[token]), abs=tolerance)
    best = wanted.topk(len(score.top)).values.tolist()
    assert [logprob for _, logprob in score.top] == pytest.approx(best, abs=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_is_scored_by_the_raw_logits_it_was_drawn_from(family: str) -> None:
    runner = fresh_runner(family)
    greedy = drawn(run(runner, a_job()))
    runner.empty(0)
    after_prompt = first_logits(runner, 0, prompt(N), plan_of(N, ENDS))
    steps = follow(runner, 0, [score.token for score in greedy[:-1]])
    for score, logits in zip(greedy, [after_prompt, *steps], strict=True):
        check(score, logits, 0.0)
        assert score.token == int(logits.argmax())
        assert score.top[0] == (score.token, score.logprob)


@pytest.mark.parametrize("family", FAMILIES)
def test_penalties_bias_temperature_and_cuts_change_what_is_drawn_and_not_its_score(family: str) -> None:
    runner = fresh_runner(family)
    wild = drawn(run(runner, a_job(sampling=WILD)))
    tokens = [score.token for score in wild]
    runner.empty(0)
    after_prompt = first_logits(runner, 0, prompt(N), plan_of(N, ENDS))
    unlikely = 0
    for score, logits in zip(wild, [after_prompt, *follow(runner, 0, tokens[:-1])], strict=True):
        check(score, logits, 0.0)
        unlikely += score.token != int(logits.argmax())
    assert unlikely, "the test shows nothing where the greedy tokens are drawn"


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_the_same_bits_beside_other_requests_and_resumed_from_a_checkpoint(family: str) -> None:
    runner = fresh_runner(family)
    job = a_job(1, sampling=WILD, prompt_logprobs=3)
    alone = run(runner, job)
    runner.reset()
    others = [a_job(0, 300, seed=5, sampling=WILD), a_job(3, 20, seed=6, prompt_logprobs=9)]
    beside = run(runner, job, *others)
    assert drawn(beside) == drawn(alone)
    assert of_prompt(beside) == of_prompt(alone)
    runner.empty(1)
    kept = read(runner, 1, prompt(N), plan_of(N, ENDS))
    for cut in (100, 37):
        runner.mount(1, cut, kept[cut])
        assert drawn(run(runner, a_job(1, start=cut, sampling=WILD))) == drawn(alone), cut


@pytest.mark.parametrize("family", FAMILIES)
def test_asking_changes_neither_the_answer_nor_what_the_slot_holds(family: str) -> None:
    runner = fresh_runner(family)
    asked = run(runner, a_job(prompt_logprobs=2))
    with_scores = runner.digest(0)
    runner.empty(0)
    plain = run(runner, a_job(sampling=SamplingParams()))
    assert runner.digest(0) == with_scores
    tokens = [event.token for event in plain if isinstance(event, TokenDrawn)]
    assert tokens == [score.token for score in drawn(asked)]
    assert of_prompt(plain) == []
    assert all(event.score is None for event in plain if isinstance(event, TokenDrawn))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_is_scored_as_one_forward_pass_does(family: str) -> None:
    scored = of_prompt(run(fresh_runner(family), a_job(prompt_logprobs=5)))
    ids = prompt(N)
    assert [score.token for score in scored] == ids.tolist()
    assert scored[0] == Scored(int(ids[0]), None)
    logits = build_random(family)(input_ids=torch.tensor(ids)[None], use_cache=False).logits[0]
    for score, before in zip(scored[1:], logits, strict=False):
        check(score, before, 1e-4)
        assert len(score.top) == 5


def test_the_scores_of_a_prompt_come_with_the_chunk_that_tells_them() -> None:
    events = run(fresh_runner("llama"), a_job(prompt_logprobs=0))
    chunks = [event for event in events if isinstance(event, ChunkRead)]
    assert [(chunk.position, len(chunk.scores)) for chunk in chunks] == [
        (37, 38),
        (64, 27),
        (100, 36),
        (128, 28),
        (130, 2),
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_of_one_token_has_no_score_and_its_answer_has(family: str) -> None:
    runner = fresh_runner(family)
    events = run(runner, a_job(n=1, prompt_logprobs=3))
    assert of_prompt(events) == [Scored(int(prompt(1)[0]), None)]
    runner.empty(0)
    logits = runner.read(Chunk(0, 0, prompt(1), want_logits="last")).logits
    assert logits is not None
    check(drawn(events)[0], logits, 0.0)


def test_a_prompt_with_logits_that_are_not_finite_ends_before_it_is_told() -> None:
    runner = FakeRunner(context=512)
    runner.nan_at.add((0, 80))
    *chunks, end = run(runner, a_job(prompt_logprobs=1))
    assert isinstance(end, JobEnded)
    assert end.reason == "non_finite"
    assert [chunk.position for chunk in chunks if isinstance(chunk, ChunkRead)] == [37, 64]


def test_the_logits_of_a_chunk_are_gone_when_it_is_read() -> None:
    class Watched:
        def __getattr__(self, name: str) -> object:
            return getattr(runner, name)

        def read(self, chunk: Chunk, between: object = None) -> ReadResult:
            assert all(ref() is None for ref in held)
            result = runner.read(chunk)
            assert result.logits is not None
            assert result.logits.shape == (len(chunk.ids), 512)
            held.append(weakref.ref(result.logits))
            return result

    held: list[weakref.ref[torch.Tensor]] = []
    runner = fresh_runner("llama")
    run(Watched(), a_job(prompt_logprobs=1))
    assert len(held) == len(plan_of(N, ENDS).chunks_from(0))
    assert held[-1]() is None


def test_equally_likely_tokens_come_in_the_order_of_their_ids() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0], [0.0] * 6])
    first, second = scores(logits, [4, 5], 4)
    assert [token for token, _ in first.top] == [1, 3, 2, 4]
    assert [token for token, _ in second.top] == [0, 1, 2, 3]
    assert second.logprob == pytest.approx(-math.log(6))
    assert first.logprob == dict(first.top)[4]


def test_a_certain_token_has_the_log_probability_zero_and_comes_first() -> None:
    (score,) = scores(torch.tensor([[-200.0, 200.0, -200.0]]), [1], 3)
    assert score.logprob == 0.0
    assert score.top == ((1, 0.0), (0, -400.0), (2, -400.0))


@pytest.mark.parametrize(("asked", "told"), [(0, 0), (3, 3), (20, 6)])
def test_as_many_alternatives_are_told_as_asked_for_and_there_are(asked: int, told: int) -> None:
    (score,) = scores(torch.randn(1, 6), [2], asked)
    assert len(score.top) == told


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_chunk_is_scored_as_each_of_its_places_alone(dtype: torch.dtype) -> None:
    logits = torch.randn(77, 300, generator=torch.Generator().manual_seed(1)).to(dtype)
    tokens = list(range(77))
    alone = [next(scores(own[None], [token], 6)) for own, token in zip(logits, tokens, strict=True)]
    assert list(scores(logits, tokens, 6)) == alone
    for score, own in zip(alone, logits, strict=True):
        check(score, own, 1e-6)


def test_who_does_not_ask_costs_nothing() -> None:
    logits = torch.full((6,), math.nan)
    assert scores_of(Row(0, 0, 0, SamplingParams()), 3, logits) == ()
    assert scores_of(Row(0, 0, 0, GREEDY), None, logits) == ()
