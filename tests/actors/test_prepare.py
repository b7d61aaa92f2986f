"""What becomes of a prompt: tokens, a plan, and clear words for what cannot be read."""

import threading
from collections.abc import Sequence

import pytest

from regrow.actors.prepare import Preparer
from regrow.errors import BadRequest, ContextLengthExceeded
from regrow.models.byte_tokenizer import IM_END, IM_START
from regrow.models.constrain import Grammars
from regrow.policy.keys import Namespace
from regrow.policy.plan import ChunkTable
from regrow.policy.request import GenerateRequest, SamplingParams
from tests.world.engine import engine_in, runner_in
from tests.world.loop import VirtualLoop, run_world
from tests.world.tokenizer import VOCAB, world_tokenizer

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}]
CHAT = GenerateRequest(messages=MESSAGES)


@pytest.fixture
def prepare() -> Preparer:
    return Preparer(
        tokenizer=world_tokenizer(),
        table=ChunkTable.uniform(64),
        namespace=Namespace.of("test"),
        context=256,
        checkpoints=6,
        checkpoint_every=0,
        grammars=Grammars(world_tokenizer()),
    )


def test_a_plan_cuts_a_prompt_on_the_grid_and_at_the_ends_of_messages(prepare: Preparer) -> None:
    keys, plan = prepare.plan_of(CHAT)
    text = prepare.text_of(keys.tolist())
    system, user = plan.ends
    assert text[: text.index("<|im_start|>user")].count("Be brief.") == 1
    assert (system.role, user.role) == ("system", "user")
    assert prepare.text_of(keys[: system.position].tolist()).endswith("Be brief.<|im_end|>\n")
    assert set(plan.cuts) == {system.position, user.position}
    assert prepare.plan_of(GenerateRequest(prompt="x" * 200))[1].cuts == (64, 128, 192)


def test_an_empty_text_has_a_plan_and_cannot_be_answered(prepare: Preparer) -> None:
    empty = GenerateRequest(prompt="")
    keys, plan = prepare.plan_of(empty)
    assert (len(keys), plan.cuts) == (0, ())
    with pytest.raises(BadRequest, match="empty") as caught:
        prepare(empty)
    assert caught.value.param == "prompt"


def test_the_text_of_ids_shows_special_tokens(prepare: Preparer) -> None:
    assert prepare.text_of([IM_START, *b"hi", IM_END]) == "<|im_start|>hi<|im_end|>"
    assert prepare.text_of([]) == ""


@pytest.mark.parametrize("ids", [[VOCAB], [5, -1]])
def test_what_is_no_token_id_is_refused_with_the_name_of_its_field(prepare: Preparer, ids: list[int]) -> None:
    with pytest.raises(BadRequest, match=rf"token ids are from 0 to {VOCAB - 1}") as caught:
        prepare.text_of(ids)
    assert caught.value.param == "tokens"
    with pytest.raises(BadRequest) as caught:
        prepare(GenerateRequest(prompt=ids))
    assert caught.value.param == "prompt"


def test_a_prompt_over_the_context_is_told_with_the_field_that_held_it(prepare: Preparer) -> None:
    for request, field in (
        (GenerateRequest(prompt="x" * 250, max_tokens=7), "prompt"),
        (GenerateRequest(messages=[{"role": "user", "content": "x" * 250}], max_tokens=7), "messages"),
    ):
        with pytest.raises(ContextLengthExceeded) as caught:
            prepare(request)
        assert caught.value.param == field


@pytest.mark.parametrize("asked", [-1, 21])
def test_more_log_probabilities_than_the_device_tells_are_refused(prepare: Preparer, asked: int) -> None:
    for request in (
        GenerateRequest(prompt="hi", sampling=SamplingParams(logprobs=asked)),
        GenerateRequest(prompt="hi", prompt_logprobs=asked),
    ):
        with pytest.raises(BadRequest, match="from 0 to 20") as caught:
            prepare(request)
        assert caught.value.param == "logprobs"


class Watched(Sequence):
    """Items that note which threads look at them."""

    def __init__(self, items: Sequence) -> None:
        self.items = items
        self.threads: set[int] = set()

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i):
        self.threads.add(threading.get_ident())
        return self.items[i]


def test_the_engine_tells_of_prompts_and_texts_and_works_them_out_off_its_event_loop() -> None:
    async def scenario(world: VirtualLoop) -> None:
        chat = GenerateRequest(messages=Watched(MESSAGES))
        async with engine_in(world, runner_in(world)) as engine:
            tokens, plan = await engine.plan_of(chat)
            text = await engine.render(chat)
            ids = Watched(tokens)
            assert await engine.text_of(ids) == text
        assert tokens == world_tokenizer().encode(text, add_special_tokens=False).tolist()
        assert [end.role for end in plan.ends] == ["system", "user"]
        for threads in (chat.messages.threads, ids.threads):
            assert threads
            assert threading.get_ident() not in threads

    run_world(0, scenario)
