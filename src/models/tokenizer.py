"""ChatTokenizer: a model's tokenizer and chat template as the engine sees them.

Chats are rendered to text and that text is tokenised as it is: a template writes its own start token, so none
is added a second time. Where messages end in tokens (`marks`) is learned from the template when it is made.
Texts and ids go through the batch calls of tokenizers, a batch of one: the others hold the interpreter's lock
until they are done, which for a long prompt would stop every other thread for seconds.
"""

from collections.abc import Iterable, Mapping, Sequence

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from regrow.errors import BadRequest, TooManyTokens
from regrow.models.answer_reader import prompt_thinks, thinking_tags
from regrow.models.detokenize import Detokenizer, Spelling
from regrow.models.pieces import Pieces, joined
from regrow.models.render import Renderer
from regrow.models.template import LearnedMarks, Message, learn_marks
from regrow.models.token_bytes import TokenBytes
from regrow.models.tool_formats import MARKS, format_of
from regrow.policy.keys import Keys, as_keys
from regrow.policy.plan import MessageMarks
from regrow.policy.request import ToolFormat


class ChatTokenizer:
    """Wraps a fast tokenizer of transformers.

    eos_ids: more ids that end an answer than the tokenizer itself names. chat_template: a Jinja template, or
    the path of its file, to be used instead of the tokenizer's own (BadConfig where it is neither). rows: how
    many ids the model embeds; a text with a token beyond them (of pictures, say) is a BadRequest.
    tool_format: how the model writes tool calls; None: as its template says.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        eos_ids: Iterable[int] = (),
        chat_template: str | None = None,
        rows: int | None = None,
        tool_format: ToolFormat | None = None,
    ) -> None:
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._render = Renderer(tokenizer, chat_template)
        self.tool_format = tool_format or format_of(self._render.template)
        self.thinking = thinking_tags(self._render.template)
        tags = () if self.thinking is None else (self.thinking.open, self.thinking.close)
        self._spelling = Spelling.of(self._backend, {*MARKS[self.tool_format], *tags})
        self.token_bytes = TokenBytes(self._spelling)
        own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.eos_ids = frozenset([*own, *eos_ids])
        self.vocab_size: int = min(len(tokenizer), rows or len(tokenizer))
        self._learned = self._learn()
        openings = {mark[0] for mark in self._learned.marks.begin.values() if mark}
        self._pieces = Pieces(self._backend, openings)

    @property
    def has_template(self) -> bool:
        return self._render.has_template

    @property
    def marks(self) -> MessageMarks:
        """How messages begin and end in tokens."""
        return self._learned.marks

    @property
    def marks_note(self) -> str:
        """What could not be learned of that and why; empty where everything could."""
        return self._learned.note

    @property
    def parallel_calls(self) -> bool:
        """Whether the template takes several tool calls in one message."""
        return self._render.parallel_calls

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its text."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def definition(self) -> str:
        """Return the whole tokenizer as JSON."""
        return str(self._backend.to_str())

    def thinks(self, keys: Keys) -> bool:
        """Whether a prompt ends inside the model's thinking tags."""
        return prompt_thinks(self.decode(keys[-16:], skip_special_tokens=False), self.thinking)

    def encode(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> Keys:
        """Return the ids of a raw prompt, int64 [n], with the start token where the tokenizer adds one;
        raises TooManyTokens where these are more than `most`."""
        return self._keys(text, "prompt", add_special_tokens, most)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] = (),
        options: Mapping[str, object] | None = None,
    ) -> str:
        """Return the text of a chat's prompt; raises BadRequest naming the field."""
        return self._render(messages, tools, options)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] = (),
        options: Mapping[str, object] | None = None,
        most: int | None = None,
        salt: str | None = None,
    ) -> Keys:
        """Return the ids of a chat's prompt, int64 [n]; raises BadRequest naming the field, and TooManyTokens
        where these are more than `most`. Messages that were met before, with the same `salt`, are known."""
        found = self._pieces.encode(self.render(messages, tools, options), most, salt)
        if isinstance(found, int):
            raise TooManyTokens(found, most or 0, "messages")
        return self._readable(joined(found), "messages")

    def forget(self) -> None:
        """Forget the messages that were met."""
        self._pieces.forget()

    def decode(self, ids: Sequence[int] | Keys, skip_special_tokens: bool = True) -> str:
        """Return the text of ids, with or without that of special tokens."""
        return self._backend.decode_batch([[int(i) for i in ids]], skip_special_tokens=skip_special_tokens)[0]

    def detokenizer(self) -> Detokenizer:
        """Return a fresh incremental detokeniser for one answer."""
        return Detokenizer(self._spelling)

    def _keys(self, text: str, param: str, own_start: bool, most: int | None) -> Keys:
        encoded = self._backend.encode_batch_fast([text], add_special_tokens=own_start)
        if most is not None and len(encoded[0]) > most:  # listing millions of them holds the lock for seconds
            raise TooManyTokens(len(encoded[0]), most, param)
        return self._readable(as_keys(encoded[0].ids), param)

    def _readable(self, keys: Keys, param: str) -> Keys:
        if len(keys) and keys.max() >= self.vocab_size:
            token = self._backend.id_to_token(int(keys.max()))
            raise BadRequest(f"the model cannot read the token {token}", param)
        return keys

    def _learn(self) -> LearnedMarks:
        if not self.has_template:
            return LearnedMarks(MessageMarks(), "the model has no chat template")

        def render(messages: Sequence[Message], generate: bool) -> str:
            try:
                return self.render(messages, (), {"add_generation_prompt": generate})
            except BadRequest as error:
                raise ValueError(str(error)) from error

        def tokenise(text: str) -> tuple[Sequence[int], Sequence[tuple[int, int]]]:
            encoding = self._backend.encode(text, add_special_tokens=False)
            return encoding.ids, encoding.offsets

        own = frozenset(self._backend.get_added_tokens_decoder())
        return learn_marks(render, tokenise, own)
