"""The table of all routes and of the fields that their bodies take, written from the OpenAPI document itself.

curl -s http://127.0.0.1:8000/openapi.json | python -m turnkeep.server.api_reference > docs/api-fields.md
"""

from __future__ import annotations

import json
import sys
from typing import Any

from turnkeep.server.openapi import type_text

HEAD = """\
# Routes and fields

What a server of this version answers, and every field that a body may have. Fields that are not listed are ignored, so
that newer clients work; what is listed and cannot be done is a 400 that names it. [api.md](api.md) has the fine print.

## Routes

| route | what it does |
| --- | --- |
"""


def api_reference(document: dict[str, Any]) -> str:
    """Markdown, from an OpenAPI document."""
    routes: list[str] = []
    fields: list[str] = []
    described: set[str] = set()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            routes.append(f"| `{method.upper()} {path}` | {_cell(operation.get('summary', ''))} |")
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            name = body.get("$ref", "").rpartition("/")[2]
            if name and name not in described:
                described.add(name)
                fields.append(_fields(f"{method.upper()} {path}", document["components"]["schemas"][name]))
    return HEAD + "\n".join(routes) + "\n" + "".join(fields)


def _fields(title: str, schema: dict[str, Any]) -> str:
    required = set(schema.get("required", ()))
    rows = [
        f"| `{name}`{' (required)' if name in required else ''} | {_cell(type_text(value))} |"
        for name, value in schema.get("properties", {}).items()
    ]
    return f"\n## `{title}`\n\n| field | what it is |\n| --- | --- |\n" + "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> None:
    print(api_reference(json.load(sys.stdin)), end="")


if __name__ == "__main__":
    main()
