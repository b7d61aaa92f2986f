"""The bytes of single tokens: those of a text's tokens make up the text, however they are spelled."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordPiece
from transformers import PreTrainedTokenizerFast

from regrow.models.byte_tokenizer import IM_END, byte_tokenizer
from regrow.models.tokenizer import ChatTokenizer
from tests.models.dialects import hard_tokenizer
from tests.models.test_detokenize import TOKENIZERS

HARD = ChatTokenizer(hard_tokenizer(["<s>", "</s>"], None))
BYTES = ChatTokenizer(byte_tokenizer(512, 64))
TEXT = "a \u00e9\u4e2d\n\U0001f600\u200d.quse"


def spelled(tokenizer: ChatTokenizer, text: str) -> list[bytes]:
    return [tokenizer.token_bytes(token) for token in tokenizer.encode(text, False).tolist()]


def sentencepiece() -> ChatTokenizer:
    """As Llama's: a space before the first word, which decoding takes away, and single bytes for the rest."""
    pieces = [
        "<unk>",
        "<s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "a",
        "q",
        "\u2581a",
        "\u4e2d",
    ]
    merges = [("\u2581", "a")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    core = Tokenizer(BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    core.add_special_tokens(["<unk>", "<s>"])
    return ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>"))


LLAMA = sentencepiece()


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet=TEXT, max_size=30))
def test_the_bytes_of_a_texts_tokens_are_those_of_the_text(text: str) -> None:
    assert b"".join(spelled(HARD, text)).decode() == text
    assert b"".join(spelled(BYTES, text)).decode() == text


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet=TEXT, min_size=1, max_size=30))
def test_a_space_that_a_tokenizer_puts_before_a_text_is_the_only_difference(text: str) -> None:
    assert b"".join(spelled(LLAMA, text)).decode() == " " + text


def test_a_token_may_be_a_part_of_a_character() -> None:
    assert spelled(HARD, "\U0001f600") == [b"\xf0", b"\x9f", b"\x98", b"\x80"]
    assert spelled(LLAMA, "a\U0001f600") == [b" a", b"\xf0", b"\x9f", b"\x98", b"\x80"]


def test_special_tokens_stand_for_their_names_and_unknown_ids_for_nothing() -> None:
    assert BYTES.token_bytes(IM_END) == b"<|im_end|>"
    assert BYTES.token_bytes(512) == b""
    assert LLAMA.token_bytes(1) == b"<s>"


def test_parts_of_words_have_no_space_and_words_have_one() -> None:
    vocab = {piece: i for i, piece in enumerate(["[UNK]", "walk", "##ing", "the"])}
    core = Tokenizer(WordPiece(vocab, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.decoder = decoders.WordPiece()
    tokenizer = ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=core))
    assert spelled(tokenizer, "the walking") == [b" the", b" walk", b"ing"]


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())
def test_every_token_of_any_tokenizer_has_bytes(tokenizer: ChatTokenizer) -> None:
    spelling = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    assert all(spelling)
