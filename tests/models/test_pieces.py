"""Prompts that are put together from known pieces have the ids of the whole text."""

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE

from regrow.errors import TooManyTokens
from regrow.models.byte_tokenizer import byte_tokenizer
from regrow.models.pieces import Pieces, joined
from regrow.models.tokenizer import ChatTokenizer
from tests.models.dialects import DIALECTS, Dialect, hard_tokenizer

LONG = "one two three. " * 20


def spaced(scheme: str) -> Tokenizer:
    """A tokenizer that puts a mark before the words of a text, the first included."""
    letters = ["▁", *map(chr, range(32, 127)), "\n"]
    core = Tokenizer(
        BPE({letter: i for i, letter in enumerate(letters)}, merges=[("▁", "a"), ("a", "b")][:0])
    )
    if scheme == "legacy":
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    core.add_special_tokens(
        [AddedToken("<go>", special=True), AddedToken("<end>", special=True, rstrip=True, lstrip=True)]
    )
    return core


def same(backend: Tokenizer, opening: str, text: str) -> None:
    """Assert that a text has the ids of the whole, when its pieces are new and when they are known."""
    pieces = Pieces(backend, [backend.token_to_id(opening)])
    whole = backend.encode(text, add_special_tokens=False).ids
    for _ in range(2):
        found = pieces.encode(text, None, None)
        assert not isinstance(found, int)
        assert joined(found).tolist() == whole
    assert len(pieces.split(text)) >= text.count(opening)


@cache
def tokenizer_of(dialect: int) -> ChatTokenizer:
    return ChatTokenizer(DIALECTS[dialect].tokenizer())


@pytest.mark.parametrize("scheme", ["first", "always", "never", "legacy"])
@settings(deadline=None)
@given(st.lists(st.sampled_from(["<go>", "<end>", " ", "a", "ab", "\n", "<g", "o>"]), max_size=16))
def test_marks_of_the_first_word_and_stripped_spaces_are_where_they_were(
    scheme: str, words: list[str]
) -> None:
    same(spaced(scheme), "<go>", "".join(words))


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: d.name)
@settings(max_examples=25, deadline=None)
@given(st.lists(st.text("ab \n.<|>[]/u", max_size=12), min_size=1, max_size=5), st.data())
def test_chats_of_every_dialect_have_the_ids_of_their_whole_text(
    dialect: Dialect, contents: list[str], data: st.DataObject
) -> None:
    tokenizer = tokenizer_of(DIALECTS.index(dialect))
    if data.draw(st.booleans()):
        contents = [*contents, data.draw(st.sampled_from(dialect.specials))]
    roles = ("user", "assistant") * len(contents)
    chat = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    for length in (1, len(chat), len(chat)):
        text = tokenizer.render(chat[:length])
        assert tokenizer.encode_chat(chat[:length]).tolist() == tokenizer.encode(text, False).tolist()


class Counting:
    """A tokenizer that says how many characters it was given."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self.read = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def encode_batch_fast(self, texts: list[str], **rest: object) -> object:
        self.read += sum(map(len, texts))
        return self._backend.encode_batch_fast(texts, **rest)


@pytest.fixture
def backend() -> Counting:
    return Counting(hard_tokenizer(["<|im_start|>", "<|im_end|>"], None).backend_tokenizer)


def pieces_of(backend: Counting, limit: int = 10_000) -> Callable[..., int]:
    """Return what encodes a chat, and says how many characters had to be tokenised for it."""
    pieces = Pieces(backend, [backend.token_to_id("<|im_start|>")], limit)  # type: ignore[arg-type, operator]

    def encode(*contents: str, salt: str | None = None) -> int:
        before = backend.read
        assert not isinstance(
            pieces.encode("".join(f"<|im_start|>{c}<|im_end|>" for c in contents), None, salt), int
        )
        return backend.read - before

    encode.pieces = pieces  # type: ignore[attr-defined]
    return encode


def test_only_the_messages_that_were_not_met_are_tokenised(backend: Counting) -> None:
    encode = pieces_of(backend)
    assert encode(LONG, "hello") > len(LONG)
    assert encode(LONG, "hello") == 0
    assert encode(LONG, "hello", "and now") == len("<|im_start|>and now<|im_end|>")
    assert encode("another", LONG) == len("<|im_start|>another<|im_end|>")


def test_what_another_salt_has_met_is_tokenised_again(backend: Counting) -> None:
    encode = pieces_of(backend)
    first = encode(LONG)
    assert [encode(LONG, salt="a"), encode(LONG, salt="b"), encode(LONG, salt="a")] == [first, first, 0]
    assert encode(LONG, salt="None") == first


def test_what_was_met_longest_ago_is_forgotten_first_and_everything_on_demand(backend: Counting) -> None:
    ids = len(backend._backend.encode(f"<|im_start|>{LONG}1<|im_end|>").ids)
    encode = pieces_of(backend, limit=2 * ids)
    for name in "121":
        encode(LONG + name)
    encode(LONG + "3")
    assert encode(LONG + "1") == 0
    assert encode(LONG + "2") > 0
    encode.pieces.forget()  # type: ignore[attr-defined]
    assert encode(LONG + "2") > 0
    assert encode.pieces.encode("", None, None) == []  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("<go>", special=True, lstrip=True),
        AddedToken("<go>", special=True, single_word=True),
        AddedToken("<go>", special=True, normalized=True),
        AddedToken("<go>", special=False),
    ],
)
def test_a_text_is_not_cut_at_tokens_that_depend_on_what_is_before_them(token: AddedToken) -> None:
    core = Tokenizer(BPE({"a": 0, " ": 1}, merges=[]))
    core.add_tokens([token])
    assert Pieces(core, [core.token_to_id("<go>")]).split("a <go>a") == ["a <go>a"]


@pytest.mark.parametrize("other", ["<go><go>", "a<g"])
def test_a_text_is_not_cut_at_tokens_that_can_be_a_part_of_another(other: str) -> None:
    core = Tokenizer(BPE({"a": 0}, merges=[]))
    core.add_special_tokens(["<go>", other])
    assert Pieces(core, [core.token_to_id("<go>")]).split("a<go>a") == ["a<go>a"]


def test_too_many_tokens_are_refused_before_they_are_listed_also_where_they_are_known() -> None:
    tokenizer = ChatTokenizer(byte_tokenizer(259, 512))
    chat = [{"role": "user", "content": LONG}]
    known = len(tokenizer.encode_chat(chat))
    for most in (known - 1, 3):
        with pytest.raises(TooManyTokens) as refused:
            tokenizer.encode_chat(chat, most=most)
        assert refused.value.tokens == known
    assert np.array_equal(tokenizer.encode_chat(chat, most=known), tokenizer.encode_chat(chat))
