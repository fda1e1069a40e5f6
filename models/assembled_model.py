"""A model file that packages carry in parts: put together once, in the user's cache folder. Torch-free.

Imports none of the packages: only the places of their files are asked for.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from turnkeep.models.model_source import ModelFilesError

COPY_BYTES = 1 << 20


def package_files(package: str, pattern: str) -> list[Path]:
    """Files of an installed package that match, sorted; empty when it is not installed."""
    spec = find_spec(package)
    folders = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    return sorted(file for folder in folders for file in folder.glob(pattern))


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Where files that can be made again are kept."""
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "turnkeep"


def assemble(parts: Sequence[Path], target: Path, sha256: str) -> None:
    """Write the parts one after another to `target`, unless a file of their size lies there already.

    The file appears only once it is whole and its digest is right. Raises ModelFilesError for another digest, or when
    the file cannot be written.
    """
    if target.is_file() and target.stat().st_size == sum(part.stat().st_size for part in parts):
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=target.name, delete=False) as file:
            unfinished = Path(file.name)
            try:
                digest = hashlib.sha256()
                for part in parts:
                    with part.open("rb") as source:
                        while block := source.read(COPY_BYTES):
                            digest.update(block)
                            file.write(block)
                if digest.hexdigest() != sha256:
                    raise ModelFilesError(f"the parts of {target.name} are damaged: their digest is not {sha256}")
                file.close()
                os.replace(unfinished, target)
            finally:
                unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise ModelFilesError(f"{target} cannot be put together: {error}") from error
