"""All routes in one table: what each takes, and whether it is answered without a key.

The application, its checks of keys, `/openapi.json` and the fuzz tests are made from it; a route that is not
in it does not exist.
"""

from regrow.api.cache import delete_cache, delete_root, get_cache, get_original
from regrow.api.chat import chat_completions
from regrow.api.completions import completions
from regrow.api.messages import count_tokens, messages
from regrow.api.messages_schema import CountRequest, MessagesRequest
from regrow.api.models import get_model, list_models
from regrow.api.openapi import openapi
from regrow.api.page.page import page
from regrow.api.responses.routes import (
    cancel_response,
    count_input_tokens,
    create_response,
    delete_response,
    get_response,
    list_input_items,
)
from regrow.api.responses.schema import ResponsesRequest
from regrow.api.responses.socket import responses_socket
from regrow.api.route import Route
from regrow.api.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TemplateRequest,
    TokenizeRequest,
)
from regrow.api.status import health, metrics, ready, status
from regrow.api.stream import stream
from regrow.api.tokens import apply_template, detokenize, tokenize

ROUTES = (
    Route("GET", "/", page, "Show the page: chat, monitor, about", keyless=True),
    Route("POST", "/v1/chat/completions", chat_completions, "Answer a chat", ChatRequest),
    Route("POST", "/v1/completions", completions, "Continue prompts as they are", CompletionRequest),
    Route("POST", "/v1/messages", messages, "Answer a chat, as Anthropic does", MessagesRequest),
    Route(
        "POST", "/v1/messages/count_tokens", count_tokens, "Count a prompt, as Anthropic does", CountRequest
    ),
    Route("POST", "/tokenize", tokenize, "Show the tokens of a text or a chat", TokenizeRequest),
    Route("POST", "/detokenize", detokenize, "Show the text of tokens", DetokenizeRequest),
    Route("POST", "/apply-template", apply_template, "Show the prompt that a chat becomes", TemplateRequest),
    Route("POST", "/v1/responses", create_response, "Make a response", ResponsesRequest),
    Route("POST", "/v1/responses/input_tokens", count_input_tokens, "Count tokens", ResponsesRequest),
    Route("GET", "/v1/responses", responses_socket, "Make responses over a WebSocket", keyless=True),
    Route("GET", "/v1/responses/{id}", get_response, "Show a response"),
    Route("DELETE", "/v1/responses/{id}", delete_response, "Forget a response"),
    Route("POST", "/v1/responses/{id}/cancel", cancel_response, "End a response early"),
    Route("GET", "/v1/responses/{id}/input_items", list_input_items, "List what a response was made from"),
    Route("GET", "/v1/stream", stream, "Chat over a WebSocket, many requests at a time", keyless=True),
    Route("GET", "/v1/models", list_models, "List what is served"),
    Route("GET", "/v1/models/{name:.+}", get_model, "Show one model"),
    Route("GET", "/v1/status", status, "Show what the server is doing"),
    Route("GET", "/metrics", metrics, "Show what is counted, for Prometheus"),
    Route("GET", "/v1/cache", get_cache, "Show what is kept"),
    Route("DELETE", "/v1/cache", delete_cache, "Forget all that is kept and not in use"),
    Route("DELETE", "/v1/cache/roots/{id}", delete_root, "Forget one system prompt"),
    Route("GET", "/v1/cache/originals/{name}", get_original, "Show a text that a conversation lacks"),
    Route("GET", "/openapi.json", openapi, "Show this document"),
    Route("GET", "/health", health, "Tell that the process lives", keyless=True),
    Route("GET", "/ready", ready, "Tell whether requests are taken", keyless=True),
)
