"""Models of the Hugging Face hub: an id becomes a folder of this machine. Torch-free.

The only module that may use the network, and only when the caller was told so: `catalog.py` never comes here.
"""

from __future__ import annotations

import re
from pathlib import Path

from turnkeep.models.catalog import ModelNotFound

HUB_INSTALL = "pip install 'turnkeep[hub]'"
# No pickled weights and no code are fetched.
FILES = ("*.json", "*.safetensors", "*.jinja")
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(name: str) -> bool:
    """Whether `name` can only be an id of the hub: "owner/model", and nothing of that name lies here."""
    return _ID.fullmatch(name) is not None and not Path(name).exists()


def fetch_model(name: str) -> Path:
    """The folder with the files of the hub's model `name`, downloaded unless they lie in the hub's cache already.

    Raises ModelNotFound when huggingface_hub is not installed or the model cannot be had.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ModelNotFound(
            f"{name!r} is an id of the Hugging Face hub: fetching it needs the package huggingface_hub: {HUB_INSTALL}"
        ) from None
    try:
        folder = Path(snapshot_download(name, allow_patterns=list(FILES)))
    except (OSError, ValueError) as error:  # what the package raises for the network, for access and for bad ids
        raise ModelNotFound(f"the hub's model {name!r} cannot be had: {error}") from error
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"the hub's model {name!r} has no config.json")
    return folder
