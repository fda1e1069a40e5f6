"""What may be asked of one turn besides its message, in the fields of either API."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class TurnOptions:
    """None: the server's default. extra: further fields of the request's body, as they are."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def with_seed(self, seed: int) -> TurnOptions:
        """The same with a seed."""
        return replace(self, seed=seed)

    def chat_fields(self) -> dict[str, Any]:
        """Those of Chat Completions."""
        fields = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "tool_choice": self.tool_choice,
            "response_format": self.response_format,
        }
        return {name: value for name, value in fields.items() if value is not None}

    def response_fields(self) -> dict[str, Any]:
        """Those of the Responses API, where a named function and a schema stand one level higher."""
        fields: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_output_tokens": self.max_tokens,
            "seed": self.seed,
        }
        choice = self.tool_choice
        if isinstance(choice, dict) and isinstance(choice.get("function"), dict):
            choice = {"type": "function", "name": choice["function"].get("name")}
        fields["tool_choice"] = choice
        if self.response_format is not None:
            form = dict(self.response_format)
            schema = form.pop("json_schema", None)
            fields["text"] = {"format": {**form, **(schema or {})}}
        return {name: value for name, value in fields.items() if value is not None}
