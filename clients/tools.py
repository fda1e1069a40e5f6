"""Python functions as tools: the schema from their annotations, the check of what a model passes them.

A parameter's description is `Annotated[int, "its description"]` or pydantic's `Field(description=...)`; the tool's is
the first paragraph of the docstring.
"""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_origin

import pydantic
import pydantic_core

from turnkeep.clients.errors import InvalidTool

Function = Callable[..., Any]


class InvalidArguments(Exception):
    """What the model passed does not fit the tool; the message is for the model."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool. function None: the caller runs it itself and submits the results."""

    name: str
    specification: dict[str, Any]
    function: Function | None = None
    arguments: type[pydantic.BaseModel] | None = None

    @classmethod
    def of(cls, tool: Function | Mapping[str, Any]) -> Tool:
        """Raises InvalidTool."""
        if isinstance(tool, Mapping):
            function = tool.get("function")
            if tool.get("type") != "function" or not isinstance(function, Mapping) or not function.get("name"):
                raise InvalidTool(f"a tool is a function or a {{'type': 'function', 'function': ...}}, not {tool!r}")
            return cls(str(function["name"]), dict(tool))
        return _from_function(tool)

    @classmethod
    def wrapping(cls, specification: Mapping[str, Any], function: Function) -> Tool:
        """A function behind a schema that is given, not derived: it gets the arguments as keywords, unchecked.

        Raises InvalidTool.
        """
        tool = cls.of(specification)
        return cls(tool.name, tool.specification, function)

    @property
    def is_async(self) -> bool:
        """Whether the function has to be awaited."""
        return inspect.iscoroutinefunction(self.function)

    def bound(self, arguments_json: str) -> dict[str, Any]:
        """Keyword arguments for the function. Raises InvalidArguments."""
        if self.arguments is None:
            return _json_object(self.name, arguments_json)
        try:
            # An answer without any argument may leave them out altogether.
            values = self.arguments.model_validate_json(arguments_json or "{}")
        except pydantic.ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, problem['loc'])) or 'arguments'}: {problem['msg']}" for problem in error.errors()
            )
            raise InvalidArguments(f"invalid arguments for {self.name}: {problems}") from None
        return {_parameter(field): getattr(values, field) for field in type(values).model_fields}


# Fields get names of their own: a parameter may be called like an attribute of pydantic's models, or `_private`.
_FIELD = "argument_"

# A function, or the specification of a tool that the caller runs itself.
Toolish = Function | Mapping[str, Any] | Tool


class ToolSet:
    """The tools of a conversation, in a fixed order: they stand at the start of every prompt."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}

    @classmethod
    def of(cls, tools: ToolSet | Iterable[Toolish] | None) -> ToolSet:
        """Raises InvalidTool, also for two tools of one name."""
        if isinstance(tools, ToolSet):
            return tools
        made = [tool if isinstance(tool, Tool) else Tool.of(tool) for tool in tools or ()]
        names = [tool.name for tool in made]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InvalidTool(f"more than one tool is called {', '.join(twice)}")
        return cls(made)

    def specifications(self) -> list[dict[str, Any]]:
        """As Chat Completions wants them."""
        return [tool.specification for tool in self._tools.values()]

    def find(self, name: str) -> Tool | None:
        """The tool of this name."""
        return self._tools.get(name)

    @property
    def names(self) -> Sequence[str]:
        return list(self._tools)


def output_text(value: Any) -> str:
    """What a tool returned, for the model: text as it is, anything else as JSON."""
    if isinstance(value, str):
        return value
    try:
        return pydantic_core.to_json(value).decode()
    except pydantic_core.PydanticSerializationError:
        return str(value)


def _json_object(name: str, arguments_json: str) -> dict[str, Any]:
    try:
        arguments = json.loads(arguments_json or "{}")
    except ValueError as error:
        raise InvalidArguments(f"invalid arguments for {name}: {error}") from None
    if not isinstance(arguments, dict):
        raise InvalidArguments(f"invalid arguments for {name}: not a JSON object")
    return arguments


def _from_function(function: Function) -> Tool:
    name = getattr(function, "__name__", "")
    if not callable(function) or not name.isidentifier():
        raise InvalidTool(f"a tool needs a name of its own: {function!r}")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise InvalidTool(f"{name}: {error}") from None
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise InvalidTool(f"{name}: parameter {parameter.name} must be one that can be passed by name")
        if parameter.name not in hints:
            raise InvalidTool(f"{name}: parameter {parameter.name} has no annotation")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[_FIELD + parameter.name] = (_described(hints[parameter.name]), default)
    try:
        model = pydantic.create_model(name, __config__=_CONFIG, **fields)
        schema = model.model_json_schema()
    except (pydantic.PydanticUserError, pydantic_core.SchemaError, NameError, TypeError) as error:
        raise InvalidTool(f"{name}: {error}") from None
    _drop_titles(schema)
    description = inspect.cleandoc(function.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    specification = {"name": name, "description": description, "parameters": schema}
    return Tool(name, {"type": "function", "function": specification}, function, model)


def _parameter(field: str) -> str:
    """The name of the parameter that a field stands for."""
    return field.removeprefix(_FIELD)


_CONFIG = pydantic.ConfigDict(extra="forbid", alias_generator=_parameter)


def _described(hint: Any) -> Any:
    """Annotated[T, "text"] with the text as the field's description."""
    if get_origin(hint) is not Annotated:
        return hint
    kind, *notes = typing.get_args(hint)
    texts = [note for note in notes if isinstance(note, str)]
    others = [note for note in notes if not isinstance(note, str)]
    if texts:
        others.append(pydantic.Field(description=texts[0]))
    described = kind
    for note in others:
        described = Annotated[described, note]
    return described


def _drop_titles(schema: Any) -> None:
    """Titles repeat the names: tokens of every prompt for nothing."""
    if isinstance(schema, dict):
        if isinstance(schema.get("title"), str):
            del schema["title"]
        for name, value in schema.items():
            if name in ("properties", "$defs"):
                for inner in value.values():
                    _drop_titles(inner)
            elif name not in ("default", "const", "enum", "examples"):
                _drop_titles(value)
    elif isinstance(schema, list):
        for value in schema:
            _drop_titles(value)
