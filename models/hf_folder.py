"""A Hugging Face model folder: config.json, tokenizer files, chat template, generation defaults. Torch-free."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from turnkeep.models.model_source import ModelFilesError

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # what the format allows
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class HFFolder:
    """A model folder. Raises ModelFilesError naming the file when one is missing or damaged."""

    kind: Literal["hf_folder"] = "hf_folder"

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path

    def _read_object(self, file_name: str, *, required: bool) -> dict[str, Any]:
        path = self.path / file_name
        if not path.is_file():
            if required:
                raise ModelFilesError(f"{path} is missing")
            return {}
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            raise ModelFilesError(f"{path} cannot be read: {error}") from error
        if not isinstance(value, dict):
            raise ModelFilesError(f"{path} must hold a JSON object")
        return value

    @cached_property
    def _config(self) -> dict[str, Any]:
        return self._read_object("config.json", required=True)

    @cached_property
    def _generation_config(self) -> dict[str, Any]:
        return self._read_object("generation_config.json", required=False)

    @cached_property
    def _tokenizer_config(self) -> dict[str, Any]:
        return self._read_object("tokenizer_config.json", required=False)

    def config_dict(self) -> dict[str, Any]:
        return dict(self._config)

    def tensor_names(self) -> tuple[str, ...]:
        index = self._read_object(INDEX_FILE, required=False)
        if not (self.path / SINGLE_FILE).is_file() and isinstance(index.get("weight_map"), dict):
            return tuple(index["weight_map"])
        return tuple(name for name in self._header(SINGLE_FILE) if name != "__metadata__")

    def _header(self, file_name: str) -> dict[str, Any]:
        """The JSON object in front of a safetensors file, after its length in 8 bytes."""
        path = self.path / file_name
        if not path.is_file():
            return {}
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if length <= MAX_HEADER_BYTES else b""
        try:
            header = json.loads(text)
        except ValueError as error:
            raise ModelFilesError(f"{path} cannot be read as safetensors: {error}") from error
        if not isinstance(header, dict):
            raise ModelFilesError(f"{path} cannot be read as safetensors: its header is no object")
        return header

    def generation_config(self) -> dict[str, Any]:
        return dict(self._generation_config)

    def tokenizer_json(self) -> str:
        path = self.path / "tokenizer.json"
        if not path.is_file():
            raise ModelFilesError(f"{path} is missing: models with a slow tokenizer only are not supported")
        return path.read_text(encoding="utf-8")

    @cached_property
    def _chat_templates(self) -> dict[str, str]:
        templates: dict[str, str] = {}
        declared = self._tokenizer_config.get("chat_template")
        if isinstance(declared, str):
            templates["default"] = declared
        elif isinstance(declared, list):
            try:
                templates |= {entry["name"]: entry["template"] for entry in declared}
            except (TypeError, KeyError) as error:
                path = self.path / "tokenizer_config.json"
                raise ModelFilesError(f"{path}: chat_template must be a text or a list of named templates") from error
        # Template files are the newer layout, and win where a folder has both.
        file = self.path / "chat_template.jinja"
        if file.is_file():
            templates["default"] = file.read_text(encoding="utf-8")
        folder = self.path / "additional_chat_templates"
        templates |= {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}
        return templates

    def chat_template(self, name: str | None = None) -> str | None:
        if name is not None:
            return self._chat_templates.get(name)
        return self._chat_templates.get("default") or next(iter(self._chat_templates.values()), None)

    @cached_property
    def _special_tokens(self) -> dict[str, str]:
        legacy = self._read_object("special_tokens_map.json", required=False)
        tokens = {}
        for name in SPECIAL_TOKEN_NAMES:
            value = self._tokenizer_config.get(name) or legacy.get(name)
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                tokens[name] = content
        return tokens

    def special_tokens(self) -> dict[str, str]:
        return dict(self._special_tokens)

    @property
    def bos_token(self) -> str | None:
        return self._special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self._special_tokens.get("eos_token")

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        declared = self._generation_config.get("eos_token_id")
        if declared is None:
            declared = self._config.get("eos_token_id")
        ids = declared if isinstance(declared, list) else [] if declared is None else [declared]
        if not all(isinstance(token_id, int) for token_id in ids):
            raise ModelFilesError(f"{self.path}: eos_token_id must be an integer or a list of them, not {declared!r}")
        own_id = self._token_id(self.eos_token)
        return tuple(dict.fromkeys([*ids, *([] if own_id is None else [own_id])]))

    def _token_id(self, content: str | None) -> int | None:
        if content is None:
            return None
        try:
            document = json.loads(self.tokenizer_json())
            added = {token["content"]: token["id"] for token in document.get("added_tokens", ())}
            token_id = added.get(content)
            vocab = document["model"].get("vocab")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelFilesError(f"{self.path / 'tokenizer.json'} cannot be read: {error}") from error
        if token_id is None and isinstance(vocab, dict):
            token_id = vocab.get(content)
        return token_id
