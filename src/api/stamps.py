"""Stamps that agent clients put into the system prompt: lines in the form of a header, new in every request.

They mean nothing to a model, and as the very first line they make every prompt differ from its first token
on. So they are left out where they open a system prompt or a block of one; elsewhere such a line is text.
"""

import re

STAMPS = (
    r"x-anthropic-[a-z0-9-]+",  # Claude Code: x-anthropic-billing-header: cc_version=...; cch=...;
    r"x-[a-z0-9-]*(?:session|request|trace|conversation)-id",  # gateways and agents that number their calls
)
OPENING = re.compile(rf"\A\s*(?:(?:{'|'.join(STAMPS)})[ \t]*:[^\n]*(?:\n\s*|\Z))+", re.IGNORECASE)


def without_stamps(system: str) -> str:
    """Return a system prompt, or a block of one, without the stamps at its beginning."""
    return OPENING.sub("", system)
