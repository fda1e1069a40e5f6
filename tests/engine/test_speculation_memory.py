"""What verifying a tree takes besides pages and rows: no state of any node is ever stored."""

from __future__ import annotations

import numpy as np
import torch

from turnkeep.cache.spec import CacheSpec
from turnkeep.cache.storage import CacheStorage
from turnkeep.engine.batch_builder import BatchBuilder
from turnkeep.engine.sizing import cache_spec
from turnkeep.engine.speculation.hidden_states import HiddenStates
from turnkeep.models.catalog import find_model
from turnkeep.models.config import ModelConfig
from turnkeep.models.weights import load_model
from turnkeep.scheduler.drafts import DraftTree
from turnkeep.scheduler.request import SamplingParams
from turnkeep.scheduler.step_plan import Replay, StepItem

NUM_NODES = 32
CAPACITY = 32


def tree_of_32_nodes(dtype: str) -> tuple[CacheSpec, int]:
    """The bundled model's pools, and the bytes that a step keeps of a tree of 32 nodes."""
    source = find_model("demo")
    config = ModelConfig.from_dict(source.config_dict())
    spec = cache_spec(config, 16, dtype, history_capacity=CAPACITY, has_draft_head=True)
    storage = CacheStorage(spec, num_pages=20, num_state_rows=3, num_history_slots=1)
    draft = DraftTree(tuple(range(10, 41)), tuple((node - 1) // 2 for node in range(31)), (0.5,) * 31)
    item = StepItem(
        request_id="a",
        token_ids=[9],
        start=100,
        page_ids=np.arange(1, 9, dtype=np.int32),
        state_row=1,
        exports=(),
        sampling=SamplingParams(max_new_tokens=1),
        replay=Replay(0, 0),
        draft=draft,
    )
    batch = BatchBuilder(16, has_state=True, has_pages=True, history_capacity=CAPACITY).build([item])
    assert batch.num_tree_nodes == NUM_NODES
    model = load_model(source, dtype=dtype)
    with torch.inference_mode():
        normed = model.normed(model.hidden(batch, storage.tensors))
        HiddenStates(storage.tensors).store([item], batch, normed)
    assert batch.trees is not None
    return spec, batch.trees.terms.num_bytes


def test_a_tree_of_32_nodes_and_its_history_take_a_twentieth_of_32_state_rows() -> None:
    spec, num_bytes = tree_of_32_nodes("bfloat16")
    limit = 0.05 * NUM_NODES * spec.bytes_per_row
    assert 0 < num_bytes < 0.023 / 0.05 * limit
    assert num_bytes + spec.bytes_per_history_slot <= limit


def test_a_tree_computed_in_float32_takes_a_twentieth_of_32_state_rows() -> None:
    spec, num_bytes = tree_of_32_nodes("float32")
    assert 0 < num_bytes <= 0.05 * NUM_NODES * spec.bytes_per_row


def test_terms_of_a_large_models_layer_are_a_small_part_of_its_state() -> None:
    """Layers of 128 heads of 64 with a state of 128: what 32 nodes and a whole history take of 32 rows."""
    values = {
        **find_model("demo").config_dict(),
        "hidden_size": 4096,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
    }
    spec = cache_spec(ModelConfig.from_dict(values), 16, "bfloat16", history_capacity=CAPACITY)
    assert spec.history is not None
    assert spec.bytes_per_history_slot * (CAPACITY + NUM_NODES) / CAPACITY <= 0.05 * NUM_NODES * spec.bytes_per_row
