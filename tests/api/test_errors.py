"""Every error that regrow raises on purpose has an answer of its own; any other tells nothing."""

import json

import pytest
from aiohttp import web

from regrow import errors
from regrow.api.errors import ANSWERS, Cancelled, Refused, Unauthorized, answer_for, body_of, response_of
from regrow.api.port import StillLoading
from regrow.errors import BadRequest, ContextLengthExceeded, Overloaded, RegrowError, TooManyTokens

OF_THE_SERVER = (errors.ModelRefused, errors.BadConfig, errors.EngineGaveUp)  # these end it
OF_A_REQUEST = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, RegrowError) and kind not in (RegrowError, *OF_THE_SERVER)
]
STATUS = {
    "BadRequest": 400,
    "ContextLengthExceeded": 400,
    "TooManyTokens": 400,
    "Unauthorized": 401,
    "Refused": 403,
    "ModelNotFound": 404,
    "Overloaded": 429,
    "NonFiniteLogits": 500,
    "FormBroken": 500,
    "VerifyFailed": 500,
    "SlowConsumer": 503,
    "Cancelled": 503,
    "ActorDown": 503,
    "DeviceFailed": 503,
    "StillLoading": 503,
    "Draining": 503,
    "DeadlineExceeded": 504,
}


ARGUMENTS = {ContextLengthExceeded: (1, 2, 3), TooManyTokens: (1, 2)}


@pytest.mark.parametrize("kind", [*OF_A_REQUEST, Refused, Unauthorized, Cancelled, StillLoading])
def test_an_error_of_a_request_has_its_status(kind: type[RegrowError]) -> None:
    error = kind(*ARGUMENTS.get(kind, ("the reason",)))
    response = response_of(error)
    told = json.loads(response.body)["error"]
    assert response.status == STATUS[kind.__name__]
    assert told["message"] == str(error)
    assert told["type"] == ("server_error" if response.status >= 500 else answer_for(error).type)
    assert told["code"] or kind is BadRequest


def test_statuses_worth_trying_again_say_when() -> None:
    assert response_of(Overloaded("full", retry_after=9)).headers["Retry-After"] == "9"
    for kind, answer in ANSWERS.items():
        if kind is not Overloaded and answer.retry_after is not None:
            assert response_of(kind("x")).headers["Retry-After"] == str(answer.retry_after)
    assert "Retry-After" not in response_of(BadRequest("x")).headers


def test_an_error_of_the_context_carries_both_numbers() -> None:
    told = body_of(ContextLengthExceeded(prompt=9000, max_tokens=100, context=8192))["error"]
    assert told["code"] == "context_length_exceeded"
    assert "9000" in told["message"]
    assert "8192" in told["message"]


def test_an_unexpected_error_tells_nothing_of_the_inside() -> None:
    response = response_of(KeyError("a secret"))
    assert response.status == 500
    assert b"secret" not in response.body


def test_the_web_librarys_own_refusals_have_the_same_shape() -> None:
    response = response_of(web.HTTPMethodNotAllowed("GET", ["POST"]))
    assert response.headers["Allow"] == "POST"
    assert json.loads(response.body)["error"]["code"] == "method_not_allowed"
