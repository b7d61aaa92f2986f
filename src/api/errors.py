"""The one place where an error becomes an answer: HTTP status, OpenAI's error object, Retry-After."""

from dataclasses import dataclass
from http import HTTPStatus

import msgspec
from aiohttp import web

from regrow.api.port import StillLoading
from regrow.errors import (
    ActorDown,
    BadRequest,
    ContextLengthExceeded,
    DeadlineExceeded,
    DeviceFailed,
    Draining,
    FormBroken,
    ModelNotFound,
    NonFiniteLogits,
    Overloaded,
    RegrowError,
    SlowConsumer,
    VerifyFailed,
)


class Refused(RegrowError):
    """The request comes from where it may not come from (Host, Origin)."""


class Unauthorized(RegrowError):
    """The request shows no key that is taken."""


class Cancelled(RegrowError):
    """The answer was ended early, and not by the client that waits for it."""


class ResponseNotFound(RegrowError):
    """No response of this id is kept."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How one kind of error is told. `retry_after` in seconds, where trying again makes sense."""

    status: int
    type: str
    code: str | None
    retry_after: int | None = None


ANSWERS: dict[type[RegrowError], Answer] = {
    BadRequest: Answer(400, "invalid_request_error", None),
    Unauthorized: Answer(401, "authentication_error", "invalid_api_key"),
    Refused: Answer(403, "invalid_request_error", "refused"),
    ModelNotFound: Answer(404, "invalid_request_error", "model_not_found"),
    ResponseNotFound: Answer(404, "invalid_request_error", "response_not_found"),
    Overloaded: Answer(429, "rate_limit_error", "overloaded"),
    NonFiniteLogits: Answer(500, "server_error", "non_finite_logits"),
    FormBroken: Answer(500, "server_error", "form_broken"),
    VerifyFailed: Answer(500, "server_error", "verify_failed"),
    SlowConsumer: Answer(503, "server_error", "slow_consumer"),
    Cancelled: Answer(503, "server_error", "cancelled", 1),
    ActorDown: Answer(503, "server_error", "restarting", 1),
    DeviceFailed: Answer(503, "server_error", "device_failed", 1),
    StillLoading: Answer(503, "server_error", "loading", 5),
    Draining: Answer(503, "server_error", "draining", 5),
    DeadlineExceeded: Answer(504, "server_error", "deadline_exceeded"),
}
UNEXPECTED = Answer(500, "server_error", "internal_error")
MESSAGE_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def answer_for(error: RegrowError) -> Answer:
    """Return the answer of the nearest listed ancestor of the error's type."""
    for ancestor in type(error).__mro__:
        if found := ANSWERS.get(ancestor):
            return found
    return UNEXPECTED


def status_of(error: Exception) -> int:
    """Return the HTTP status of any error."""
    return answer_for(error).status if isinstance(error, RegrowError) else UNEXPECTED.status


def error_body(
    message: str, type_: str, param: str | None = None, code: str | None = None
) -> dict[str, dict[str, str | None]]:
    """Return OpenAI's error object."""
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}


def body_of(error: Exception) -> dict[str, dict[str, str | None]]:
    """Return the error object of any error; one not raised on purpose tells nothing of the inside."""
    if not isinstance(error, RegrowError):
        return error_body("the server met an unexpected error", UNEXPECTED.type, code=UNEXPECTED.code)
    answer = answer_for(error)
    if isinstance(error, BadRequest):
        return error_body(str(error), answer.type, error.param, error.code)
    param = "model" if isinstance(error, ModelNotFound) else None
    return error_body(str(error), answer.type, param, answer.code)


def message_error(error: Exception) -> dict[str, object]:
    """Return any error as Anthropic's clients know it. Agents read how a prompt that is too long is told, and
    then shorten it or ask for less."""
    answer = answer_for(error) if isinstance(error, RegrowError) else UNEXPECTED
    message = str(body_of(error)["error"]["message"])
    if isinstance(error, ContextLengthExceeded):
        prompt, answer_, limit = error.prompt, error.max_tokens, error.context
        message = f"prompt is too long: {prompt} tokens > {limit} maximum"
        if prompt < limit:
            message = (
                f"input length and `max_tokens` exceed context limit: {prompt} + {answer_} > {limit}, "
                "decrease input length or `max_tokens` and try again"
            )
    return message_error_body(answer.status, message)


def message_error_body(status: int, message: str) -> dict[str, object]:
    kind = MESSAGE_ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def message_response(error: Exception) -> web.Response:
    """Return what `response_of` does, in Anthropic's shape."""
    response = response_of(error)
    if isinstance(error, web.HTTPException):
        body = message_error_body(error.status, error.text or error.reason)
    else:
        body = message_error(error)
    response.body = msgspec.json.encode(body)
    return response


def response_of(error: Exception) -> web.Response:
    """Return the whole answer to an error that was met before any header went out."""
    if isinstance(error, web.HTTPException):
        return _http_response(error)
    answer = answer_for(error) if isinstance(error, RegrowError) else UNEXPECTED
    retry_after = error.retry_after if isinstance(error, Overloaded) else answer.retry_after
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(body_of(error), answer.status, headers)


def _http_response(error: web.HTTPException) -> web.Response:
    """Put aiohttp's own refusals (unknown route, wrong method, body too large ...) into the same shape."""
    headers = {name: error.headers[name] for name in ("Allow", "Connection") if name in error.headers}
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    code = HTTPStatus(error.status).name.lower()
    return json_response(error_body(error.text or error.reason, kind, code=code), error.status, headers)


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """Encode `body` with msgspec."""
    return web.Response(
        body=msgspec.json.encode(body), status=status, headers=headers, content_type="application/json"
    )
