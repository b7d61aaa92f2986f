"""Made-up chats in tokens, in the manner of ChatML: `<begin> role <line> text <end> <line>`."""

import numpy as np

from regrow.policy.directory import CutHash
from regrow.policy.keys import Keys, Namespace, as_keys, prefix_hashes
from regrow.policy.plan import ChunkTable, MessageMarks, ReadPlan, build_plan

BEGIN, END, LINE, TOOL = 1, 2, 3, 4
ROLES = {"system": 10, "user": 11, "assistant": 12, "developer": 13}
MARKS = MessageMarks(
    begin={role: (BEGIN, token, LINE) for role, token in ROLES.items()} | {"tool": (BEGIN, 11, LINE, TOOL)},
    end=dict.fromkeys(("system", "user", "tool", "developer", "assistant"), (END, LINE)),
)
TABLE = ChunkTable.uniform(64)
NAMESPACE = Namespace.of("a model")


def message(role: str, length: int, seed: int = 0) -> list[int]:
    """Return a message with `length` tokens of text that `seed` makes up."""
    text = np.random.default_rng((length, seed)).integers(100, 1000, length).tolist()
    return [*MARKS.begin[role], *text, END, LINE]


def chat(*messages: tuple[str, int] | tuple[str, int, int]) -> Keys:
    """Return the prompt of (role, length of text, seed) messages, open for the assistant's answer."""
    tokens = [token for part in messages for token in message(*part)]
    return as_keys([*tokens, *MARKS.begin["assistant"]])


def plan_of(keys: Keys, table: ChunkTable = TABLE) -> ReadPlan:
    return build_plan(keys, table, MARKS)


def hashed(keys: Keys, plan: ReadPlan, namespace: Namespace = NAMESPACE) -> tuple[CutHash, ...]:
    return tuple(zip(plan.cuts, prefix_hashes(namespace, keys, plan.cuts), strict=True))
