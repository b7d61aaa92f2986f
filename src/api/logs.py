"""Structured logs on stderr: one line an event, for people or as JSON.

Tracebacks are plain, without the values of local variables: those could hold a prompt.
"""

import logging
import sys

import structlog
from aiohttp.http_exceptions import HttpProcessingError
from structlog.typing import Processor

LEVELS = ("debug", "info", "warning", "error")


def configure_logs(level: str, as_json: bool) -> None:
    """Send the logs of regrow from `level` on, and what other libraries warn of, to stderr."""
    before: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
        structlog.processors.StackInfoRenderer(),
    ]
    rendering: list[Processor]
    if as_json:
        rendering = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        plain = structlog.dev.plain_traceback
        rendering = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
            foreign_pre_chain=before,
        )
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("regrow").setLevel(level.upper())
    logging.getLogger("aiohttp.server").addFilter(_without_what_was_sent)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *before,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
    )


def _without_what_was_sent(record: logging.LogRecord) -> bool:
    """Take from a record of aiohttp's the error that quotes what it could not parse: a part of a body, or of
    a header with a key."""
    if record.exc_info and isinstance(record.exc_info[1], HttpProcessingError):
        record.exc_info = None
    return True
