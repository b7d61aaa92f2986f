"""Small chat templates in the styles of well-known families, and tokenizers that are hard on them.

Each `Dialect` has special tokens, a template, and where messages of a rendered text end: after these pieces
of text, but not where they close an assistant's message.
"""

from dataclasses import dataclass

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

MERGES = [
    ("Ċ", "Ċ"),
    ("ĊĊ", "Ċ"),
    ("ĊĊ", "ĊĊ"),
    ("Ġ", "Ġ"),
    (".", "Ċ"),
    (">", "Ċ"),
    ("r", "Ċ"),
    ("Ċ", "<"),
    ('"', "}"),
    (".", '"'),
    ("u", "s"),
    ("us", "e"),
    ("use", "r"),
    ("m", "o"),
    ("q", "u"),
]


def hard_tokenizer(
    specials: list[str], template: str | None, bos: str | None = None
) -> PreTrainedTokenizerFast:
    """A byte-level BPE that splits text nowhere but at special tokens, and merges newlines and marks with
    what is beside them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *("".join(pair) for pair in MERGES)]
    core = Tokenizer(BPE({piece: i for i, piece in enumerate(pieces)}, merges=MERGES))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(specials)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, chat_template=template, bos_token=bos, eos_token=specials[-1]
    )


@dataclass(frozen=True)
class Dialect:
    name: str
    specials: list[str]
    template: str
    close: dict[str, str]  # role -> the text right after which its message has ended
    bos: str | None = None

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return hard_tokenizer(self.specials, self.template, self.bos)


CHATML = Dialect(
    "chatml",
    ["<|im_start|>", "<|im_end|>"],
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    dict.fromkeys(["system", "user", "tool"], "<|im_end|>\n"),
)
DEFAULT_SYSTEM = Dialect(
    "chatml with a default system prompt, whose start token is the begin mark",
    CHATML.specials,
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    + CHATML.template,
    CHATML.close,
    bos="<|im_start|>",
)
DATED = Dialect(
    "chatml with a date before the system prompt",
    CHATML.specials,
    "{{ '<|im_start|>system\nToday is ' + strftime_now('%d %B %Y %H:%M:%S') + '.\n' }}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}"
    "{% set messages = messages[1:] %}{% endif %}{{ '<|im_end|>\n' }}" + CHATML.template,
    CHATML.close,
)
LLAMA = Dialect(
    "headers, trimmed contents, tool results as JSON",
    ["<|begin|>", "<|header|>", "<|/header|>", "<|eot|>"],
    "{{ '<|begin|>' }}{% for m in messages %}{{ '<|header|>' + m.role + '<|/header|>\n\n' }}"
    "{% if m.role == 'tool' %}{{ m.content | tojson }}"
    "{% elif m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}"
    "{% else %}{{ m.content | trim }}{% endif %}{{ '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header|>assistant<|/header|>\n\n' }}{% endif %}",
    dict.fromkeys(["system", "user", "tool"], "<|eot|>"),
    bos="<|begin|>",
)
GEMMA = Dialect(
    "the system prompt inside the first user turn, roles in turn",
    ["<bos>", "<turn>", "</turn>"],
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set first = '' %}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (first if loop.first else '') }}"
    "{{ m.content | trim }}{{ '</turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}",
    {"user": "</turn>\n"},
    bos="<bos>",
)
MISTRAL = Dialect(
    "[INST] without a mark for the assistant",
    ["<s>", "[INST]", "[/INST]", "[SYS]", "[/SYS]", "[TOOL]", "[/TOOL]", "</s>"],
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{% elif m.role == 'system' %}{{ '[SYS]' + m.content + '[/SYS]' }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL]' + m.content + '[/TOOL]' }}"
    "{% elif m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson + '</s>' }}"
    "{% else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}",
    {"system": "[/SYS]", "user": "[/INST]", "tool": "[/TOOL]"},
    bos="<s>",
)
QWEN = Dialect(
    "thinking, and tool results that share a user turn",
    [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<result>",
        "</result>",
        "<|im_start|>",
        "<|im_end|>",
    ],
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<result>\n' + m.content + '\n</result>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% if loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "{{ '\n<tool_call>\n{\"arguments\": ' + c.function.arguments | tojson + '}\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}",
    {"system": "<|im_end|>\n", "user": "<|im_end|>\n", "tool": "</result><|im_end|>\n"},
)
DEEPSEEK = Dialect(
    "no ends at all: the mark of the next message ends the one before",
    ["<bos>", "<|User|>", "<|Assistant|>", "<|Tool|>", "<eos>"],
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '<|User|>' + m.content }}"
    "{% elif m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'tool' %}{{ '<|Tool|>' + m.content }}"
    "{% else %}{{ '<|Assistant|>' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{{ '<eos>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}",
    {"system": "<|User|>", "user": "<|Assistant|>", "tool": "<|Assistant|>"},
    bos="<bos>",
)
GLM = Dialect(
    "no ends at all, and two start tokens",
    ["[M]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
    "{{ '[M]<sop>' }}{% for m in messages %}"
    "{{ '<|' + ('observation' if m.role == 'tool' else m.role) + '|>\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
    {"system": "<|user|>", "user": "<|assistant|>", "tool": "<|assistant|>"},
)
HARMONY = Dialect(
    "channels: the system prompt is a developer message after a dated preamble",
    ["<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|return|>", "<|end|>"],
    "{{ '<|start|>system<|message|>You are a model.\nToday: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}"
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{{ '<|start|>developer<|message|># Instructions\n\n' + m.content + '\n\n<|end|>' }}"
    "{% elif m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}"
    "{% elif m.role == 'tool' %}"
    "{{ '<|start|>functions.f to=assistant<|channel|>x<|message|>' + m.content | tojson + '<|end|>' }}"
    "{% elif m.tool_calls %}{{ '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>' }}"
    "{{ m.tool_calls[0].function.arguments | tojson + '<|call|>' }}"
    "{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
    dict.fromkeys(["system", "user", "tool"], "<|end|>"),
)
ZEPHYR = Dialect(
    "roles in plain words, whose edges merge with what is beside them",
    ["</s>"],
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
    dict.fromkeys(["system", "user", "tool"], "</s>"),
)
DIALECTS = [ZEPHYR, DEEPSEEK, GLM, HARMONY, CHATML, DEFAULT_SYSTEM, DATED, LLAMA, GEMMA, MISTRAL, QWEN]
