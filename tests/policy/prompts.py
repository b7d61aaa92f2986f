"""Made-up chats of coding agents as request bodies hold them, in both styles, with their markers."""

from hypothesis import strategies as st

from regrow.policy.history import EDGE, LONG

WORDS = ["error", "value", "index", "token", "parse", "state", "reads", "line", "build", "passed"]
TTLS = ({"type": "ephemeral"}, {"type": "ephemeral", "ttl": "5m"}, {"type": "ephemeral", "ttl": "1h"})


def output(lines: int, seed: int = 0) -> str:
    """A command's output."""
    return "\n".join(" ".join(WORDS[(i * 7 + k + seed) % len(WORDS)] for k in range(9)) for i in range(lines))


def numbered(lines: int, seed: int = 0) -> str:
    """A file, as a file reader shows it."""
    return "\n".join(f"{i:6}\t{text}" for i, text in enumerate(output(lines, seed).split("\n"), seed + 1))


texts = st.sampled_from(
    [
        *("a", "ok\n", "Grüße 🙂", " ", output(4), numbered(5)),
        *(output(lines, lines) for lines in (38, 42, 60, 90)),
        *(numbered(lines, lines) for lines in (40, 80)),
        *("x" * size for size in (LONG, LONG + 1, LONG + EDGE)),
    ]
)
any_texts = st.one_of(
    texts,
    st.text(max_size=50).map(lambda text: text * 60),
    st.text(alphabet="ab\n→ 12", min_size=LONG - 2, max_size=LONG + 2),
)
markers = st.one_of(st.none(), st.none(), st.none(), st.sampled_from(TTLS))


def _marked(block: dict, marker: dict | None) -> dict:
    return block if marker is None else {**block, "cache_control": marker}


@st.composite
def anthropic_turn(draw: st.DrawFn, number: int) -> list[dict]:
    call = f"call-{number}"
    calls = [{"type": "text", "text": draw(texts)}, _marked(_use(call), draw(markers))]
    nested = [
        _marked({"type": "text", "text": draw(texts)}, draw(markers)),
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 3000}},
    ]
    result = {"type": "tool_result", "tool_use_id": call, "is_error": draw(st.booleans())}
    answer = [_marked({**result, "content": draw(st.one_of(texts, st.just(nested)))}, draw(markers))]
    if draw(st.booleans()):
        answer.append(_marked({"type": "text", "text": draw(texts)}, draw(markers)))
    return [{"role": "assistant", "content": calls}, {"role": "user", "content": answer}]


@st.composite
def openai_turn(draw: st.DrawFn, number: int) -> list[dict]:
    call = f"call-{number}"
    function = {"name": "run", "arguments": draw(texts)}
    parts = [_marked({"type": "text", "text": draw(texts)}, draw(markers))]
    return [
        {"role": "assistant", "content": draw(texts), "tool_calls": [_call(call, function)]},
        {"role": "tool", "tool_call_id": call, "content": draw(st.one_of(texts, st.just(parts)))},
    ]


def chats(turn=anthropic_turn, max_turns: int = 16) -> st.SearchStrategy[list[dict]]:
    """Chats of 1 to 2 * max_turns + 1 messages."""
    return st.integers(0, max_turns).flatmap(
        lambda count: st.tuples(texts, *(turn(number) for number in range(count))).map(
            lambda parts: [{"role": "user", "content": parts[0]}, *(m for turn in parts[1:] for m in turn)]
        )
    )


def _use(call: str) -> dict:
    return {"type": "tool_use", "id": call, "name": "run", "input": {"text": output(6)}}


def _call(call: str, function: dict) -> dict:
    return {"id": call, "type": "function", "function": function}


def chat(turns: int, *, seed: int = 0, lines: int = 60, ttl: str | None = "5m") -> list[dict]:
    """One chat without chance: `turns` tool calls with results of so many lines. Its last message is marked,
    unless `ttl` is None."""
    messages = [{"role": "user", "content": f"Task {seed}"}]
    for number in range(turns):
        make = numbered if number % 2 else output
        text = make(lines, number + seed)
        result = {"type": "tool_result", "tool_use_id": f"call-{number}", "content": text}
        messages += [
            {"role": "assistant", "content": [_use(f"call-{number}")]},
            {"role": "user", "content": [result]},
        ]
    if ttl is not None:
        last = messages[-1]["content"]
        blocks = [{"type": "text", "text": last}] if isinstance(last, str) else last
        marked = {**blocks[-1], "cache_control": {"type": "ephemeral", "ttl": ttl}}
        messages[-1] = {**messages[-1], "content": [*blocks[:-1], marked]}
    return messages
