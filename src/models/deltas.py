"""What an answer is made of, as it comes: prose, reasoning, and calls of tools.

The pieces of one kind add up to its text. A call is its start, pieces of its arguments, and its end; one
without an end is one that the output ended inside, and no call.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of what is said to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what stands inside the model's thinking tags."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Call number `index` of the answer, from 0, names its tool."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments of call `index`; together they are a JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """Call `index` is complete."""

    index: int


Delta = Content | Reasoning | CallStart | CallArguments | CallEnd
