"""A request's life: its events, its ends, and what a cancel or a deadline does in each phase."""

from tests.actors.world import House, chat, in_house


def test_a_life_is_told_from_the_queue_to_the_last_token() -> None:
    async def scenario(house: House) -> None:
        answer = await house.ask(chat("hello"))
        told = [type(event).__name__ for event in answer.events if type(event).__name__ != "ReadProgress"]
        assert told == ["Queued", "Placed", "Mounted", "ReadDone", *["Token"] * 6, "Finished"]
        assert answer.tokens == house.truth(chat("hello"))
        assert answer.reason == "length"

    in_house(scenario)
