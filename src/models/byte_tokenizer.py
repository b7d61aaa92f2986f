"""A tokenizer that needs no file: 256 bytes, three special tokens, and a ChatML template.

A text always encodes to its UTF-8 bytes. A larger vocabulary is filled up with short letter groups, which
encoding never uses, so that whatever id a random model draws has a text.
"""

from itertools import chain, islice, product
from string import ascii_lowercase

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from regrow.models.token_bytes import byte_characters

END_OF_TEXT, IM_START, IM_END = 256, 257, 258
SPECIAL = {END_OF_TEXT: "<|endoftext|>", IM_START: "<|im_start|>", IM_END: "<|im_end|>"}

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- 'Tools, one JSON object a line:\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{{- 'To call one, answer <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- set arguments = call.function.arguments %}
{{- '<tool_call>{"name": ' + call.function.name | tojson + ', "arguments": ' }}
{{- (arguments if arguments is string else arguments | tojson) + '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def byte_tokenizer(vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of `vocab_size` ids (259 at least) for models of `context` positions."""
    pieces = list(islice(chain(byte_characters(), SPECIAL.values(), _letter_groups()), vocab_size))
    core = Tokenizer(BPE({piece: i for i, piece in enumerate(pieces)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL.values()))
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=SPECIAL[IM_END],
        pad_token=SPECIAL[END_OF_TEXT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def _letter_groups() -> chain[str]:
    space = byte_characters()[ord(" ")]
    return chain.from_iterable(
        (
            space * first + "".join(letters)
            for first in (1, 0)
            for letters in product(ascii_lowercase, repeat=n)
        )
        for n in (2, 3, 4)
    )
