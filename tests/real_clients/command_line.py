"""Clients that are programs of their own: how they are installed, configured and told what to do.

Each is given a folder of its own as home and working folder; nothing of the user's is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

OFFLINE = {
    "CI": "1", "DISABLE_AUTOUPDATER": "1", "DISABLE_TELEMETRY": "1", "DISABLE_ERROR_REPORTING": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1", "NO_COLOR": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
}  # fmt: skip


@dataclass(frozen=True)
class CommandLine:
    """package: its npm package. tool: what it calls its shell. first and following: the arguments for a turn."""

    package: str
    program: str
    tool: str
    first: Callable[[str], list[str]]
    following: Callable[[str], list[str]]
    configure: Callable[[Path, str], Mapping[str, str]]


def _codex(home: Path, url: str) -> Mapping[str, str]:
    folder = home / ".codex"
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(
        'model = "scripted"\nmodel_provider = "local"\napproval_policy = "never"\nsandbox_mode = "danger-full-access"\n'
        f'[model_providers.local]\nname = "local"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
        'env_key = "LOCAL_KEY"\n'
        "request_max_retries = 3\nstream_max_retries = 3\n"
    )
    return {"CODEX_HOME": str(folder), "LOCAL_KEY": "none"}


def _claude(home: Path, url: str) -> Mapping[str, str]:
    return {
        "ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": "scripted",
        "ANTHROPIC_SMALL_FAST_MODEL": "scripted", "CLAUDE_CONFIG_DIR": str(home / ".claude"),
    }  # fmt: skip


def _opencode(home: Path, url: str) -> Mapping[str, str]:
    options = {"baseURL": f"{url}/v1", "apiKey": "none"}
    models = {"scripted": {"name": "scripted", "limit": {"context": 200_000, "output": 4096}}}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "local", "options": options, "models": models}
    (home / "opencode.json").write_text(
        json.dumps(
            {"provider": {"local": provider}, "model": "local/scripted", "autoupdate": False, "share": "disabled"}
        )
    )
    return {}


def _qwen(home: Path, url: str) -> Mapping[str, str]:
    return {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "scripted"}


def _qwen_arguments(message: str) -> list[str]:
    return ["--auth-type", "openai", "-y", "-p", message]


COMMAND_LINES: dict[str, CommandLine] = {
    "codex": CommandLine(
        "@openai/codex", "codex", "exec_command",
        lambda message: ["exec", "--skip-git-repo-check", message],
        lambda message: ["exec", "--skip-git-repo-check", "resume", "--last", message],
        _codex,
    ),
    "claude_code": CommandLine(
        "@anthropic-ai/claude-code", "claude", "Bash",
        lambda message: ["-p", message, "--allowedTools", "Bash"],
        lambda message: ["--continue", "-p", message, "--allowedTools", "Bash"],
        _claude,
    ),
    "opencode": CommandLine(
        "opencode-ai", "opencode", "bash",
        lambda message: ["run", message],
        lambda message: ["run", "-c", message],
        _opencode,
    ),
    "qwen_code": CommandLine(
        "@qwen-code/qwen-code", "qwen", "run_shell_command", _qwen_arguments,
        lambda message: ["-c", *_qwen_arguments(message)],
        _qwen,
    ),
}  # fmt: skip
