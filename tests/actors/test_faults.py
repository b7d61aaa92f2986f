"""What a fault may cost: never a wrong answer, never another's request, and nothing waits for ever."""

import asyncio

import pytest

from regrow.errors import ActorDown, Overloaded
from regrow.policy.request import GenerateRequest
from tests.actors.world import OTHER, Answer, House, chat, in_house, keys_of, raw, stranger, system_end
from tests.world.fake_runner import Hang, Operation

INSTANTS = [i / 8 for i in range(10)]  # over the life of a request of a second, its mount included


async def second_turn(house: House) -> tuple[Answer, "asyncio.Task[Answer]"]:
    """A chat's first turn, and its second on the way beside a stranger."""
    first = await house.ask(chat("hello"))
    running = asyncio.create_task(house.ask(chat("hello", first.text, "more")))
    return first, running


@pytest.mark.parametrize("after", INSTANTS)
def test_a_crash_of_the_cache_costs_what_it_kept_and_no_running_request(after: float) -> None:
    async def scenario(house: House) -> None:
        first, running = await second_turn(house)
        other = asyncio.create_task(house.ask(chat("who else?", system=OTHER)))
        await asyncio.sleep(after)
        house.crash("cache")
        for request, answer in [
            (chat("hello", first.text, "more"), await running),
            (chat("who else?", system=OTHER), await other),
            (chat("hello"), await house.ask(chat("hello"))),
            (chat("hello"), await house.ask(chat("hello"))),
        ]:
            assert answer.reason == "length"
            assert answer.tokens == house.truth(request)
        assert answer.reused > 0

    in_house(scenario)


async def crowd(house: House, n: int = 4) -> list["asyncio.Task[Answer]"]:
    """More chats than slots, all submitted."""
    runs = [await house.submit(stranger(i)) for i in range(n)]
    return [asyncio.create_task(house.ended(run)) for run in runs]


async def all_end(house: House, crowd: list["asyncio.Task[Answer]"], *errors: str) -> list[str]:
    """Every chat of the crowd ends, with its true answer or one of the errors, and the house serves on."""
    reasons = []
    for i, task in enumerate(crowd):
        answer = await task
        assert answer.reason in ("length", *errors)
        assert answer.tokens == house.truth(stranger(i))[: len(answer.tokens)]
        reasons.append(answer.reason)
    for i in range(len(crowd)):
        assert (await house.ask(stranger(i))).tokens == house.truth(stranger(i))
    return reasons


@pytest.mark.parametrize("after", INSTANTS)
def test_a_crash_of_the_engine_actor_ends_what_waits_and_nothing_that_runs(after: float) -> None:
    async def scenario(house: House) -> None:
        running = await crowd(house)
        await asyncio.sleep(after)
        house.crash("engine")
        reasons = await all_end(house, running, "ActorDown")
        assert reasons[:2] == ["length", "length"]
        if after == 0:
            assert reasons[2:] == ["ActorDown", "ActorDown"]

    in_house(scenario)


@pytest.mark.parametrize("after", INSTANTS)
@pytest.mark.parametrize("first", ["engine", "slot-0"])
def test_a_crash_of_engine_and_slot_together_leaves_nobody_waiting(after: float, first: str) -> None:
    async def scenario(house: House) -> None:
        running = await crowd(house)
        await asyncio.sleep(after)
        house.crash(first)
        for _ in range(house.world.rng.randrange(4)):
            await asyncio.sleep(0)
        house.crash({"engine": "slot-0", "slot-0": "engine"}[first])
        await all_end(house, running, "ActorDown")

    in_house(scenario)


def test_a_request_can_be_cancelled_after_the_engine_actor_has_crashed() -> None:
    async def scenario(house: House) -> None:
        run = await house.submit(chat("hello", max_tokens=2000))
        await asyncio.sleep(2)
        house.crash("engine")
        await asyncio.sleep(2)
        assert (await house.engine.status()).engine.running == 1
        await run.cancel()
        assert (await house.ended(run)).reason == "cancelled"

    in_house(scenario)


@pytest.mark.parametrize("after", INSTANTS)
def test_a_crash_of_the_device_actor_ends_what_runs_and_serves_what_waits(after: float) -> None:
    async def scenario(house: House) -> None:
        running = await crowd(house)
        await asyncio.sleep(after)
        house.crash("device")
        reasons = await all_end(house, running, "DeviceFailed")
        if after < 1:  # the first two run, the others wait
            assert reasons[2:] == ["length", "length"]
        assert (await house.engine.status()).device.generation == 1

    in_house(scenario)


@pytest.mark.parametrize("operation", ["read", "step", "snapshot", "mount", "join", "leave"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_device_error_ends_what_runs_by_its_name_and_all_that_waits_is_served(
    operation: Operation, nth: int
) -> None:
    async def scenario(house: House) -> None:
        house.runner.faults[operation, nth] = OSError("the bus fell off")
        reasons = await all_end(house, await crowd(house), "DeviceFailed")
        assert 1 <= reasons.count("DeviceFailed") <= 2
        assert (await house.engine.status()).device.generation == 1

    in_house(scenario)


def test_logits_that_are_not_finite_cost_all_that_shares_a_cut_and_nothing_else() -> None:
    async def scenario(house: House) -> None:
        await house.ask(chat("an idle neighbour"))
        stranger = await house.ask(chat("who else?", system=OTHER))
        doomed = raw([*keys_of(chat("hello")), 1, 2, 3], max_tokens=40)
        house.runner.nan_at.add((2, len(keys_of(doomed)) + 5))
        running = await house.submit(doomed)
        beside = await house.submit(chat("a busy neighbour", max_tokens=40))
        failed = await house.ended(running)
        assert failed.reason == "NonFiniteLogits"
        assert failed.tokens == house.truth(doomed)[: len(failed.tokens)]
        retry = await house.ask(doomed)
        assert (retry.reason, retry.reused) == ("length", 0)
        assert retry.tokens == house.truth(doomed)
        healthy = await house.ended(beside)
        assert healthy.tokens == house.truth(chat("a busy neighbour", max_tokens=40))
        assert (await house.ask(chat("a busy neighbour", healthy.text, "yes"))).reused == system_end(doomed)
        again = await house.ask(chat("who else?", stranger.text, "more", system=OTHER))
        assert again.reused > 0

    in_house(scenario, slots=4)


@pytest.mark.parametrize("at", [10, 100, 300])
def test_a_state_that_is_not_finite_is_not_kept(at: int) -> None:
    async def scenario(house: House) -> None:
        house.runner.nan_at.add((0, at))
        failed = await house.ask(chat("hello"))
        assert failed.reason == "NonFiniteLogits"
        assert failed.tokens == []
        assert (await house.engine.status()).cache.states == 0
        retry = await house.ask(chat("hello"))
        assert (retry.reused, retry.tokens) == (0, house.truth(chat("hello")))

    in_house(scenario)


def test_what_waits_when_a_request_fails_does_not_go_on_from_what_it_shares_with_it() -> None:
    async def scenario(house: House) -> None:
        await house.ask(chat("hello"))
        house.runner.nan_at.add((0, len(keys_of(chat("hello"))) + 2))
        doomed = await house.submit(chat("hello"))
        waiting = await house.submit(chat("hello", max_tokens=7))
        assert (await house.ended(doomed)).reason == "NonFiniteLogits"
        answer = await house.ended(waiting)
        assert (answer.reused, answer.tokens) == (0, house.truth(chat("hello", max_tokens=7)))

    in_house(scenario, slots=1)


@pytest.mark.parametrize("after", INSTANTS)
def test_a_crash_of_a_slot_ends_its_request_by_name_and_the_slot_serves_on(after: float) -> None:
    async def scenario(house: House) -> None:
        running = await crowd(house)
        await asyncio.sleep(after)
        house.crash("slot-0")
        reasons = await all_end(house, running, "ActorDown")
        assert reasons.count("ActorDown") <= 1
        if after < 1:  # the first two run, the others wait
            assert reasons == ["ActorDown", "length", "length", "length"]
        assert (await house.engine.status()).slots[0].length > 0

    in_house(scenario)


def test_a_crash_of_the_root_actor_costs_the_roots_and_no_request() -> None:
    async def scenario(house: House) -> None:
        await house.ask(chat("hello"))
        assert [root.tokens for root in (await house.engine.status()).roots] == [system_end(chat("hello"))]
        run = await house.submit(chat("who else?", system=OTHER))
        house.crash("roots")
        answer = await house.ended(run)
        assert answer.tokens == house.truth(chat("who else?", system=OTHER))
        status = await house.engine.status()
        assert [root.tokens for root in status.roots] == [system_end(chat("hi", system=OTHER))]
        again = await house.ask(chat("hello", "well", "yes"))
        assert again.tokens == house.truth(chat("hello", "well", "yes"))

    in_house(scenario)


async def steps(n: int) -> None:
    """Let the event loop go on by so many rounds."""
    for _ in range(n):
        await asyncio.sleep(0)


async def parked_turn(house: House, number: int) -> GenerateRequest:
    """Have a conversation parked by another one, and return its next turn."""
    first = await house.ask(stranger(2 * number))
    await house.ask(stranger(2 * number + 1))
    return stranger(2 * number, first.text, "more")


@pytest.mark.parametrize("name", ["cache", "device", "engine", "roots", "slot-0"])
@pytest.mark.parametrize("hybrid", [True, False], ids=["hybrid", "attention"])
def test_a_crash_at_any_step_of_a_mount_leaves_nothing_behind(name: str, hybrid: bool) -> None:
    async def scenario(house: House) -> None:
        reasons = set()
        for number in range(36):
            request = await parked_turn(house, number)
            running = asyncio.create_task(house.ask(request))
            await steps(number)
            house.crash(name)
            try:
                answer = await running
            except ActorDown:
                reasons.add("not submitted")
            else:
                reasons.add(answer.reason)
                assert answer.tokens == house.truth(request)[: len(answer.tokens)]
            assert (await house.ask(request)).tokens == house.truth(request)
            await asyncio.sleep(61)  # or the restart limit would be exceeded
        assert reasons <= {"length", "DeviceFailed", "ActorDown", "not submitted"}
        assert "length" in reasons
        assert name not in ("cache", "roots") or reasons == {"length"}

    in_house(scenario, seeds=[1], slots=1, hybrid=hybrid)


@pytest.mark.parametrize("hybrid", [True, False], ids=["hybrid", "attention"])
def test_what_is_forgotten_at_any_step_of_a_mount_is_read_again(hybrid: bool) -> None:
    async def scenario(house: House) -> None:
        reused = set()
        for number in range(36):
            request = await parked_turn(house, number)
            running = asyncio.create_task(house.ask(request))
            await steps(number)
            await house.engine.forget()
            answer = await running
            assert (answer.reason, answer.tokens) == ("length", house.truth(request))
            reused.add(answer.reused > 0)
        assert reused == {False, True}

    in_house(scenario, seeds=[1], slots=1, hybrid=hybrid)


def test_an_idle_slot_forgets_its_session_when_the_device_was_restarted() -> None:
    async def scenario(house: House) -> None:
        await house.ask(chat("hello"))
        assert any(house.slot(number).session.length for number in range(2))
        house.crash("device")
        await house.settled()
        assert not any(house.slot(number).session.length for number in range(2))
        answer = await house.ask(chat("hello"))
        assert answer.tokens == house.truth(chat("hello"))

    in_house(scenario)


@pytest.mark.parametrize("hybrid", [True, False], ids=["hybrid", "attention"])
def test_what_a_mount_has_taken_is_given_back_although_the_cache_takes_no_messages(hybrid: bool) -> None:
    async def scenario(house: House) -> None:
        def refuse(message: object) -> None:
            raise Overloaded("the mailbox of cache is full")

        request = await parked_turn(house, 0)
        house.runner.faults["mount", house.runner.counts["mount"] + 1] = Hang(5.0)
        running = asyncio.create_task(house.ask(request))
        await asyncio.sleep(1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(house.engine.cache, "tell", refuse)
            await asyncio.sleep(5)
        house.crashed |= {"slot-0", "roots"}
        assert (await running).reason in ("ActorDown", "length")
        assert (await house.ask(request)).tokens == house.truth(request)

    in_house(scenario, slots=1, hybrid=hybrid)


def test_what_goes_is_heard_of_everywhere_although_a_slot_takes_no_messages() -> None:
    async def scenario(house: House) -> None:
        await house.ask(chat("hello"))
        cell = house.engine._system._cells["slot-0"]
        size, cell.size = cell.size, 0
        assert await house.engine.forget() > 0
        cell.size = size
        await house.settled()
        assert not house.placement._directory._states
        assert (await house.ask(chat("hello"))).tokens == house.truth(chat("hello"))

    in_house(scenario, slots=1)
