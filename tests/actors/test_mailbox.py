"""Mailboxes in virtual time."""

import asyncio

import pytest

from regrow.actors.mailbox import ROW, Mailbox, MailboxClosed
from tests.world.loop import VirtualLoop, run_world


def test_messages_come_in_their_order_to_a_reader_that_waits_and_to_one_that_is_late() -> None:
    async def scenario(world: VirtualLoop) -> object:
        box: Mailbox[int] = Mailbox()
        reading = asyncio.create_task(box.get())
        await asyncio.sleep(0)
        box.put(1)
        box.put(2)
        box.put(3)
        assert len(box) == 2  # the first one has its reader
        return [await reading, await box.get(), await box.get(), len(box)]

    assert run_world(0, scenario) == [1, 2, 3, 0]


def test_a_closed_mailbox_takes_nothing_and_gives_what_is_left() -> None:
    async def scenario(world: VirtualLoop) -> object:
        box: Mailbox[int] = Mailbox()
        box.put(1)
        box.close()
        with pytest.raises(MailboxClosed):
            box.put(2)
        assert await box.get() == 1
        with pytest.raises(MailboxClosed):
            await box.get()
        return box.take_all()

    assert run_world(0, scenario) == []


def test_closing_wakes_the_reader() -> None:
    async def scenario(world: VirtualLoop) -> object:
        box: Mailbox[int] = Mailbox()
        reading = asyncio.create_task(box.get())
        await asyncio.sleep(1)
        box.close()
        with pytest.raises(MailboxClosed):
            await reading
        return world.time()

    assert run_world(0, scenario) == 1


def test_a_reader_that_was_cancelled_loses_nothing_and_the_next_one_reads_on() -> None:
    async def scenario(world: VirtualLoop) -> object:
        box: Mailbox[int] = Mailbox()
        reading = asyncio.create_task(box.get())
        await asyncio.sleep(0)
        box.put(1)
        reading.cancel()
        await asyncio.wait([reading])
        box.put(2)
        assert len(box) == 2
        return [await box.get(), await box.get()]

    assert run_world(0, scenario) == [1, 2]


def test_others_get_their_turn_however_many_messages_wait() -> None:
    async def scenario(world: VirtualLoop) -> object:
        box: Mailbox[int] = Mailbox()
        turns: list[int] = []

        async def other() -> None:
            while True:
                turns.append(len(box))
                await asyncio.sleep(0)

        beside = asyncio.create_task(other())
        for number in range(10 * ROW):
            box.put(number)
        for _ in range(10 * ROW):
            await box.get()
        beside.cancel()
        return turns

    turns = run_world(0, scenario)
    assert isinstance(turns, list)
    assert len(turns) >= 9
