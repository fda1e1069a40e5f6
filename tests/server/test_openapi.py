"""The API's description: complete, closed in itself, and what the server really takes."""

from __future__ import annotations

import html.parser
from typing import Any

from live_server import LiveServer, live_server, saying

from turnkeep.server.openapi import BODIES
from turnkeep.server.text_model import TextModel


async def document_of(server: LiveServer) -> dict[str, Any]:
    status, document = await server.get("/openapi.json")
    assert status == 200
    assert isinstance(document, dict)
    return document


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*(references(item) for item in value.values()))
    if isinstance(value, list):
        return set().union(*(references(item) for item in value))
    return set()


async def test_every_route_is_described_in_words_and_every_reference_resolves(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "x"), text_model=text_model) as server:
        document = await document_of(server)
    for needed in ("/v1/chat/completions", "/v1/messages", "/v1/completions", "/tokenize", "/health", "/docs"):
        assert needed in document["paths"]
    assert set(BODIES) <= set(document["paths"]), "a body is described for a route that does not exist"
    names = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"], f"{method} {path} is not described"
            names.append(operation["operationId"])
            described = {one["name"] for one in operation.get("parameters", ())}
            assert all(f"{{{name}}}" in path for name in described)
            assert len(described) == path.count("{")
    assert len(set(names)) == len(names)
    for reference in references(document):
        name = reference.removeprefix("#/components/schemas/")
        assert name in document["components"]["schemas"]
        assert not name.startswith("turnkeep"), "names are the API's, not the modules'"


async def test_required_fields_are_those_that_the_server_misses(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "x"), text_model=text_model) as server:
        document = await document_of(server)
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens"):
            schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            required = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["required"]
            full: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "prompt": "x"}
            full = {name: value for name, value in {**full, "max_tokens": 9}.items() if name in required}
            assert (await server.post(full, path))[0] == 200
            for name in required:
                status, answer = await server.post({key: full[key] for key in full if key != name}, path)
                assert status == 400
                assert name in answer["error"]["message"]


async def test_keys_guard_the_description_and_are_described(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "x"), text_model=text_model, api_keys=("k",)) as server:
        assert (await server.get("/openapi.json"))[0] == 401
        assert (await server.get("/docs"))[0] == 401
        _, document = await server.get("/openapi.json", {"Authorization": "Bearer k"})
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert document["paths"]["/v1/messages"]["post"]["security"]
    assert "security" not in document["paths"]["/health"]["get"]


class Page(html.parser.HTMLParser):
    """Collects what a page would load, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "img", "iframe", "link")
        self.links += [value for name, value in attrs if name in ("href", "src") and value]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


async def test_the_page_names_every_route_and_loads_nothing(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "x"), text_model=text_model) as server:
        document = await document_of(server)
        async with server.session.get(server.url + "/docs") as response:
            assert response.status == 200
            assert "default-src 'none'" in response.headers["Content-Security-Policy"]
            text = await response.text()
    page = Page()
    page.feed(text)
    assert page.links == ["openapi.json"]
    for path in document["paths"]:
        assert any(path in one for one in page.texts), path
    assert "max_completion_tokens" in page.texts
