"""Memory becomes pages, rows and running requests; what does not fit is said with numbers before anything loads."""

from __future__ import annotations

import pytest

from turnkeep.cache.spec import CacheSpec, KVSpec, StatePart, StateSpec
from turnkeep.engine import sizing
from turnkeep.engine.config import EngineConfig
from turnkeep.engine.sizing import NotEnoughMemory, PoolSizes, cache_spec, size_pools
from turnkeep.models.config import ModelConfig
from turnkeep.models.tiny import TinyKind, tiny_config

MIB = 1024 * 1024
KV = KVSpec(num_layers=4, num_kv_heads=2, head_dim=64, dtype="bfloat16")  # 32 KiB a page of 16 tokens
STATE = StateSpec((StatePart("ssm", 8, (64, 64, 8), "float32"),))  # 1 MiB a row
HYBRID = CacheSpec(16, KV, STATE)
ATTENTION_ONLY = CacheSpec(16, KV, None)
ATTENTION_FREE = CacheSpec(16, None, STATE)


def sizes(spec: CacheSpec, memory_mib: float, model_max_len: int = 4096, **config: int) -> PoolSizes:
    return size_pools(spec, EngineConfig(model="m", **config), model_max_len, int(memory_mib * MIB))


@pytest.mark.parametrize("spec", [HYBRID, ATTENTION_ONLY, ATTENTION_FREE])
@pytest.mark.parametrize("memory_mib", [16, 64, 300, 2000])
def test_the_pools_stay_within_the_memory_and_use_most_of_it(spec: CacheSpec, memory_mib: int) -> None:
    found = sizes(spec, memory_mib)
    assert found.num_bytes == found.num_pages * spec.bytes_per_page + found.num_state_rows * spec.bytes_per_row
    assert found.num_bytes <= memory_mib * MIB
    assert found.num_bytes >= 0.6 * memory_mib * MIB
    assert found.max_running >= 1
    assert found.limiting_resource


def test_live_rows_are_never_more_than_rows_and_snapshots_have_room_beside_them() -> None:
    found = sizes(HYBRID, 300)
    assert found.max_running == 16
    assert found.num_state_rows - 1 >= found.max_running + 2 * found.max_running
    # As many conversations of typical length as there are pairs of snapshots.
    assert (found.num_pages - 1) * 16 / 2048 >= (found.num_state_rows - 1 - found.max_running) / 2 - 2


def test_little_memory_lowers_what_runs_at_once_and_says_why() -> None:
    found = sizes(HYBRID, 40, max_running=64)
    assert 1 <= found.max_running < 64
    assert found.notices[0].startswith(f"max_running 64 lowered to {found.max_running}: memory: 40.0 MiB")


def test_named_pools_are_taken_as_they_are() -> None:
    found = sizes(HYBRID, 1, num_pages=33, num_state_rows=4, max_running=8)
    assert (found.num_pages, found.num_state_rows) == (33, 4)
    assert found.max_running == 3
    assert "state rows: 3 allow 3" in found.limiting_resource
    assert found.max_model_len == 31 * 16
    assert any("max_model_len lowered from 4096 to 496" in notice for notice in found.notices)


def test_less_than_one_useful_request_is_an_error_with_the_numbers() -> None:
    with pytest.raises(NotEnoughMemory) as raised:
        sizes(HYBRID, 4)
    message = str(raised.value)
    for part in ("256 tokens", "18 pages", "0.6 MiB", "6 state rows", "6.0 MiB", "there are 4.0 MiB", "6.6 MiB"):
        assert part in message, (part, message)


def test_a_named_length_that_does_not_fit_is_an_error_and_not_lowered() -> None:
    with pytest.raises(NotEnoughMemory, match="100000 tokens"):
        sizes(HYBRID, 100, model_max_len=200_000, max_model_len=100_000)
    assert sizes(HYBRID, 100, model_max_len=200_000).max_model_len < 100_000


@pytest.mark.parametrize(("config", "words"), [({"num_pages": 4}, "num_pages is 4"), ({"num_state_rows": 1}, "is 1")])
def test_named_pools_that_hold_nothing_are_an_error(config: dict[str, int], words: str) -> None:
    with pytest.raises(NotEnoughMemory, match=words):
        sizes(HYBRID, 100, **config)


def test_a_length_beyond_the_models_own_is_lowered_with_a_notice() -> None:
    found = sizes(HYBRID, 300, model_max_len=512, max_model_len=1000)
    assert found.max_model_len == 512
    assert found.notices == ("max_model_len 1000 lowered to the model's own 512",)


@pytest.mark.parametrize(("num_state_rows", "num_notices"), [(2, 1), (3, 0)])
def test_pools_in_which_no_prefix_can_be_found_say_so(num_state_rows: int, num_notices: int) -> None:
    found = sizes(HYBRID, 300, num_state_rows=num_state_rows, max_running=1)
    assert [notice for notice in found.notices if "cannot hit" in notice] == list(found.notices)[:num_notices]
    assert len(found.notices) == num_notices


@pytest.mark.parametrize(
    ("kind", "has_kv", "has_state"),
    [
        ("hybrid", True, True),
        ("attention_only", True, False),
        ("attention_free", False, True),
        ("short_conv", True, True),
    ],
)
def test_the_spec_of_a_model_has_what_its_layers_need(kind: TinyKind, has_kv: bool, has_state: bool) -> None:
    spec = cache_spec(ModelConfig.from_dict(tiny_config(kind)), 16, "bfloat16")
    assert (spec.kv is not None, spec.state is not None) == (has_kv, has_state)
    assert (spec.bytes_per_page > 0, spec.bytes_per_row > 0) == (has_kv, has_state)


def test_a_draft_head_has_layers_in_the_pages_and_a_part_of_the_row() -> None:
    head = {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["attention", "mlp"]}
    model = ModelConfig.from_dict(tiny_config("hybrid") | head)
    plain, speculating = cache_spec(model, 16, "float32"), cache_spec(model, 16, "float32", has_draft_head=True)
    assert plain.kv is not None
    assert speculating.kv is not None
    assert speculating.kv.num_layers == plain.kv.num_layers + 1
    assert speculating.state is not None
    assert (speculating.state.parts[-1].name, speculating.state.parts[-1].shape) == ("draft_hidden", (48, 1))
    assert speculating.bytes_per_row == plain.bytes_per_row + 48 * 4


def test_pool_types_can_be_chosen_apart_from_the_weights() -> None:
    model = ModelConfig.from_dict(tiny_config("hybrid"))
    plain = cache_spec(model, 16, "float32")
    small = cache_spec(model, 16, "float32", kv_dtype="bfloat16", state_dtype="float16")
    assert small.bytes_per_page * 2 == plain.bytes_per_page
    assert small.state is not None
    sizes = {part.name: part.num_bytes for part in small.state.parts}
    whole = {part.name: part.num_bytes for part in plain.state.parts} if plain.state else {}
    assert sizes["ssm"] * 2 == whole["ssm"]
    assert sizes["conv"] == whole["conv"]  # inputs are kept as they are, and so are those since the last grid line
    assert set(sizes) - set(whole) == {"ssm_x", "ssm_dt", "ssm_B"}
    with pytest.raises(ValueError, match="state_dtype must be one of float32, bfloat16, float16, not 'int8'"):
        cache_spec(model, 16, "float32", state_dtype="int8")
    with pytest.raises(ValueError, match="kv_dtype must be one of"):
        cache_spec(model, 16, "float32", kv_dtype="int8")


def test_more_memory_than_the_machine_has_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "available_memory_bytes", lambda: 3 * sizing.MIB)
    sizing.check_memory(3 * sizing.MIB)
    with pytest.raises(sizing.NotEnoughMemory, match="5 MiB, the machine has 3 MiB"):
        sizing.check_memory(5 * sizing.MIB)
