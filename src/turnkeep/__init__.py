"""Turnkeep: OpenAI-compatible serving of hybrid language models, where a returning turn costs its new tokens.

The code lives in the top-level folders of the repository; this package reaches them through relative links.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnkeep.clients.client import AsyncTurnkeep as AsyncTurnkeep
    from turnkeep.clients.client import Turnkeep as Turnkeep
    from turnkeep.server.llm import LLM as LLM

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncTurnkeep", "Turnkeep", "__version__"]

ROOMS = ("cache", "clients", "engine", "kernels", "models", "scheduler", "server")


def _check_links() -> None:
    """Fail with the reason when an archive or a checkout without symbolic links lost the code.

    Raises ImportError naming the missing rooms: without this, the first import of a room fails in a way that
    says nothing about its cause.
    """
    here = Path(__file__).parent
    missing = [room for room in ROOMS if not (here / room).is_dir()]
    if missing:
        raise ImportError(
            f"turnkeep is incomplete: {', '.join(missing)} not found next to {__file__}. The source tree uses "
            "relative symbolic links in src/turnkeep; a zip archive or a checkout with core.symlinks=false loses "
            "them. Clone with git (git config core.symlinks true) or install a wheel."
        )


_check_links()


def __getattr__(name: str) -> Any:
    # Lazy, so that importing turnkeep (and the server) does not import torch.
    if name == "LLM":
        from turnkeep.server.llm import LLM

        return LLM
    if name in ("Turnkeep", "AsyncTurnkeep"):
        try:
            from turnkeep.clients import client
        except ModuleNotFoundError as error:
            if error.name not in ("openai", "pydantic"):
                raise
            raise ImportError("the client needs the openai package: pip install 'turnkeep[client]'") from None
        return getattr(client, name)
    raise AttributeError(f"module 'turnkeep' has no attribute {name!r}")
