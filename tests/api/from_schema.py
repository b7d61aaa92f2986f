"""Bodies of requests from /openapi.json, for fuzzing: right ones, ones with a wrong place in them, and bytes
that are no JSON.
"""

import json
import math
from collections.abc import Set
from typing import Any

from hypothesis import strategies as st

MOST_OPTIONAL, DEEPEST = 6, 6  # optional fields given at once, levels of what is any JSON value
GOOD, ODD = ["x", "Hello there"], ["", "a\nb\x00", "Grüße \U0001f600", "\ud800", "<|im_end|>", "f" * 300]
TEXTS = st.sampled_from(GOOD * 12 + ODD)
NUMBERS = st.sampled_from(
    [0, 1, -1, 2, 7, 0.5, -0.0, 1e308, 2**31, 2**63 - 1, 2**63, -(2**63), 2**70, 10**30]
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
ANY = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=DEEPEST,
)
RARELY = st.integers(0, 4)  # False in one of five
RAW = st.one_of(
    st.sampled_from([b"", b"{", b"null", b"[]", b"\xff\xfe", b'{"a":1}' * 2, b"[" * 5000, b'{"model": NaN}']),
    st.binary(max_size=40),
)


class Bodies:
    """Bodies by the schemas of one document. known: values for fields by their names, so that more than the
    checks of the fields is reached. always: fields that are given wherever there are such."""

    def __init__(
        self, document: dict[str, Any], known: dict[str, st.SearchStrategy[Any]], always: Set[str]
    ) -> None:
        self._document = document
        self._known = known
        self._always = always

    def of(self, schema: dict[str, Any]) -> st.SearchStrategy[bytes]:
        """Return the bodies for one schema: most of them right, some with one wrong place, some no JSON."""

        @st.composite
        def bodies(draw: st.DrawFn) -> bytes:
            kind = draw(st.integers(0, 9))
            if kind == 0:
                return draw(RAW)
            body = self._value(draw, schema, 0)
            if kind > 6:
                body = _spoiled(draw, body, often=20)
            return json.dumps(body).encode()

        return bodies()

    def _value(self, draw: st.DrawFn, schema: dict[str, Any], depth: int) -> Any:
        while "$ref" in schema:
            schema = self._at(schema["$ref"])
        if "anyOf" in schema:
            kinds = [kind for kind in schema["anyOf"] if kind.get("type") != "null" or not draw(RARELY)]
            return self._value(draw, draw(st.sampled_from(kinds)), depth)
        if "enum" in schema:
            return draw(st.sampled_from(schema["enum"]))
        if "const" in schema:
            return schema["const"]
        match schema.get("type"):
            case "object":
                return self._object(draw, schema, depth)
            case "array":
                low = schema.get("minItems", 0)
                n = draw(
                    st.integers(low, min(schema.get("maxItems", 3), low + 3 if depth < DEEPEST else low))
                )
                return [self._value(draw, schema.get("items", {}), depth + 1) for _ in range(n)]
            case "string":
                return draw(TEXTS.filter(lambda text: len(text) >= schema.get("minLength", 0)))
            case "integer":
                return draw(_bounded(schema, st.integers))
            case "number":
                return draw(_bounded(schema, st.floats))
            case "boolean":
                return draw(st.booleans())
            case "null":
                return None
        return draw(ANY)

    def _object(self, draw: st.DrawFn, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        fields = schema.get("properties", {})
        required = schema.get("required", [])
        optional = sorted(set(fields) - {*required, *self._always})
        names = sorted({*required, *(self._always & fields.keys())})
        if optional and depth < DEEPEST:
            names += draw(st.lists(st.sampled_from(optional), max_size=MOST_OPTIONAL, unique=True))
        made = {}
        for name in names:
            known = self._known.get(name)
            made[name] = self._value(draw, fields[name], depth + 1) if known is None else draw(known)
        more = schema.get("additionalProperties")
        if not fields and isinstance(more, dict):
            for key in draw(st.lists(TEXTS | st.sampled_from(["5", "-1", "10000"]), max_size=2)):
                made[key] = self._value(draw, more, depth + 1)
        return made

    def _at(self, reference: str) -> dict[str, Any]:
        found: Any = self._document
        for name in reference.removeprefix("#/").split("/"):
            found = found[name]
        return found


def _bounded(schema: dict[str, Any], kind: Any) -> st.SearchStrategy[Any]:
    low = schema.get("minimum", schema.get("exclusiveMinimum", -3))
    high = schema.get("maximum", schema.get("exclusiveMaximum", low + 40))
    if kind is st.integers:
        return st.sampled_from([low, high]) | st.integers(low, high)
    above = "exclusiveMinimum" in schema
    edges = st.sampled_from([math.nextafter(low, high) if above else low, high])
    return edges | st.floats(low, high, exclude_min=above)


def _spoiled(draw: st.DrawFn, body: Any, often: int = 3) -> Any:
    """Return `body` with something else at one place, or without that place; in one of `often` all of it."""
    if not isinstance(body, dict | list) or not body or draw(st.integers(0, often)) == 0:
        return draw(ANY)
    if isinstance(body, dict):
        name = draw(st.sampled_from(sorted(body)))
        if draw(st.integers(0, 4)) == 0:
            return {key: value for key, value in body.items() if key != name}
        return {**body, name: _spoiled(draw, body[name])}
    place = draw(st.integers(0, len(body) - 1))
    return [*body[:place], _spoiled(draw, body[place]), *body[place + 1 :]]
