"""The formats that models write tool calls in, told from their chat templates."""

from collections.abc import Mapping, Sequence

from regrow.models.call_reader import CallReader, ProseReader
from regrow.models.json_calls import HermesReader, LlamaReader
from regrow.models.pythonic_calls import PythonicReader
from regrow.models.xml_calls import XmlReader
from regrow.policy.request import ToolFormat

READERS: dict[ToolFormat, type[CallReader]] = {
    "hermes": HermesReader,
    "qwen-xml": XmlReader,
    "llama": LlamaReader,
    "lfm2": PythonicReader,
}
SIGNS: tuple[tuple[str, ToolFormat], ...] = (  # in this order: Qwen's XML stands in Hermes' tags
    ("<function=", "qwen-xml"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|tool_list_start|>", "lfm2"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama"),
    ('"parameters": dictionary of argument name', "llama"),
)
MARKS: dict[ToolFormat, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen-xml": ("<tool_call>", "</tool_call>"),
    "llama": ("<|python_tag|>",),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
}


def format_of(template: str) -> ToolFormat:
    """Return the format that a template's text speaks of; Hermes where it speaks of none."""
    return next((name for sign, name in SIGNS if sign in template), "hermes")


def call_reader(format_: ToolFormat, tools: Sequence[Mapping[str, object]]) -> CallReader:
    """Return a reader of one answer to a request with these tools, in OpenAI's shape; without any, all that
    the model says is prose."""
    schemas = {}
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping):
            parameters = function.get("parameters")
            schemas[str(function.get("name"))] = parameters if isinstance(parameters, Mapping) else {}
    return READERS[format_](schemas) if schemas else ProseReader({})
