"""Incremental detokenising: whole characters, the text of all tokens at once, a constant price a token."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from regrow.models.detokenize import Detokenizer, Spelling
from regrow.models.tokenizer import ChatTokenizer
from tests.models.dialects import hard_tokenizer

PIECES = ["\u2581", "\u2581hi", "hi", "\u2581\u2581", "\u00e9", "\u4e2d", "\u4e2d\u6587", ".", "\u2581a"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def metaspace(pieces: list[str], decoder: decoders.Decoder, byte_fallback: bool) -> ChatTokenizer:
    names = ["<unk>", "<s>", "</s>", *pieces]
    core = Tokenizer(
        BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=byte_fallback, unk_token="<unk>")
    )
    core.decoder = decoder
    core.add_special_tokens(["<s>", "</s>"])
    return ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=core))


FALLBACK = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
TOKENIZERS = {
    "byte-level": ChatTokenizer(hard_tokenizer(["<s>", "</s>"], None)),
    "byte fallback, first space stripped": metaspace(
        [*PIECES, *BYTES], decoders.Sequence([*FALLBACK, decoders.Strip(" ", 1, 0)]), True
    ),
    "byte fallback": metaspace([*PIECES, *BYTES], decoders.Sequence(FALLBACK), True),
    "metaspace": metaspace(PIECES, decoders.Metaspace(), False),
    "bytes that nothing puts together": metaspace([*PIECES, *BYTES], decoders.Metaspace(), False),
}
named = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())


def pieces_of(tokenizer: ChatTokenizer, ids: Sequence[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@named
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_the_pieces_add_up_to_the_text_of_all_tokens(tokenizer: ChatTokenizer, data: st.DataObject) -> None:
    some = st.integers(0, tokenizer.vocab_size + 2)  # special ids and ids without a token among them
    ids = data.draw(st.lists(some, max_size=40))
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="a \u00e9\u4e2d\n\U0001f600\u200d\U0001f468\ufffd", max_size=20),
    noise=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 255)), max_size=4),
)
def test_text_with_stray_bytes_adds_up_too(text: str, noise: list[tuple[int, int]]) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode(text).tolist()
    for place, byte in noise:
        ids.insert(place, byte)
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["byte-level", "byte fallback"])
def test_a_character_comes_whole_with_its_last_byte_or_the_next_token(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    text = "\u4e2d\U0001f600\U0001f468\u200d\U0001f469!"
    pieces = pieces_of(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_byte_level_text_is_said_as_soon_as_it_is_known() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    pieces = pieces_of(tokenizer, tokenizer.encode("a\U0001f600b"))
    assert pieces == ["a", "", "", "", "\U0001f600", "b", ""]


def test_special_tokens_have_no_text_in_between() -> None:
    tokenizer = TOKENIZERS["byte fallback, first space stripped"]
    start, hi = 1, 3 + PIECES.index("\u2581hi")
    assert pieces_of(tokenizer, [start, hi, start, hi]) == ["", "hi", "", " hi", ""]


def test_special_tokens_that_say_what_an_answer_is_made_of_are_text() -> None:
    template = "{{ '<|tool_call_start|>[f()]<|tool_call_end|>' }}{% if think %}</think>{% endif %}"
    tokenizer = ChatTokenizer(
        hard_tokenizer(["<|tool_call_start|>", "<|tool_call_end|>", "<think>", "</think>", "</s>"], template)
    )
    text = "<think>x</think>\n<|tool_call_start|>[f()]<|tool_call_end|>"
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push(int(token)) for token in tokenizer.encode(text + "</s>")]
    assert "".join(pieces) + detokenizer.flush() == text


def test_flush_gives_what_is_incomplete_and_starts_anew() -> None:
    detokenizer = TOKENIZERS["byte-level"].detokenizer()
    first, letter = TOKENIZERS["byte-level"].encode("\U0001f600a").tolist()[::4]
    assert detokenizer.push(first) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""
    assert detokenizer.push(letter) == "a"


@pytest.mark.parametrize("text", ["a", "\u4e2d", " "])
@pytest.mark.parametrize("first", [0, 200], ids=["letters", "invalid bytes"])
def test_a_token_costs_the_decoding_of_a_few(text: str, first: int) -> None:
    class Counting:
        def __init__(self, backend: Tokenizer) -> None:
            self.backend, self.decoded = backend, 0

        def id_to_token(self, token: int) -> str | None:
            name: str | None = self.backend.id_to_token(token)
            return name

        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            self.decoded += len(ids)
            return str(self.backend.decode(ids, skip_special_tokens=skip_special_tokens))

    backend = hard_tokenizer(["</s>"], None).backend_tokenizer
    counting = Counting(backend)
    detokenizer = Detokenizer(Spelling(counting, frozenset(), frozenset()))  # type: ignore[arg-type]
    ids = backend.encode(text).ids * 500 if not first else [first] * 500
    for token in ids:
        detokenizer.push(token)
    assert counting.decoded < 20 * len(ids)
