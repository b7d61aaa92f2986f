"""Random models: the same weights for a name, lively text, and a tokenizer that gives every id a text."""

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from regrow.errors import ModelRefused
from regrow.models.byte_tokenizer import IM_END, IM_START, byte_tokenizer
from regrow.models.random_configs import CONTEXT, FAMILIES
from regrow.models.random_models import build_random, parse_random, random_config

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer(512, CONTEXT)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_name_gives_the_same_weights_whatever_the_global_seed(family: str) -> None:
    torch.manual_seed(1)
    first = build_random(family)
    torch.manual_seed(2)
    expected = torch.get_rng_state()
    second = build_random(family)
    assert torch.equal(torch.get_rng_state(), expected)
    for (name, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_the_same_model_rounded(family: str) -> None:
    rounded = dict(build_random(family, dtype=torch.bfloat16).named_parameters())
    for name, parameter in build_random(family).named_parameters():
        assert torch.equal(rounded[name], parameter.to(rounded[name].dtype)), name
    assert {p.dtype for n, p in rounded.items() if "proj" in n} == {torch.bfloat16}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_drawn_or_left_at_its_neutral_value(family: str) -> None:
    for name, parameter in build_random(family).named_parameters():
        assert torch.isfinite(parameter).all(), name
        if parameter.ndim >= 2:
            assert parameter.std() > 0, name


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_are_what_they_say(family: str) -> None:
    with torch.device("meta"):
        large = AutoModelForCausalLM.from_config(random_config(family, "135m"))
    assert 115e6 < sum(p.numel() for p in large.parameters()) < 140e6
    assert sum(p.numel() for p in build_random(family).parameters()) < 4e6


def test_names_are_parsed_and_unknown_ones_refused_with_the_choice() -> None:
    assert parse_random("random:llama") == ("llama", "tiny")
    assert parse_random("random:qwen3_5:135m") == ("qwen3_5", "135m")
    with pytest.raises(ModelRefused, match="falcon_h1, gemma3, granitemoehybrid"):
        parse_random("random:gpt9")
    with pytest.raises(ModelRefused, match="tiny and 135m"):
        parse_random("random:llama:9b")


def test_text_encodes_to_its_bytes_and_back(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "Grüße, 日本!\n\tx  "
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_every_id_has_a_text_of_its_own_but_half_characters() -> None:
    tokenizer = byte_tokenizer(4096, CONTEXT)
    assert len(tokenizer) == 4096
    texts = [tokenizer.decode([i]) for i in range(4096)]
    assert all(texts)
    whole = [text for text in texts if "\ufffd" not in text]
    assert len(set(whole)) == len(whole) == 4096 - 128


def test_special_tokens_are_single_ids_and_the_end_token_ends_a_turn(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    assert tokenizer("<|im_start|>a<|im_end|>")["input_ids"] == [IM_START, ord("a"), IM_END]
    assert tokenizer.eos_token_id == IM_END == random_config("llama").eos_token_id


def test_the_template_is_chatml(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
    ]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nYes?<|im_end|>\n"
    )
    opened = tokenizer.apply_chat_template(chat[:2], tokenize=False, add_generation_prompt=True)
    assert text.startswith(opened.removesuffix("assistant\n"))
    assert opened.endswith("<|im_start|>assistant\n")


def test_the_template_lists_tools_once_and_shows_calls_and_results(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    call = {"type": "function", "id": "1", "function": {"name": "look", "arguments": '{"at": 3}'}}
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "a cat"},
    ]
    text = tokenizer.apply_chat_template(chat, tools=[TOOL], tokenize=False)
    assert text.count("Be brief.") == text.count('"parameters"') == text.count("<|im_start|>system") == 1
    assert '<tool_call>{"name": "look", "arguments": {"at": 3}}</tool_call><|im_end|>' in text
    assert text.endswith("<|im_start|>tool\na cat<|im_end|>\n")
    alone = tokenizer.apply_chat_template(chat[1:2], tools=[TOOL], tokenize=False)
    assert alone.startswith("<|im_start|>system\n")
