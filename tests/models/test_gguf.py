"""GGUF files: metadata, rebuilt tokenizers, dequantised tensors and row order, against the gguf package's writer."""

from __future__ import annotations

import json
import os
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from optional_parts import missing
from tokenizers import Tokenizer, pre_tokenizers

from turnkeep.models.catalog import ModelFilesError, ModelNotFound, find_model
from turnkeep.models.checkpoint_files import WeightsError
from turnkeep.models.config import ModelConfig
from turnkeep.models.gguf_metadata import GGUFError, read_gguf_header
from turnkeep.models.gguf_source import GGUFSource
from turnkeep.models.gguf_tokenizer import TokenizerMetadataError, tokenizer_json
from turnkeep.models.tiny import tiny_config
from turnkeep.models.weights import load_model, random_model, random_tensors

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

HF_TO_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
BYTE_TOKENS = ["<|end|>", "<mark>", "a", "b", "Ġ", "1", "2", "ab", "Ġa", "12"]
BYTE_MERGES = ["a b", "Ġ a", "1 2"]
TEXTS = [
    "Hello world, how are you?",
    "In 2024, 123456 + 7 = 123463; 3.14159",
    "  leading and   many    spaces \t tabs\n\nnew lines\r\n  x",
    "def f(x):\n    return x ** 2  # it's we'll they've I'M",
    "Füße, naïve, 日本語テキスト, русский, עברית, ﬁ½²",
    "emoji 🙂👩‍👩‍👧 and \u200b zero width \u00a0 spaces",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b <|im_end|> c<|im_end|>",
    "",
    " ",
    "\n",
    "1",
    " 1 22 333 4444",
]


def stored_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, index, rest = stem.split(".", 3)
        return f"blk.{index}.{HF_TO_GGUF[rest]}.{suffix}"
    return f"{HF_TO_GGUF[stem]}.{suffix}"


def permuted(name: str, tensor: np.ndarray[Any, Any], values: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Rows as llama.cpp's converter orders them."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    key = next((field for part, field in heads.items() if part in name), None)
    if key is None:
        return tensor
    return tensor.reshape(values[key], 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def write_gguf(path: Path, values: dict[str, Any], seed: int, kind: str | None = None, **extra: Any) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(values["num_hidden_layers"])
    writer.add_context_length(values["max_position_embeddings"])
    writer.add_embedding_length(values["hidden_size"])
    writer.add_feed_forward_length(values["intermediate_size"])
    writer.add_head_count(values["num_attention_heads"])
    writer.add_head_count_kv(values["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(values["rms_norm_eps"])
    writer.add_rope_freq_base(values["rope_theta"])
    writer.add_vocab_size(values["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(BYTE_TOKENS)
    writer.add_token_types([3, 4, *[1] * 8])
    writer.add_token_merges(BYTE_MERGES)
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(1)
    writer.add_chat_template("{{ messages }}")
    for name, tensor in random_tensors(ModelConfig.from_dict(values), seed).items():
        data = permuted(name, tensor.numpy(), values)
        if kind is not None and data.ndim == 2:
            quantised = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(stored_name(name), gguf.quantize(data, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(stored_name(name), data)
    for name, data in extra.items():
        writer.add_tensor(name.replace("__", "."), data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_gives_the_config_and_exactly_the_weights(tmp_path: Path) -> None:
    values = tiny_config("attention_only") | {"attention_bias": True, "mlp_bias": True}
    write_gguf(tmp_path / "tiny.gguf", values, 3)
    source = find_model(str(tmp_path / "tiny.gguf"))
    assert (source.name, source.kind) == ("tiny", "gguf")
    expected = ModelConfig.from_dict(values)
    assert ModelConfig.from_dict(source.config_dict()) == expected
    progress: list[tuple[str, int, int]] = []
    model = load_model(source, dtype="float32", progress=lambda *step: progress.append(step))
    for (name, ours), (_, wanted) in zip(
        model.named_parameters(), random_model(expected, 3).named_parameters(), strict=True
    ):
        assert torch.equal(ours, wanted), name
    assert progress[-1] == ("weights", model.weight_bytes, model.weight_bytes)
    assert [done for _, done, _ in progress] == sorted({done for _, done, _ in progress})


@pytest.mark.parametrize(
    ("kind", "error"), [("Q8_0", 0.01), ("Q4_1", 0.15), ("Q4_0", 0.2), ("F16", 1e-3), ("BF16", 0.01)]
)
def test_quantised_tensors_are_dequantised(tmp_path: Path, kind: str, error: float) -> None:
    values = tiny_config("attention_only") | {"hidden_size": 96, "intermediate_size": 64, "num_key_value_heads": 2}
    write_gguf(tmp_path / "tiny.gguf", values, 4, kind)
    model = load_model(find_model(str(tmp_path / "tiny.gguf")), dtype="float32")
    for (name, ours), (_, wanted) in zip(
        model.named_parameters(), random_model(ModelConfig.from_dict(values), 4).named_parameters(), strict=True
    ):
        assert (ours - wanted).abs().max() <= error * wanted.abs().max(), name


def test_an_untied_head_and_rotary_divisors_are_read(tmp_path: Path) -> None:
    values = tiny_config("attention_only") | {"tie_word_embeddings": False}
    divisors = np.array([1.0, 1.5, 2.0, 8.0], dtype=np.float32)
    write_gguf(tmp_path / "tiny.gguf", values, 5, rope_freqs__weight=divisors)
    model = load_model(find_model(str(tmp_path / "tiny.gguf")), dtype="float32")
    assert model.lm_head is not None
    plain = random_model(ModelConfig.from_dict(values), 5)
    assert model.rotary_frequencies is not None
    assert plain.rotary_frequencies is not None
    torch.testing.assert_close(model.rotary_frequencies, plain.rotary_frequencies / torch.from_numpy(divisors))


def test_the_rebuilt_tokenizer_knows_special_tokens_digits_and_end_tokens(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_config("attention_only"), 6)
    source = find_model(str(tmp_path / "tiny.gguf"))
    tokenizer = Tokenizer.from_str(source.tokenizer_json())
    ids = [7, 4, 7, 0, 5, 6, 8, 1]  # "a b" is the earlier merge, so " ab" is a space and "ab"
    assert tokenizer.encode("ab ab<|end|>12 a<mark>").ids == ids
    assert tokenizer.decode(ids) == "ab ab12 a<mark>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "ab ab<|end|>12 a<mark>"
    assert source.eos_token_ids == (0, 1)
    assert (source.eos_token, source.bos_token) == ("<|end|>", None)
    assert source.chat_template() == "{{ messages }}"
    assert source.chat_template("tool_use") is None


def metadata(**changes: Any) -> dict[str, Any]:
    values = {
        "model": "gpt2",
        "pre": "llama-bpe",
        "tokens": BYTE_TOKENS,
        "token_type": [3, 4, *[1] * 8],
        "merges": BYTE_MERGES,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (values | changes).items() if value is not None}


def test_pre_tokenizers_split_digits_as_their_models_do() -> None:
    # The vocabulary can merge "1 2": only the pre-tokenizer decides whether it may.
    pieces = {
        pre: Tokenizer.from_str(tokenizer_json(metadata(pre=pre))).encode("12 a").ids
        for pre in ("llama-bpe", "lfm2", "qwen2", "smollm", "refact", "gpt-2")
    }
    together = {"llama-bpe": [9, 8], "lfm2": [9, 8], "gpt-2": [9, 8]}
    assert pieces == together | {"qwen2": [5, 6, 8], "smollm": [5, 6, 8], "refact": [5, 6, 8]}


def test_a_beginning_token_is_added_only_where_the_metadata_asks_for_it() -> None:
    with_bos = Tokenizer.from_str(tokenizer_json(metadata(add_bos_token=True, bos_token_id=1)))
    assert with_bos.encode("a").ids == [1, 2]
    assert with_bos.encode("a", add_special_tokens=False).ids == [2]
    without = Tokenizer.from_str(tokenizer_json(metadata(bos_token_id=1)))
    assert without.encode("a").ids == [2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "tokenizer model 'llama' is not supported"),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken' is not known"),
        ({"merges": None}, "no tokens or no merges"),
        ({"token_type": [1, 3]}, "10 tokens but 2 token types"),
        ({"add_bos_token": True, "bos_token_id": 10}, "beginning token 10 is none of the 10 tokens"),
    ],
)
def test_a_tokenizer_that_cannot_be_rebuilt_is_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerMetadataError, match=message):
        tokenizer_json(metadata(**changes))


def test_damaged_files_are_errors_that_say_what_is_wrong(tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    write_gguf(whole, tiny_config("attention_only"), 7)
    data = whole.read_bytes()
    path = tmp_path / "damaged.gguf"
    path.write_bytes(b"GGUG" + data[4:])
    with pytest.raises(ModelFilesError, match="is not a GGUF file"):
        find_model(str(path)).config_dict()
    path.write_bytes(data[:4] + (9).to_bytes(4, "little") + data[8:])
    with pytest.raises(ModelFilesError, match="is GGUF version 9"):
        find_model(str(path)).config_dict()
    for length in (0, 10, 24, 200, 900):
        path.write_bytes(data[:length])
        with pytest.raises(GGUFError, match=r"cut short|too short"):
            read_gguf_header(path)
    path.write_bytes(data[:-1000])
    with pytest.raises(WeightsError, match="is cut short: tensor"):
        load_model(find_model(str(path)), dtype="float32")


def test_every_cut_of_the_header_is_an_error_and_never_a_crash(tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    write_gguf(whole, tiny_config("attention_only"), 8)
    data = whole.read_bytes()
    start = min(tensor.offset for tensor in read_gguf_header(whole).tensors.values())
    path = tmp_path / "cut.gguf"
    generator = random.Random(0)
    for _ in range(60):
        path.write_bytes(data[: generator.randrange(start - 64)])
        with pytest.raises(GGUFError):
            read_gguf_header(path)


def test_head_counts_that_differ_by_block_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "llama")
    writer.add_head_count([2, 4])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelFilesError, match=r"head_count must be one integer for all blocks, not \[2, 4\]"):
        find_model(str(tmp_path / "other.gguf")).config_dict()


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelFilesError, match="architecture 'mamba' is not supported"):
        find_model(str(tmp_path / "other.gguf")).config_dict()


@pytest.fixture(scope="module")
def smollm2() -> GGUFSource:
    try:
        source = find_model("smollm2")
    except ModelNotFound as error:
        missing(f"weights not installed: {error}")
    assert isinstance(source, GGUFSource)
    return source


@pytest.fixture
def reference_tokenizer(smollm2: GGUFSource) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(smollm2.path.parent, gguf_file=smollm2.path.name)


def test_the_tokenizer_of_smollm2_equals_the_one_transformers_builds(
    smollm2: GGUFSource, reference_tokenizer: Any
) -> None:
    tokenizer = Tokenizer.from_str(smollm2.tokenizer_json())
    generator = random.Random(1)
    alphabet = [*"abcXYZ 019\n\t'.,-_é漢🙂", "<|im_end|>", " the", "2024", "  ", "ing"]
    made = ["".join(generator.choices(alphabet, k=40)) for _ in range(300)]
    # transformers forgets the rule that digits stand alone when it rebuilds this tokenizer. It shows only where a
    # run of spaces meets a numeral: everything else must be equal as it is, and all of it with the rule put back.
    plain = [text for text in [*TEXTS, *made] if not re.search(r"\s\s\d", text)]
    assert len(plain) > 150
    for text in plain:
        assert_same_tokens(tokenizer, reference_tokenizer, text)
    digits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    reference_tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(digits)
    for text in [*TEXTS, *made, "a   12", "x ½ ²"]:
        assert_same_tokens(tokenizer, reference_tokenizer, text)


def assert_same_tokens(tokenizer: Tokenizer, reference: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == reference.encode(text, add_special_tokens=False), text
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_smollm2_brings_its_template_and_tokens(smollm2: GGUFSource) -> None:
    template = smollm2.chat_template()
    assert template is not None
    assert "<|im_start|>" in template
    assert smollm2.special_tokens() == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
    }
    assert smollm2.eos_token_ids == (2,)
    added = json.loads(smollm2.tokenizer_json())["added_tokens"]
    assert [token["content"] for token in added[:3]] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert all(token["special"] for token in added)
    config = ModelConfig.from_dict(smollm2.config_dict())
    assert (config.num_attention_layers, config.hidden_size, config.tie_word_embeddings) == (30, 576, True)


PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):",
    "<|im_start|>user\nName three colors.<|im_end|>\n<|im_start|>assistant\n",
    "1 2 3 4 5 6",
    "Once upon a time, in a small village by the sea, there lived",
    "Dear customer, thank you for your letter of 3 March. We are sorry to hear that",
    "import numpy as np\n\nx = np.arange(10)\nprint(",
    "SELECT name, price FROM orders WHERE",
    "Q: What is the boiling point of water at sea level?\nA:",
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nWhy is the sky blue?<|im_end|>\n"
    "<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a haiku about rain.<|im_end|>\n<|im_start|>assistant\n",
    "# Shopping list\n\n- bread\n- milk\n-",
    "The mitochondrion is the part of the cell that",
    "In 1969, two astronauts",
    '{"name": "Ada", "born": 1815, "field":',
    "To boil an egg, first",
    "Rust and C++ differ in how they",
    "The quick brown fox",
    "Il pleut aujourd'hui et",
    "Theorem. There are infinitely many primes. Proof.",
]
# Its bar is 64; they take half a minute.
NUM_CONTINUED = int(os.environ.get("TURNKEEP_CONTINUED_TOKENS", "12"))


@pytest.fixture
def smollm2_reference(smollm2: GGUFSource) -> Any:
    """transformers' Llama with the weights as the gguf package reads and dequantises them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        values = smollm2.config_dict()
        config = LlamaConfig(**values)
        with torch.device("meta"):  # no random weights: all of them are replaced
            model = LlamaForCausalLM(config)
        model.to_empty(device="cpu")
        model.tie_weights()
        model.model.rotary_emb = LlamaRotaryEmbedding(config)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2.path).tensors}
    for name, parameter in model.named_parameters():
        tensor = stored[stored_name(name)]
        data = gguf.dequantize(tensor.data, tensor.tensor_type)
        if "q_proj" in name or "k_proj" in name:
            half = values["head_dim"] // 2
            rows = np.arange(len(data)).reshape(-1, half, 2).transpose(0, 2, 1).ravel()
            data = data[rows]
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(np.array(data)))
    return model.eval()


@pytest.mark.slow
def test_smollm2_continues_prompts_as_transformers_does(
    smollm2: GGUFSource, smollm2_reference: Any, make_driver: Callable[..., Any]
) -> None:
    """Greedy tokens agree wherever the best two logits are apart; both sides read the same dequantised weights."""
    model = load_model(smollm2, dtype="float32")
    tokenizer = Tokenizer.from_str(smollm2.tokenizer_json())
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in PROMPTS]
    longest = max(map(len, prompts)) + NUM_CONTINUED
    driver = make_driver(model, num_sequences=len(PROMPTS), max_tokens=longest)
    work = list(enumerate(prompts))
    written: list[list[int]] = [[] for _ in prompts]
    last_logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    for _ in range(NUM_CONTINUED):
        for (sequence, _), logits in zip(work, driver.step(work), strict=True):
            written[sequence].append(int(logits[-1].argmax()))
            last_logits[sequence].append(logits[-1])
        work = [(sequence, tokens[-1:]) for sequence, tokens in enumerate(written)]
    assert tokenizer.decode(written[0]).startswith(" Paris")
    # One pass over prompts and continuations gives the reference's logits after every prefix of them. What stands
    # behind the end of a shorter one is seen by nothing before it.
    whole = [tokens + ours[:-1] for tokens, ours in zip(prompts, written, strict=True)]
    padded = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in whole])
    with torch.inference_mode():
        references = smollm2_reference(padded, use_cache=False).logits
    num_ties = 0
    for tokens, ours, logits, reference in zip(prompts, written, last_logits, references, strict=True):
        expected = reference[len(tokens) - 1 : len(tokens) - 1 + NUM_CONTINUED]
        torch.testing.assert_close(torch.stack(logits), expected, atol=2e-3, rtol=0)
        best = expected.topk(2)
        is_tie = best.values[:, 0] - best.values[:, 1] < 1e-3
        num_ties += int(is_tie.sum())
        assert torch.equal(torch.tensor(ours)[~is_tie], best.indices[~is_tie, 0])
    assert num_ties <= len(PROMPTS) * NUM_CONTINUED / 100
