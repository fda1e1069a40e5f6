"""GET /openapi.json and /docs: the API described by the routes that exist and the structs that parse their bodies.

Nothing is written down twice: summaries are the handlers' own docstrings, fields are those of the structs. The page
loads nothing from anywhere.
"""

from __future__ import annotations

import html
import inspect
import re
from collections.abc import Iterator
from typing import Any

import msgspec
from aiohttp import web

import turnkeep
from turnkeep.server.chat_completions import ChatCompletionRequest
from turnkeep.server.completions import CompletionRequest
from turnkeep.server.conversations_api import AppendItems, CreateConversation, UpdateConversation
from turnkeep.server.http_guard import OPEN_PATHS, json_response
from turnkeep.server.messages_api.shapes import CountTokensRequest, MessagesRequest
from turnkeep.server.responses.shapes import CompactRequest, ResponsesRequest
from turnkeep.server.tokenize_endpoint import DetokenizeRequest, TokenizeRequest

BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/chat/completions/render": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/responses/input_tokens": ResponsesRequest,
    "/v1/responses/compact": CompactRequest,
    "/v1/conversations": CreateConversation,
    "/v1/conversations/{id}": UpdateConversation,
    "/v1/conversations/{id}/items": AppendItems,
    "/tokenize": TokenizeRequest,
    "/v1/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/detokenize": DetokenizeRequest,
}
STREAMED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})
TEXTS = {"/metrics": "text/plain", "/docs": "text/html"}

REF = "#/components/schemas/{name}"
_nullable = {"type": ["string", "null"]}
ERRORS: dict[str, dict[str, Any]] = {
    "Error": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"}, "type": {"type": "string"}, "param": _nullable, "code": _nullable
                },
            }
        },
    },
    "MessagesError": {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "request_id": {"type": "string"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            },
        },
    },
}  # fmt: skip


def build_document(app: web.Application, *, has_keys: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 document of an application whose routes are all added."""
    used = tuple(dict.fromkeys(BODIES.values()))
    schemas, components = msgspec.json.schema_components(used, ref_template=REF)
    refs = dict(zip(used, schemas, strict=True))
    for shape in used:
        _put_own_fields_first(shape, components[shape.__name__])
    paths: dict[str, dict[str, Any]] = {}
    for method, path, summary in _routes(app):
        body = refs[BODIES[path]] if method == "post" and path in BODIES else None
        paths.setdefault(path, {})[method] = _operation(method, path, summary, body, has_keys=has_keys)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Turnkeep", "version": turnkeep.__version__},
        "paths": paths,
        "components": {"schemas": {**components, **ERRORS}},
    }
    if has_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def _put_own_fields_first(shape: type, schema: dict[str, Any]) -> None:
    """What must be given, a shape's own fields, those that it shares with others: the order of a reader's interest."""
    fields: dict[str, Any] = schema["properties"]
    own = [name for one in shape.__mro__ for name in vars(one).get("__annotations__", ()) if name in fields]
    schema["properties"] = {name: fields[name] for name in (*schema.get("required", ()), *own, *fields)}


def _routes(app: web.Application) -> Iterator[tuple[str, str, str]]:
    """(method, path, summary) of every route; HEAD goes without saying."""
    for route in app.router.routes():
        is_page = route.resource is not None and route.resource.canonical.startswith("/ui")
        if route.resource is not None and route.method not in ("HEAD", "*") and not is_page:
            yield route.method.lower(), route.resource.canonical, _summary(route.handler)


def _summary(handler: Any) -> str:
    """The first line of a handler's docstring, or its name where that says everything."""
    words = inspect.getdoc(handler)
    if words:
        return words.partition("\n")[0]
    owner, _, name = handler.__qualname__.rpartition(".")
    return f"{owner.removesuffix('Endpoint').removesuffix('Endpoints')}: {name.replace('_', ' ')}"


def _operation(method: str, path: str, summary: str, body: Any, *, has_keys: bool) -> dict[str, Any]:
    answer: dict[str, Any] = {TEXTS[path]: {}} if path in TEXTS else {"application/json": {"schema": {}}}
    if method == "post" and path in STREAMED:
        answer["text/event-stream"] = {"schema": {"type": "string"}}
    name = "MessagesError" if path.startswith("/v1/messages") else "Error"
    error = {"application/json": {"schema": {"$ref": REF.format(name=name)}}}
    operation: dict[str, Any] = {
        "summary": summary,
        "operationId": f"{method}{re.sub('[^a-zA-Z0-9]+', '_', path)}",
        "responses": {
            "200": {"description": "The answer", "content": answer},
            "default": {"description": "Why there is none", "content": error},
        },
    }
    parameters = re.findall(r"{(\w+)}", path)
    if parameters:
        operation["parameters"] = [
            {"name": one, "in": "path", "required": True, "schema": {"type": "string"}} for one in parameters
        ]
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    if has_keys and path not in OPEN_PATHS:
        operation["security"] = [{"key": []}]
    return operation


STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "h2{font:600 1rem/1.5 ui-monospace,monospace;margin:2rem 0 0}table{border-collapse:collapse;font-size:.9rem}"
    "td{padding:.15rem 1.5rem .15rem 0;vertical-align:top}code{font-family:ui-monospace,monospace}p{margin:.3rem 0}"
    "body{color:#222;background:#fff}@media(prefers-color-scheme:dark){body{color:#ddd;background:#16181c}a{color:#8ab4f8}}"
)
HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}


def render_page(document: dict[str, Any]) -> str:
    """The document as one page for people."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>Turnkeep API</title><style>{STYLE}</style><h1>Turnkeep API</h1>",
        f"<p>Version {html.escape(document['info']['version'])}. The same for programs: ",
        "<a href=openapi.json>openapi.json</a>.</p>",
    ]
    components = document["components"]["schemas"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2>{method.upper()} {html.escape(path)}</h2><p>{html.escape(operation['summary'])}</p>")
            if "requestBody" in operation:
                ref = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                parts.append(_fields_table(components[ref.rpartition("/")[2]]))
    return "".join(parts)


def _fields_table(schema: dict[str, Any]) -> str:
    required = set(schema.get("required", ()))
    rows = [
        f"<tr><td><code>{html.escape(name)}</code><td>{html.escape(type_text(field))}"
        f"<td>{'required' if name in required else ''}"
        for name, field in schema.get("properties", {}).items()
    ]
    return f"<table>{''.join(rows)}</table>"


def type_text(field: dict[str, Any]) -> str:
    if "$ref" in field:
        return str(field["$ref"].rpartition("/")[2])
    if "anyOf" in field:
        return " or ".join(type_text(one) for one in field["anyOf"] if one.get("type") != "null")
    if "enum" in field:
        return " or ".join(str(value) for value in field["enum"] if value is not None)
    if field.get("type") == "array":
        return f"list of {type_text(field.get('items', {}))}"
    return str(field.get("type", "anything"))


def add_documentation(app: web.Application, *, has_keys: bool) -> None:
    """The two routes. They describe what the application has when they are asked for the first time."""
    made: list[dict[str, Any]] = []

    def document() -> dict[str, Any]:
        if not made:
            made.append(build_document(app, has_keys=has_keys))
        return made[0]

    async def openapi(request: web.Request) -> web.Response:
        """This API as an OpenAPI document."""
        return json_response(document())

    async def docs(request: web.Request) -> web.Response:
        """This API as a page for people."""
        return web.Response(text=render_page(document()), content_type="text/html", headers=HEADERS)

    app.router.add_get("/openapi.json", openapi)
    app.router.add_get("/docs", docs)
