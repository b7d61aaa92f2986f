"""JSON schemas as clients send them, each bounded, so that random text comes to an end."""

Schema = dict[str, object]


def closed(properties: dict[str, object], *, optional: tuple[str, ...] = (), **more: object) -> Schema:
    """An object with these properties and no others."""
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        **more,
    }


WORD = {"type": "string", "maxLength": 8}
SCHEMAS: dict[str, Schema] = {
    "string": {"type": "string", "maxLength": 12},
    "string of a length": {"type": "string", "minLength": 3, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "date and time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "enum of strings": {"enum": ["red", "green", "blue"]},
    "enum of kinds": {"enum": [1, "one", None, True, 1.5]},
    "const": {"const": {"fixed": [1, 2]}},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "integer in a range": {"type": "integer", "minimum": -5, "maximum": 120},
    "integer above": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9999},
    "number in a range": {"type": "number", "minimum": 0, "maximum": 1},
    "multiple": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    "two types": {"type": ["boolean", "null"]},
    "any of": {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 9}]},
    "one of apart": {"oneOf": [{"type": "boolean"}, {"type": "null"}]},
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 7}]},
    "array": {"type": "array", "items": {"type": "boolean"}, "maxItems": 4},
    "array of a length": {"type": "array", "items": WORD, "minItems": 2, "maxItems": 2},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"type": "null"}],
        "items": False,
        "minItems": 2,
    },
    "array of arrays": {
        "type": "array",
        "maxItems": 2,
        "items": {"type": "array", "items": {"enum": [0, 1]}, "maxItems": 3},
    },
    "empty object": closed({}),
    "object": closed({"name": WORD, "age": {"type": "integer", "minimum": 0, "maximum": 150}}),
    "optional": closed({"name": WORD, "nick": WORD}, optional=("nick",)),
    "all optional": closed({"a": {"type": "boolean"}, "b": {"type": "null"}}, optional=("a", "b")),
    "nested": closed({"outer": closed({"inner": closed({"leaf": {"type": "boolean"}})})}),
    "definitions": closed(
        {"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}},
        **{"$defs": {"point": closed({"x": {"enum": [0, 1]}, "y": {"enum": [0, 1]}})}},
    ),
    "recursion": {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": closed(
                {"leaf": {"type": "boolean"}, "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}}
            )
        },
    },
    "map": {
        "type": "object",
        "patternProperties": {"^k[0-9]$": {"type": "boolean"}},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 3,
    },
    "titles and notes": closed(
        {"a": {"type": "boolean", "title": "A", "description": "yes", "default": True}}
    ),
    "unicode": closed({"größe": {"enum": ["klein", "groß", "🙂"]}}),
    "quotes in names": closed({'a "b" \\ c': {"type": "boolean"}}),
    "list of records": {
        "type": "array",
        "minItems": 1,
        "maxItems": 2,
        "items": closed(
            {"id": {"type": "integer", "minimum": 0, "maximum": 99}, "tag": {"enum": ["x", "y"]}}
        ),
    },
    "choice of records": {
        "anyOf": [
            closed({"kind": {"const": "circle"}, "r": {"type": "integer", "minimum": 1, "maximum": 9}}),
            closed({"kind": {"const": "square"}, "side": {"type": "integer", "minimum": 1, "maximum": 9}}),
        ]
    },
    "nullable": closed({"when": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]}}),
    "event": closed(
        {
            "title": WORD,
            "day": {"type": "string", "format": "date"},
            "guests": {"type": "array", "items": WORD, "maxItems": 2},
            "public": {"type": "boolean"},
        }
    ),
    "steps of a proof": closed(
        {
            "steps": {
                "type": "array",
                "maxItems": 2,
                "items": closed({"explanation": WORD, "output": WORD}),
            },
            "final_answer": WORD,
        }
    ),
    "tool call": closed(
        {"tool": {"enum": ["read", "write"]}, "path": {"type": "string", "pattern": "^/[a-z]{1,6}$"}}
    ),
}
UNSUPPORTED: dict[str, Schema] = {
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "string"}, "then": {"maxLength": 3}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": {"type": "null"}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "look-around": {"type": "string", "pattern": "(?=a)b"},
    "Unknown format": {"type": "string", "format": "mood"},
    "does not exist": {"$ref": "#/$defs/missing"},
    "retrieving": {"$ref": "https://example.com/schema.json"},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "Invalid type": {"type": "strin"},
    "no answer": {"$ref": "#"},
    "minLength": {"type": "string", "minLength": 5, "maxLength": 3},
}
