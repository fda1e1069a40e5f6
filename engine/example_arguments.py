"""Arguments that a tool's JSON schema accepts: what the scripted engine calls tools with.

Covers what tool schemas are made of (types, required, enum, const, bounds, $ref, anyOf, allOf); where a schema asks
for more, such as a pattern, its `default` or `examples` are the way to say what fits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 16
FORMATS = {
    "date": "2026-01-31",
    "date-time": "2026-01-31T12:00:00Z",
    "time": "12:00:00Z",
    "email": "someone@example.org",
    "uri": "https://example.org/",
    "url": "https://example.org/",
    "uuid": "00000000-0000-4000-8000-000000000000",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "hostname": "example.org",
}


def example_arguments(schema: object) -> dict[str, Any]:
    """An object for the parameters of a tool; empty where the schema asks for nothing."""
    value = _example(schema, schema, 0)
    return value if isinstance(value, dict) else {}


def _example(schema: object, root: object, depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return {} if depth == 0 else "text"
    schema = _resolved(schema, root)
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    for key in ("enum", "examples"):
        if isinstance(schema.get(key), list) and schema[key]:
            return schema[key][0]
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and schema[key]:
            rest = {name: value for name, value in schema.items() if name != key}
            return _example(_merged(rest, _resolved(schema[key][0], root)), root, depth + 1)
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((one for one in kind if one != "null"), "null")
    if kind is None:
        kind = "object" if depth == 0 or "properties" in schema else "array" if "items" in schema else "string"
    if kind == "object":
        return _object(schema, root, depth)
    if kind == "array":
        return [_example(schema.get("items", {}), root, depth + 1) for _ in range(_count(schema, "minItems"))]
    if kind == "string":
        return _string(schema)
    if kind in ("integer", "number"):
        return _number(schema, whole=kind == "integer")
    return True if kind == "boolean" else None


def _resolved(schema: object, root: object) -> dict[str, Any]:
    """The schema with its $ref (within the same document) and its allOf taken in."""
    result = dict(schema) if isinstance(schema, Mapping) else {}
    for _ in range(MAX_DEPTH):
        reference, parts = result.pop("$ref", None), result.pop("allOf", None)
        if not isinstance(reference, str) and not isinstance(parts, list):
            break
        if isinstance(reference, str):
            result = _merged(_lookup(root, reference), result)
        for part in parts if isinstance(parts, list) else ():
            result = _merged(result, part)
    return result


def _lookup(root: object, reference: str) -> object:
    value = root
    for key in reference.removeprefix("#").split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _merged(first: object, second: object) -> dict[str, Any]:
    result = dict(first) if isinstance(first, Mapping) else {}
    for key, value in second.items() if isinstance(second, Mapping) else ():
        known = result.get(key)
        if key == "properties" and isinstance(known, Mapping) and isinstance(value, Mapping):
            result[key] = {**known, **value}
        elif key == "required" and isinstance(known, list) and isinstance(value, list):
            result[key] = list(dict.fromkeys([*known, *value]))
        else:
            result[key] = value
    return result


def _object(schema: Mapping[str, Any], root: object, depth: int) -> dict[str, Any]:
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = schema.get("required")
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    return {name: _example(properties.get(name, {}), root, depth + 1) for name in names}


def _count(schema: Mapping[str, Any], key: str) -> int:
    value = schema.get(key)
    return min(max(value, 0), 64) if isinstance(value, int) and not isinstance(value, bool) else 0


def _string(schema: Mapping[str, Any]) -> str:
    text = FORMATS.get(str(schema.get("format")), "text")
    minimum, maximum = schema.get("minLength"), schema.get("maxLength")
    if isinstance(minimum, int) and len(text) < minimum:
        text = text.ljust(min(minimum, 1024), "x")
    return text[:maximum] if isinstance(maximum, int) else text


def _number(schema: Mapping[str, Any], *, whole: bool) -> int | float:
    """The smallest number at or above 1 (or above the minimum) that the bounds and the step allow."""
    step = schema.get("multipleOf")
    step = step if isinstance(step, int | float) and step > 0 else 1 if whole else None
    low = schema.get("minimum")
    above = schema.get("exclusiveMinimum")
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    value: int | float = 1
    if isinstance(low, int | float):
        value = max(value, low)
    if isinstance(above, int | float) and not isinstance(above, bool) and value <= above:
        value = above + (step or 1)
    if isinstance(high, int | float) and value >= high:
        value = low if isinstance(low, int | float) else high - (step or 1)
    if step is not None:
        value = math.ceil(value / step) * step
    return int(value) if whole else value
