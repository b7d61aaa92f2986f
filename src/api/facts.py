"""What every answer tells beside its text: usage in OpenAI's shape, and what was reused and why (E1)."""

from collections.abc import Sequence

import msgspec

from regrow.actors.events import (
    Failed,
    Finished,
    Mounted,
    Placed,
    Queued,
    ReadDone,
    ReadProgress,
    Reuse,
    Usage,
)

Body = dict[str, object]
Phase = Queued | Placed | Mounted | ReadProgress | ReadDone


def usage_body(usages: Sequence[Usage]) -> Body:
    """Return OpenAI's usage object, summed over the runs of one answer."""
    prompt = sum(usage.prompt for usage in usages)
    completion = sum(usage.completion for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached for usage in usages)},
    }


def reuse_body(reuse: Reuse) -> Body:
    """Return the `regrow` object (E1); milliseconds are rounded to a tenth."""
    body: Body = msgspec.to_builtins(reuse)
    for only_if_asked in ("repacked", "digest"):
        if body[only_if_asked] is None:
            del body[only_if_asked]
    times = {name: round(getattr(reuse, name), 1) for name in ("queue_ms", "mount_ms", "read_ms")}
    return {**body, **times}


def phase_facts(event: Phase) -> Body:
    """Return what a chunk of a client that asked for progress tells of an event before the first token."""
    match event:
        case Queued():
            return {"phase": "queued", "ahead": event.ahead}
        case Placed():
            return {
                "phase": "placed",
                "slot": event.slot,
                "source": event.source,
                "reused": event.reused,
                "total": event.prompt,
            }
        case Mounted():
            return {"phase": "mounted", "reused": event.reused, "ms": round(event.ms, 1)}
        case ReadProgress():
            return {
                "phase": "reading",
                "position": event.position,
                "reused": event.reused,
                "total": event.total,
                "tok_s": round(event.tokens_per_s, 1),
                "eta_ms": round(event.eta_ms, 1),
            }
        case ReadDone():
            return {"phase": "decoding", "reused": event.reused, "read": event.read, "ms": round(event.ms, 1)}


def facts(end: Finished | Failed) -> Body:
    """Return the members `usage` and `regrow` of an answer that is one run."""
    return {"usage": usage_body([end.usage]), "regrow": reuse_body(end.reuse)}
