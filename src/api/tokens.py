"""/tokenize, /detokenize and /apply-template: what becomes of a prompt, without an answer.

Fields are named as in vLLM (which calls a text `prompt`, both given and answered) and llama-server.
"""

from aiohttp import web

from regrow.api.body import read_body
from regrow.api.chat_prompt import chat_prompt
from regrow.api.errors import json_response
from regrow.api.models import check_served
from regrow.api.port import ModelInfo
from regrow.api.schema import DetokenizeRequest, TemplateRequest, TokenizeRequest
from regrow.api.state import GATE, SETTINGS
from regrow.errors import BadRequest
from regrow.policy.plan import ReadPlan
from regrow.policy.request import GenerateRequest


async def tokenize(request: web.Request) -> web.Response:
    """Answer with the tokens of a text or of a chat and, on request, with the cuts of the read plan."""
    settings = request.app[SETTINGS]
    engine = request.app[GATE].engine
    body = await read_body(request, TokenizeRequest)
    check_served(body.model, engine.info, settings)
    tokens, plan = await engine.plan_of(_prompt(body, engine.info, settings.message_limit))
    answer = {"count": len(tokens), "max_model_len": engine.info.context, "tokens": tokens}
    return json_response({**answer, "cuts": _cuts(plan)} if body.cuts else answer)


async def detokenize(request: web.Request) -> web.Response:
    engine = request.app[GATE].engine
    body = await read_body(request, DetokenizeRequest)
    check_served(body.model, engine.info, request.app[SETTINGS])
    text = await engine.text_of(body.tokens)
    return json_response({"text": text, "prompt": text})


async def apply_template(request: web.Request) -> web.Response:
    """Answer with the text that a chat becomes and, on request, with its tokens."""
    settings = request.app[SETTINGS]
    engine = request.app[GATE].engine
    body = await read_body(request, TemplateRequest)
    check_served(body.model, engine.info, settings)
    chat = chat_prompt(body, engine.info, settings.message_limit)
    answer: dict[str, object] = {"prompt": await engine.render(chat)}
    if body.tokens:
        answer["tokens"], _ = await engine.plan_of(chat)
    return json_response(answer)


def _prompt(body: TokenizeRequest, info: ModelInfo, message_limit: int) -> GenerateRequest:
    """Return the one prompt of a body; raises BadRequest where there is none, or more than one."""
    given = [name for name in ("text", "prompt", "messages") if getattr(body, name) is not None]
    if not given:
        raise BadRequest("text is missing; give text or messages", "text", "missing_required_parameter")
    if len(given) > 1:
        raise BadRequest(f"{given[1]}: not together with {given[0]}", given[1])
    text = body.prompt if body.text is None else body.text
    if text is not None:
        return GenerateRequest(prompt=text, add_special_tokens=body.add_special_tokens is not False)
    if body.add_special_tokens:
        raise BadRequest(
            "add_special_tokens: the chat template of the messages writes its own", "add_special_tokens"
        )
    return chat_prompt(body, info, message_limit)


def _cuts(plan: ReadPlan) -> list[dict[str, object]]:
    """Return where reading is cut: after a message of `role`, or on the chunk grid."""
    roles = {end.position: end.role for end in plan.ends}
    return [
        {"position": cut, "kind": "message" if cut in roles else "grid", "role": roles.get(cut)}
        for cut in plan.cuts
    ]
