"""ChatTokenizer: rendering, encoding and decoding."""

import threading
import time
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from regrow.errors import BadConfig, BadRequest, ModelRefused, TooManyTokens
from regrow.models.byte_tokenizer import byte_tokenizer
from regrow.models.tokenizer import ChatTokenizer
from tests.models.dialects import CHATML, LLAMA, QWEN, hard_tokenizer

HI = [{"role": "user", "content": "Hi"}]
PLAIN = "{% for m in messages %}{{ m.role + ':' + m.content + '</s>' }}{% endfor %}"
CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def with_template(template: str | None) -> ChatTokenizer:
    return ChatTokenizer(hard_tokenizer(["</s>"], template))


def starting() -> PreTrainedTokenizerFast:
    """A tokenizer that adds its start token to raw text, with a template that writes it too."""
    hf = LLAMA.tokenizer()
    start = hf.bos_token_id
    hf.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", start)]
    )
    return hf


def test_the_start_token_is_not_added_twice() -> None:
    hf = starting()
    tokenizer = ChatTokenizer(hf)
    assert tokenizer.encode_chat(HI).tolist().count(hf.bos_token_id) == 1
    assert tokenizer.encode("Hi").tolist().count(hf.bos_token_id) == 1


def test_the_start_token_of_a_raw_text_can_be_left_out() -> None:
    hf = starting()
    tokenizer = ChatTokenizer(hf)
    with_start, bare = (tokenizer.encode("Hi", add).tolist() for add in (True, False))
    assert with_start == [hf.bos_token_id, *bare]


def test_special_tokens_are_shown_or_left_out() -> None:
    tokenizer = ChatTokenizer(starting())
    ids = tokenizer.encode("Hi")
    assert tokenizer.decode(ids) == "Hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|begin|>Hi"


def test_other_threads_get_their_turns_while_a_long_text_is_tokenised() -> None:
    tokenizer = ChatTokenizer(byte_tokenizer(259, 512))
    ended = threading.Event()

    def work() -> None:
        tokenizer.encode("word " * 400_000)  # a second
        ended.set()

    worker = threading.Thread(target=work)
    worker.start()
    turns = 0
    while not ended.is_set():
        time.sleep(0.001)
        turns += 1
    worker.join()
    assert turns > 50  # of several hundred; with the interpreter's lock held, there are a few


def test_keys_are_read_only_int64() -> None:
    keys = with_template(PLAIN).encode("Hi")
    assert keys.dtype == "int64"
    assert not keys.flags.writeable


def test_a_prompt_ends_with_the_beginning_of_an_answer_unless_told_otherwise() -> None:
    tokenizer = ChatTokenizer(CHATML.tokenizer())
    assert tokenizer.render(HI).endswith("<|im_start|>assistant\n")
    assert tokenizer.render(HI, (), {"add_generation_prompt": False}).endswith("Hi<|im_end|>\n")


def test_a_final_answer_can_be_continued() -> None:
    tokenizer = ChatTokenizer(CHATML.tokenizer())
    begun = [*HI, {"role": "assistant", "content": "Well,"}]
    assert tokenizer.render(begun, (), {"continue_final_message": True}).endswith("assistant\nWell,")


def test_options_reach_the_template() -> None:
    tokenizer = ChatTokenizer(QWEN.tokenizer())
    assert "<think>" in tokenizer.render(HI, (), {"enable_thinking": False})
    assert "<think>" not in tokenizer.render(HI)


def test_tools_reach_the_template() -> None:
    tokenizer = with_template("{{ tools | tojson }}" + PLAIN)
    tool = {"type": "function", "function": {"name": "look_up"}}
    assert "look_up" in tokenizer.render(HI, [tool])
    assert tokenizer.render(HI).startswith("null")


def test_text_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    text = with_template(PLAIN).render([{"role": "user", "content": parts}])
    assert text == "user:one\ntwo</s>"


def test_a_template_that_takes_only_parts_is_given_parts() -> None:
    parts_only = "{% for m in messages %}{% for p in m.content %}{{ p['text'] }}{% endfor %}</s>{% endfor %}"
    assert with_template(parts_only).render(HI) == "Hi</s>"


def test_a_part_that_is_not_text_is_refused() -> None:
    with pytest.raises(BadRequest, match="only parts of the type text") as caught:
        with_template(PLAIN).render([{"role": "user", "content": [{"type": "image_url"}]}])
    assert caught.value.param == "messages"


def test_no_content_is_an_empty_content() -> None:
    assert with_template(PLAIN).render([{"role": "assistant", "content": None}]) == "assistant:</s>"


def test_arguments_of_calls_are_objects_for_a_template_that_prints_objects() -> None:
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{% for key, value in c.function.arguments.items() %}{{ key ~ '=' ~ value }}{% endfor %}"
        "{% endfor %}{% endfor %}"
    )
    message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert with_template(template).render([message]) == "x=1"


def test_arguments_of_calls_are_text_for_a_template_that_adds_them_to_text() -> None:
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ 'call ' + c.function.arguments }}"
        "{% endfor %}{% endfor %}"
    )
    parsed = {**CALL, "function": {"name": "f", "arguments": {"x": 1}}}
    for call in (CALL, parsed):
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        assert with_template(template).render([message]) == 'call {"x": 1}'


def test_what_a_template_refuses_is_a_bad_request_about_the_messages() -> None:
    tokenizer = with_template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BadRequest, match="roles must alternate") as caught:
        tokenizer.encode_chat(HI)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("messages", [[{}], [{"role": "user", "content": 7}], []])
def test_misshapen_messages_are_a_bad_request(messages: list[dict[str, object]]) -> None:
    with pytest.raises(BadRequest):
        with_template(PLAIN + "{{ messages[0].role }}").render(messages)


def test_options_cannot_replace_the_template() -> None:
    with pytest.raises(BadRequest):
        with_template(PLAIN).render(HI, (), {"chat_template": "{{ 'mine' }}"})


def test_a_model_without_a_template_takes_no_messages_and_says_so() -> None:
    tokenizer = with_template(None)
    assert not tokenizer.has_template
    assert tokenizer.marks_note == "the model has no chat template"
    assert not tokenizer.marks.end
    with pytest.raises(BadRequest, match="no chat template"):
        tokenizer.encode_chat(HI)


def test_a_template_can_be_given_as_text_or_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ 'mine: ' + messages[0].content }}")
    hf = hard_tokenizer(["</s>"], None)
    for given in (file.read_text(), str(file)):
        tokenizer = ChatTokenizer(hf, chat_template=given)
        assert tokenizer.has_template
        assert tokenizer.render(HI) == "mine: Hi"


def test_a_given_template_that_is_neither_text_nor_file_is_a_bad_setting() -> None:
    with pytest.raises(BadConfig, match="--chat-template"):
        ChatTokenizer(hard_tokenizer(["</s>"], None), chat_template="no/such/file.jinja")


def test_a_given_template_with_a_syntax_error_is_a_bad_setting() -> None:
    with pytest.raises(BadConfig, match="--chat-template"):
        ChatTokenizer(hard_tokenizer(["</s>"], None), chat_template="{% for m in messages %}{{ m.content }")


def test_a_model_whose_own_template_has_a_syntax_error_is_refused() -> None:
    with pytest.raises(ModelRefused, match="syntax error"):
        with_template("{% for m in messages %}{{ m.content }")


def test_special_tokens_have_no_text() -> None:
    hf = CHATML.tokenizer()
    tokenizer = ChatTokenizer(hf)
    assert tokenizer.decode(tokenizer.encode("<|im_start|>Hi<|im_end|>")) == "Hi"


def test_end_ids_are_the_tokenizers_and_the_given_ones() -> None:
    hf = CHATML.tokenizer()
    assert ChatTokenizer(hf, [7]).eos_ids == {hf.eos_token_id, 7}


def test_long_texts_are_neither_cut_nor_padded() -> None:
    hf = hard_tokenizer(["</s>"], None)
    hf.backend_tokenizer.enable_truncation(4)
    hf.backend_tokenizer.enable_padding(length=8)
    assert len(ChatTokenizer(hf).encode("abcdefgh" * 4)) == 32
    assert len(ChatTokenizer(hf).encode("a")) == 1


def test_a_text_of_more_tokens_than_are_wanted_is_refused_with_their_number() -> None:
    tokenizer = ChatTokenizer(byte_tokenizer(512, 512))
    assert len(tokenizer.encode("x" * 100, most=100)) == 100
    with pytest.raises(TooManyTokens, match="100 tokens, and at most 99") as refused:
        tokenizer.encode("x" * 100, most=99)
    assert (refused.value.tokens, refused.value.param) == (100, "prompt")
    whole = len(tokenizer.encode_chat(HI))
    with pytest.raises(TooManyTokens) as refused:
        tokenizer.encode_chat(HI, most=whole - 1)
    assert (refused.value.tokens, refused.value.param) == (whole, "messages")


def test_a_token_that_the_model_does_not_embed_is_a_bad_request() -> None:
    hf = hard_tokenizer(["</s>", "<image>"], PLAIN)
    tokenizer = ChatTokenizer(hf, rows=len(hf) - 1)
    assert tokenizer.vocab_size == len(hf) - 1
    assert len(tokenizer.encode_chat(HI))
    with pytest.raises(BadRequest, match="<image>") as caught:
        tokenizer.encode("an <image>")
    assert caught.value.param == "prompt"
