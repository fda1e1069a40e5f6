"""What a source of a model can tell, whatever its files are: the interface of Hugging Face folders and GGUF files.

Torch-free. Values are read when they are asked for; weights are not read here.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, Protocol


class ModelFilesError(ValueError):
    """A file of the model is missing, damaged or of an unsupported kind; the message names the file."""


class ModelSource(Protocol):
    """A model on this machine."""

    @property
    def name(self) -> str:
        """The name under which it is served."""

    @property
    def kind(self) -> Literal["hf_folder", "gguf"]:
        """What its files are."""

    @property
    def path(self) -> Path:
        """The folder, or the GGUF file."""

    @property
    def bos_token(self) -> str | None:
        """Text of the token that begins a text."""

    @property
    def eos_token(self) -> str | None:
        """Text of the token that ends an answer."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end generation, without duplicates; usually the id of `eos_token` is among them."""

    def config_dict(self) -> dict[str, Any]:
        """The config in Hugging Face form."""

    def tensor_names(self) -> Collection[str]:
        """Hugging Face names of the weights, without reading them; empty where their files are missing."""

    def generation_config(self) -> dict[str, Any]:
        """Default sampling values (temperature, top_p, ...), empty when the model brings none."""

    def tokenizer_json(self) -> str:
        """Text of a `tokenizer.json`."""

    def chat_template(self, name: str | None = None) -> str | None:
        """The chat template called `name`; without a name the default one. None when there is none."""

    def special_tokens(self) -> dict[str, str]:
        """Named special tokens that chat templates refer to: bos_token, eos_token, ..."""
