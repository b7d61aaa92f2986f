"""What becomes of a body's bytes, for any course of a chat: the rules through the code that rewrites."""

import gzip
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.api.relay.counts import Counts
from regrow.api.relay.decide import Considered, Decider
from regrow.api.relay.prices import Prices, Tokens
from regrow.policy.history import boundary_of, content_hash, shortened
from regrow.store.originals import Originals
from regrow.store.touches import Touches
from tests.policy.prompts import anthropic_turn, chat, chats, openai_turn
from tests.policy.test_history import blanked
from tests.store.relays import Machine

SYSTEM = "You are a coding agent. " * 2000
IDLE = 601.0
OPENAI = [{"role": "system", "content": SYSTEM}]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable()
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.configure(**before)
    logging.disable(logging.NOTSET)


class Raws(msgspec.Struct):
    messages: list[msgspec.Raw]


class Relayed:
    """A decider with its machine; `directory` keeps state on disk."""

    def __init__(self, directory: Path | None = None, opted_in: bool = True, **options: bool) -> None:
        self.machine = Machine(directory or Path("/nowhere"))
        self.counts = Counts()
        self.originals = Originals(directory)
        options = options or {"repack_cold": opted_in}
        clock = self.machine.clock()
        touches = Touches(directory, clock, not options.get("dry_run")) if opted_in else None
        self.decider = Decider(touches, self.originals, Prices(), self.counts, clock.now, **options)

    def send(self, body: bytes, style: str = "anthropic", encoding: str = "") -> Considered:
        considered = self.decider.consider(style, body, encoding)
        self.decider.finished(considered, Tokens(fresh=1000))
        return considered

    def wait(self, seconds: float) -> None:
        self.machine.true += seconds


def body_of(messages: list[dict], model: str = "claude-sonnet-4-5", **more: object) -> bytes:
    return json.dumps({"model": model, "messages": messages, "system": SYSTEM, **more}, indent=1).encode()


def messages_of(body: bytes) -> list[dict]:
    return json.loads(body)["messages"]


@given(chats(anthropic_turn, 20), st.sampled_from([0.0, 30.0, 300.0, 600.0]))
def test_a_warm_body_is_the_very_object_that_came(messages: list[dict], pause: float) -> None:
    relay = Relayed()
    for length in range(1, len(messages) + 1, 2):
        body = body_of(messages[:length])
        considered = relay.send(body)
        assert considered.body is body
        relay.wait(pause)


@given(chats(openai_turn, 20), st.lists(st.sampled_from([1.0, 200.0, 172_801.0]), min_size=3, max_size=3))
def test_a_body_of_openai_is_warm_for_twice_what_a_cache_may_live(messages: list[dict], pauses: list) -> None:
    relay = Relayed()
    for number, pause in enumerate(pauses):
        body = body_of([*OPENAI, *messages], "gpt-4.1", prompt_cache_retention="24h")
        considered = relay.send(body, "openai")
        assert considered.body is body or 172_801.0 in pauses[:number]
        relay.wait(pause)


@st.composite
def courses(draw: st.DrawFn) -> tuple[list[dict], list[tuple[int, float]]]:
    """A chat, and its turns: how many messages each has (it grows, and goes back) after which pause."""
    messages = draw(chats(anthropic_turn, 30).filter(lambda chat: len(chat) > 30))
    lengths = st.integers(12, (len(messages) - 1) // 2).map(lambda half: 2 * half + 1)
    return messages, draw(st.lists(st.tuples(lengths, st.sampled_from([5.0, IDLE])), min_size=3, max_size=8))


@settings(max_examples=40)
@given(courses(), st.booleans())
def test_what_was_once_shortened_is_the_same_bytes_ever_after_and_all_else_survives(
    course: tuple[list[dict], list[tuple[int, float]]], prune: bool
) -> None:
    """A marker on the whole body keeps cached what is sent, wherever the chat goes."""
    messages, turns = course
    relay = Relayed(repack_cold=True, prune=prune)
    shortened_at: dict[int, bytes] = {}
    reach = 0  # the messages of the last cold turn that were shortened
    for length, pause in turns:
        body = body_of(messages[:length], cache_control={"type": "ephemeral"})
        considered = relay.send(body)
        new, raw = messages_of(considered.body), raw_messages(considered.body)
        assert [blanked(message) for message in new] == [blanked(message) for message in messages[:length]]
        assert {k: v for k, v in json.loads(considered.body).items() if k != "messages"} == {
            k: v for k, v in json.loads(body).items() if k != "messages"
        }
        for index, (one, old) in enumerate(zip(raw, raw_messages(body), strict=True)):
            if one != old:
                assert index < length - 8
                assert shortened_at.setdefault(index, one) == one
            elif index in shortened_at and length >= reach:
                raise AssertionError(f"message {index} was sent whole again")
        if considered.decision == "cold":
            reach = max(reach, boundary_of(length))
        relay.wait(pause)


def raw_messages(body: bytes) -> list[bytes]:
    return [bytes(raw) for raw in msgspec.json.decode(body, type=Raws).messages]


def cold_turn(relay: Relayed, messages: list[dict] | None = None) -> Considered:
    body = body_of(messages or chat(20))
    relay.send(body)
    relay.wait(IDLE)
    return relay.send(body)


def test_what_is_not_shortened_keeps_its_bytes() -> None:
    relay = Relayed()
    considered = cold_turn(relay)
    before = body_of(chat(20))
    assert considered.decision == "cold"
    olds, news = raw_messages(before), raw_messages(considered.body)
    kept = [old == new for old, new in zip(olds, news, strict=True)]
    assert kept == [i % 2 == 1 or i == 0 or i >= 32 for i in range(41)]
    odd = (
        b'{"top_k" : 1.10, "model":"claude-sonnet-4-5", "metadata": {"n": 123456789012345678901}, "messages":'
    )
    considered = relay.send(odd + body_of(chat(20)).partition(b'"messages":')[2])
    assert considered.decision == "sticky"
    assert b'"top_k":1.10' in considered.body
    assert b'"metadata":{"n": 123456789012345678901}' in considered.body


def test_numbers_in_a_shortened_message_survive() -> None:
    text = {"type": "text", "text": "x" * 5000}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [text], "big": 2**70, "small": 1e-300}
    messages = chat(20)
    messages[2] = {"role": "user", "content": [result]}
    (new,) = messages_of(cold_turn(Relayed(), messages).body)[2]["content"]
    assert new["content"][0]["text"] == shortened(text["text"])
    assert (new["big"], new["small"]) == (2**70, 1e-300)


def test_c6_without_opting_in_nothing_is_recorded_or_changed(tmp_path: Path) -> None:
    relay = Relayed(tmp_path, opted_in=False)
    considered = cold_turn(relay)
    assert considered.decision == "pass"
    assert not considered.changed
    assert [path.name for path in tmp_path.iterdir()] == ["originals"]


def test_a_dry_run_decides_and_changes_nothing(tmp_path: Path) -> None:
    relay = Relayed(tmp_path, repack_cold=True, dry_run=True)
    considered = cold_turn(relay)
    assert considered.decision == "cold"
    assert not considered.changed
    assert considered.body == body_of(chat(20))
    assert considered.removed > 0.2
    assert list((tmp_path / "originals").iterdir()) == []


def test_the_originals_are_kept_by_their_hash(tmp_path: Path) -> None:
    relay = Relayed(tmp_path)
    cold_turn(relay)
    text = chat(20)[2]["content"][0]["content"]
    assert shortened(text) != text
    assert relay.originals.get(content_hash(text)) == text


def test_a_full_disk_for_originals_does_not_stop_a_turn(tmp_path: Path) -> None:
    relay = Relayed(tmp_path)
    (tmp_path / "originals").rmdir()
    assert cold_turn(relay).changed


def test_a_prompt_under_the_providers_minimum_stays_whole() -> None:
    for model, changed in (("claude-sonnet-4-5", True), ("claude-opus-4-5", False)):
        relay = Relayed()
        body = json.dumps({"model": model, "system": "s" * 5000, "messages": chat(13, lines=40)}).encode()
        relay.send(body)
        relay.wait(IDLE)
        assert relay.send(body).changed is changed


def test_a_provider_that_caches_unasked_is_known_by_its_model() -> None:
    for model, pause, changed in (
        ("gpt-4.1", 172_801.0, True),
        ("gpt-4.1", 172_800.0, False),
        ("nobody-knows", 9e9, False),
    ):
        relay = Relayed()
        body = body_of([*OPENAI, *chat(20, ttl=None)], model)
        relay.send(body, "openai")
        relay.wait(pause)
        assert relay.send(body, "openai").changed is changed


def test_a_marker_on_the_whole_body_counts_with_its_ttl() -> None:
    for ttl, pause, changed in (("5m", 601.0, True), ("1h", 7200.0, False), ("1h", 7201.0, True)):
        relay = Relayed()
        body = body_of(chat(20, ttl=None), cache_control={"type": "ephemeral", "ttl": ttl})
        relay.send(body)
        relay.wait(pause)
        assert relay.send(body).changed is changed


def test_prune_shortens_at_once_what_no_cache_holds_and_nothing_else() -> None:
    relay = Relayed(prune=True)
    assert relay.send(body_of(chat(20))).decision == "pass"
    bare = body_of(chat(20, seed=1, ttl=None))
    considered = relay.send(bare)
    assert (considered.decision, considered.changed) == ("prune", True)
    relay.wait(IDLE)
    assert relay.send(body_of(chat(20))).decision == "pass"  # no --repack-cold


def test_a_bomb_is_passed_on_unopened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regrow.api.relay.bodies.LIMIT_BYTES", 1 << 20)
    bomb = gzip.compress(body_of([{"role": "user", "content": "x" * (2 << 20)}]))
    considered = Relayed().send(bomb, encoding="gzip")
    assert considered.body is bomb
    assert considered.decision == "unreadable"


def test_every_turn_is_attributed_and_its_saving_counted() -> None:
    relay = Relayed()
    considered = cold_turn(relay)
    relay.decider.finished(considered, Tokens(written_5m=10_000, output=100))
    numbers = relay.counts.numbers()
    assert numbers["turns"] == {"cold start": 1, "ttl lapse": 1}
    assert numbers["decisions"] == {"pass": 1, "cold": 1}
    part = (len(body_of(chat(20))) - len(considered.body)) / len(considered.body)
    assert considered.removed == pytest.approx(part)
    assert numbers["removed_tokens"] == pytest.approx(part * 11_000)
    assert numbers["saved_usd"] == pytest.approx(part * (10_000 * 3.75 + 1000 * 3.0) / 1e6)
    assert numbers["cost_usd"] == pytest.approx((2 * 1000 * 3.0 + 10_000 * 3.75 + 100 * 15.0) / 1e6)
