"""A device that hangs: after `hang_s` seconds its requests end by name, and another thread with arenas of its
own goes on; a device that is only slow is waited for."""

import asyncio

import pytest

from regrow.actors.events import Failed
from tests.actors.world import A_MOMENT, Answer, House, chat, in_house, stranger
from tests.world.fake_runner import Costs, Hang, Operation

HANG_S = 20.0


async def both(house: House) -> list[Answer]:
    runs = [await house.submit(stranger(i)) for i in range(2)]
    return await asyncio.gather(*(house.ended(run) for run in runs))


@pytest.mark.parametrize("operation", ["read", "step", "mount", "snapshot", "join", "leave"])
def test_a_hang_ends_what_runs_by_name_and_the_next_request_is_served(operation: Operation) -> None:
    async def scenario(house: House) -> None:
        hung = house.runner
        hung.faults[operation, 2] = Hang()
        begin = house.world.time()
        reasons = {answer.reason for answer in await both(house)}
        assert "DeviceFailed" in reasons <= {"DeviceFailed", "length"}
        assert house.world.time() - begin <= 1.5 * HANG_S
        assert house.runner is not hung
        for i in range(2):
            answer = await house.ask(stranger(i))
            assert (answer.reason, answer.tokens) == ("length", house.truth(stranger(i)))
        assert (await house.engine.status()).device.generation == 1

    in_house(scenario, hang_s=HANG_S, rests=False)


def test_the_reason_says_what_hung_and_which_option_bounds_it() -> None:
    async def scenario(house: House) -> None:
        house.runner.faults["read", 1] = Hang()
        end = (await house.ask(chat("hello"))).end
        assert isinstance(end, Failed)
        assert "the device hangs: one piece of work took longer than 20 s (--hang-s)" in str(end.error)

    in_house(scenario, hang_s=HANG_S, rests=False)


def test_a_thread_that_comes_back_after_all_changes_nothing() -> None:
    async def scenario(house: House) -> None:
        house.runner.faults["step", 3] = Hang(HANG_S * 2)
        assert (await house.ask(chat("hello", max_tokens=50))).reason == "DeviceFailed"
        running = await house.submit(chat("hello", max_tokens=2000))
        await asyncio.sleep(3 * HANG_S)
        answer = await house.ended(running)
        assert answer.tokens == house.truth(chat("hello", max_tokens=2000))
        assert (await house.engine.status()).device.generation == 1

    in_house(scenario, hang_s=HANG_S)


def test_a_slow_device_is_waited_for_as_long_as_every_piece_ends_in_time() -> None:
    async def scenario(house: House) -> None:
        begin = house.world.time()
        assert (await house.ask(chat("hello"))).reason == "length"
        assert house.world.time() - begin > 3 * HANG_S
        assert (await house.engine.status()).device.generation == 0

    in_house(scenario, hang_s=HANG_S, costs=Costs(read=0.9 * HANG_S, step=0.7 * HANG_S), rests=False)


def test_without_a_limit_a_device_may_take_any_time() -> None:
    async def scenario(house: House) -> None:
        house.runner.faults["read", 1] = Hang(2000.0)
        assert (await house.ask(chat("hello"))).reason == "length"

    in_house(scenario, hang_s=0.0, seeds=[1])


def test_a_device_that_hangs_again_and_again_ends_in_an_orderly_stop_with_the_reason() -> None:
    async def scenario(house: House) -> None:
        for nth in range(1, 9):
            house.runner.faults["read", nth] = Hang()
        reasons = []
        while house.engine.failed is None:
            run = await house.submit(chat("hello"))
            reasons.append([event async for event in run][-1])
            await asyncio.sleep(A_MOMENT)
        assert len(reasons) == 4
        assert "device crashed 4 times" in await house.engine.given_up()
        assert "the device hangs" in await house.engine.given_up()

    in_house(scenario, hang_s=2.0, rests=False)


def test_an_engine_whose_device_hangs_can_be_stopped() -> None:
    async def scenario(house: House) -> None:
        house.runner.faults["read", 1] = Hang()
        await house.submit(chat("hello"))
        await asyncio.sleep(1)
        await house.engine.drain()

    in_house(scenario, hang_s=500.0, rests=False, seeds=[1], drain_s=5.0, ask_deadline_s=5.0)


def test_no_thread_is_begun_anew_once_the_device_was_stopped() -> None:
    async def scenario(house: House) -> None:
        thread = house.engine.device_thread
        house.runner.faults["read", 1] = Hang()
        await house.submit(chat("hello"))
        await asyncio.sleep(HANG_S + 1)
        assert thread.hangs()
        driver, renewing = thread._driver, asyncio.create_task(thread.renew())
        await asyncio.sleep(0)
        await thread.stop()
        await renewing
        assert thread._driver is driver

    in_house(scenario, hang_s=HANG_S, rests=False)
