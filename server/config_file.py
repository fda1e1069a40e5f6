"""Settings from a TOML or YAML file, as the command-line options that they stand for.

A key is an option without its dashes (`max_running = 8` is `--max-running 8`), tables only group them. So a file can
say what the command line can, is checked by the same rules, and gives way to what the command line says.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


class ConfigFileError(ValueError):
    """The file cannot be read, or holds what no option can; the message is one line."""


def add_config_option(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--config", metavar="FILE", help="TOML or YAML file of settings called like these options; what is given here "
        "goes before what the file says",
    )  # fmt: skip


def parse_with_file(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command's arguments, those of the file that --config names before those given. Raises ConfigFileError."""
    options = parser.parse_args(arguments)
    path = getattr(options, "config", None)
    if path is None:
        return options
    known = _options(parser, arguments[0])
    return parser.parse_args([arguments[0], *config_arguments(path, known), *arguments[1:]])


def config_arguments(path: str, known: Mapping[str, argparse.Action]) -> list[str]:
    """The command-line arguments that a file stands for; known: the command's options. Raises ConfigFileError."""
    found: list[str] = []
    for key, value in _leaves(_load(Path(path)), path):
        action = known.get(f"--{key.replace('_', '-')}")
        if action is None:
            raise ConfigFileError(f"{path}: there is no setting called {key}")
        if isinstance(value, list) and not isinstance(action, argparse._AppendAction):
            raise ConfigFileError(f"{path}: {key} takes one value, not a list")
        found.extend(_arguments(key, value, path))
    return found


def _options(parser: argparse.ArgumentParser, command: str) -> dict[str, argparse.Action]:
    """The options of a command that a file may set."""
    commands = next(action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {
        option: action
        for action in commands[command]._actions
        for option in action.option_strings
        if action.dest != "help"
    }


def _load(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        settings = _parse_yaml(text) if path.suffix in (".yaml", ".yml") else tomllib.loads(text)
    except OSError as error:
        raise ConfigFileError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigFileError(f"{path}: {error}") from error
    if not isinstance(settings, Mapping):
        raise ConfigFileError(f"{path}: settings by name are needed")
    return settings


def _parse_yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise ConfigFileError("YAML files need PyYAML: pip install 'turnkeep[yaml]', or write TOML") from None
    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigFileError(f"not YAML: {error}") from error


def _leaves(settings: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, path)
        elif key == "config":
            raise ConfigFileError(f"{path}: one file cannot name another")
        else:
            yield str(key), value


def _arguments(key: str, value: Any, path: str) -> Iterator[str]:
    option = key.replace("_", "-")
    if isinstance(value, list):
        for item in value:
            if isinstance(item, bool):
                raise ConfigFileError(f"{path}: {key} holds {item}, which is neither a number nor a text")
            yield from _arguments(key, item, path)
    elif isinstance(value, bool):
        yield f"--{option}" if value else f"--no-{option}"
    elif isinstance(value, int | float | str):
        yield f"--{option}={value}"
    else:
        raise ConfigFileError(f"{path}: {key} is neither a number nor a text nor a list of these")
