"""Log-probabilities in OpenAI's two shapes: that of chats, and the older one of /v1/completions.

A token is named by its text; one that holds a part of a character is shown as the official service shows it,
with its bytes as \\xf0 and so on.
"""

import codecs
from collections.abc import Sequence

from regrow.actors.events import Logprob
from regrow.api.facts import Body


def chat_logprobs(tokens: Sequence[Logprob]) -> Body:
    """Return the member `logprobs` of a choice of a chat."""
    return {
        "content": [{**_entry(token), "top_logprobs": [_entry(t) for t in token.top]} for token in tokens],
        "refusal": None,
    }


class TextLogprobs:
    """The member `logprobs` of a choice of /v1/completions, piece by piece; offsets count the characters of
    the choice's text. A token is always among the most likely ones of its place, so there may be one more of
    these than were asked for.

    echo: what stands before the answer. prompt: the tokens of it, which may begin with some that it does not
    show (a start token).
    """

    def __init__(self, echo: str = "", prompt: Sequence[Logprob] = ()) -> None:
        shown = b"".join(token.bytes for token in prompt).decode(errors="replace")
        self._at = min(len(echo) - len(shown), 0)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, tokens: Sequence[Logprob]) -> Body:
        """Return it for the next tokens."""
        offsets = []
        for token in tokens:
            offsets.append(max(self._at, 0))
            self._at += len(self._decoder.decode(token.bytes))
        return {
            "tokens": [_text(token) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                None if token.logprob is None else {_text(t): t.logprob for t in (*token.top, token)}
                for token in tokens
            ],
            "text_offset": offsets,
        }


def _entry(token: Logprob) -> Body:
    return {"token": _text(token), "logprob": token.logprob, "bytes": list(token.bytes)}


def _text(token: Logprob) -> str:
    return token.bytes.decode(errors="backslashreplace")
