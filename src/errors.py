"""The tree of errors: raised where the fact is known, turned into HTTP in one place (`api/errors.py`)."""


class RegrowError(Exception):
    """Base of all errors that regrow raises on purpose."""


class BadRequest(RegrowError):
    """The request cannot be served as it is; `param` names the field, `code` is OpenAI's error code."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthExceeded(BadRequest):
    """Prompt and answer do not fit the context of a slot (sizes in tokens); `param` held the prompt.

    max_tokens: None where the request has none, so that it asks for one token at least.
    """

    def __init__(self, prompt: int, max_tokens: int | None, context: int, param: str = "messages") -> None:
        self.prompt, self.max_tokens, self.context = prompt, max_tokens or 1, context
        answer = "an answer needs one" if max_tokens is None else f"max_tokens is {max_tokens}"
        super().__init__(
            f"this model's maximum context length is {context} tokens, but the prompt has {prompt} tokens "
            f"and {answer}",  # agents look for these words, and then shorten the prompt
            param=param,
            code="context_length_exceeded",
        )


class TooManyTokens(BadRequest):
    """A text has more tokens than were wanted of it: `tokens`."""

    def __init__(self, tokens: int, most: int, param: str = "prompt") -> None:
        message = f"{param}: it has {tokens} tokens, and at most {most} are read"
        super().__init__(message, param=param, code="too_many_tokens")
        self.tokens = tokens


class ModelNotFound(RegrowError):
    """The request names a model that is not served."""


class Overloaded(RegrowError):
    """The queue or a mailbox is full; `retry_after` is a number of seconds worth waiting."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Draining(RegrowError):
    """The engine is shutting down and takes no new work."""


class DeadlineExceeded(RegrowError):
    """A request or an ask was not finished by its deadline."""


class SlowConsumer(RegrowError):
    """The reader of an event stream fell behind its bounded buffer."""


class ActorDown(RegrowError):
    """The actor that was asked has crashed or stopped before it answered."""


class EngineGaveUp(RegrowError):
    """Actors crashed more often than the restart limit allows; the message says which, and why."""


class DeviceFailed(RegrowError):
    """A step on the device failed; the device is restarted with fresh arenas."""


class NonFiniteLogits(RegrowError):
    """The model gave NaN or infinity for this request; nothing of it is kept."""


class FormBroken(RegrowError):
    """An answer has another form than it had to have."""


class VerifyFailed(RegrowError):
    """A mounted state is not what reading the same keys gives (V2); the message names the parts."""


class ModelRefused(RegrowError):
    """The model cannot be served; the message says why."""


class BadConfig(RegrowError):
    """A setting has a wrong value; the message names the option and what is allowed."""
