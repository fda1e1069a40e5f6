"""What a decoder is made of: sizes of each mixer and the order of the layers, read from a checkpoint's config.

Owns the frozen `ModelConfig` and the reading of config fields with errors that name the field. Torch-free: the engine
sizes its pools, and the server its limits, from these values. It knows no weight names and no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Literal, NamedTuple

from turnkeep.models.state_tails import tail_parts

# "sliding" is attention that sees the last tokens only; "parallel" is attention and Mamba-2 side by side on one input;
# "short_conv" keeps a window of inputs and no state.
LayerKind = Literal["mamba2", "gated_delta", "attention", "sliding", "parallel", "short_conv", "mlp", "moe"]
KINDS_WITH_KV = ("attention", "sliding", "parallel")
KINDS_WITH_STATE = ("mamba2", "gated_delta", "parallel", "short_conv")


class ConfigError(ValueError):
    """A model configuration lacks a field, contradicts itself, or asks for what is not supported."""


class StatePartShape(NamedTuple):
    """One named tensor of a recurrent layer's state: `shape` of one row, `dtype` by name."""

    name: str
    num_layers: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Mamba2Config:
    """Sizes of the Mamba-2 mixers. `dt_limit` bounds the step size after the softplus.

    `output` says how the gate and the norm follow the scan: norm(y * gate), norm(y) * gate, or y * gate without a norm.
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_width: int
    chunk_size: int
    dt_limit: tuple[float, float]
    has_conv_bias: bool
    has_bias: bool
    has_out_bias: bool
    output: Literal["gate_then_norm", "norm_then_gate", "gate"] = "gate_then_norm"

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Channels that pass through the convolution: x, then B and C of every group."""
        return self.inner_size + 2 * self.num_groups * self.state_size


@dataclass(frozen=True, slots=True)
class GatedDeltaConfig:
    """Sizes of the gated delta nets: value heads share key heads in runs of num_value_heads / num_key_heads."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def inner_size(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def conv_dim(self) -> int:
        """Channels that pass through the convolution: q, then k, then v of every head."""
        return 2 * self.num_key_heads * self.key_dim + self.inner_size


@dataclass(frozen=True, slots=True)
class ShortConvConfig:
    """Sizes of the gated short convolutions: `width` inputs, of which width - 1 are the state."""

    width: int
    has_bias: bool


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions. `llama3` is (factor, low_freq_factor, high_freq_factor, original_max_position_embeddings);
    `divisors` divide the inverse frequencies one by one (the form GGUF files store). `rotary_dim` is how many channels
    of a head are rotated, None for all."""

    theta: float
    llama3: tuple[float, float, float, int] | None = None
    divisors: tuple[float, ...] | None = None
    rotary_dim: int | None = None


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Sizes of the attention mixers; `rope` is None where positions are not encoded.

    `has_qk_norm`: every head of q and k is normalised before it is rotated. `score_scale` replaces head_dim ** -0.5.
    `has_gate`: the mixed values are multiplied by the sigmoid of a gate before the output projection.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None
    has_bias: bool
    has_out_bias: bool
    has_qk_norm: bool = False
    score_scale: float | None = None
    has_gate: bool = False

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5) if self.score_scale is None else self.score_scale


@dataclass(frozen=True, slots=True)
class SlidingConfig:
    """What sliding layers have of their own: the last `window` tokens, the own one among them, and their `rope`."""

    window: int
    rope: RopeConfig | None


@dataclass(frozen=True, slots=True)
class MLPConfig:
    """Sizes of the MLP mixers: down(act(up(x))), or down(act(gate(x)) * up(x)) when gated."""

    intermediate_size: int
    activation: Literal["relu2", "silu", "gelu_tanh"]
    is_gated: bool
    has_bias: bool


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """Sizes and routing of the mixtures of experts.

    Scores are a softmax or a sigmoid of the router's logits; the best `num_chosen` experts of a token are weighted by
    their scores, made to sum to one when `normalises`, times `weight_scale`. With more than one group of experts only
    the `num_chosen_groups` groups with the largest sums of their two best scores take part. `has_correction_bias`: a
    bias is added to the scores for the choice alone. `latent_size` is the width the routed experts work in, None for
    the hidden size. `shared` is an expert of every token, times the sigmoid of a gate when `has_shared_gate`.
    """

    num_experts: int
    num_chosen: int
    expert_size: int
    activation: Literal["relu2", "silu"]
    is_gated: bool
    scores: Literal["softmax", "sigmoid"]
    normalises: bool
    weight_scale: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
    has_correction_bias: bool = False
    latent_size: int | None = None
    has_latent_bias: bool = False
    shared: MLPConfig | None = None
    has_shared_gate: bool = False


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Constant factors that some families put on inputs and outputs of their layers.

    All but `embedding` are folded into the weights when they are loaded. `mamba2_parts` are those of the projected
    gate, x, B, C and dt; `residual` is that of every mixer's output.
    """

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    attention_in: float = 1.0
    attention_out: float = 1.0
    key: float = 1.0
    mamba2_in: float = 1.0
    mamba2_out: float = 1.0
    mamba2_parts: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    mlp_gate: float = 1.0
    mlp_down: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder. A layer here is one residual step, x + mixer(norm(x)): a Llama block counts as two layers.

    `has_post_norms`: the mixer's output is normalised too, before it is added. `draft_kinds` are the layers of the
    draft head that the config tells of, of the same sizes as the decoder's own; none without a head.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layer_kinds: tuple[LayerKind, ...]
    norm_eps: float
    tie_word_embeddings: bool
    residual_in_fp32: bool
    max_position_embeddings: int
    mamba2: Mamba2Config | None
    attention: AttentionConfig | None
    mlp: MLPConfig | None
    short_conv: ShortConvConfig | None = None
    moe: MoEConfig | None = None
    gated_delta: GatedDeltaConfig | None = None
    multipliers: Multipliers = Multipliers()
    sliding: SlidingConfig | None = None
    has_post_norms: bool = False
    draft_kinds: tuple[LayerKind, ...] = ()

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face config dict. Raises ConfigError naming the field or the unsupported feature."""
        # The registry imports the model files, and those import this module.
        from turnkeep.models.registry import read_config

        return read_config(values)

    @property
    def num_attention_layers(self) -> int:
        """Layers with keys and values."""
        return sum(kind in KINDS_WITH_KV for kind in self.layer_kinds)

    @property
    def num_recurrent_layers(self) -> int:
        """Layers with a state."""
        return sum(kind in KINDS_WITH_STATE for kind in self.layer_kinds)

    def of_draft_head(self) -> ModelConfig:
        """A configuration whose layers are those of the draft head: the way its parameters and tensors are listed."""
        return replace(self, layer_kinds=self.draft_kinds, draft_kinds=())

    @property
    def num_draft_kv_layers(self) -> int:
        """Layers of the draft head with keys and values; their tensors come after those of the decoder."""
        return sum(kind in KINDS_WITH_KV for kind in self.draft_kinds)

    def kv_index(self, position: int) -> int:
        """Which tensor of keys and values the layer at `position` owns, if it has one."""
        return sum(kind in KINDS_WITH_KV for kind in self.layer_kinds[:position])

    def state_index(self, position: int) -> int:
        """Which tensor of each state part the layer at `position` owns, if it has a state."""
        return sum(kind in KINDS_WITH_STATE for kind in self.layer_kinds[:position])

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads of an attention layer, 0 without attention."""
        return self.attention.num_kv_heads if self.attention else 0

    @property
    def head_dim(self) -> int:
        """Width of a key-value head, 0 without attention."""
        return self.attention.head_dim if self.attention else 0

    def draft_part(self, dtype: str = "float32") -> StatePartShape:
        """What a state row holds for the draft head: the last hidden state, which its next entry is made of."""
        return StatePartShape("draft_hidden", 1, (self.hidden_size, 1), dtype)

    def state_parts(self, dtype: str = "float32", input_dtype: str = "float32") -> tuple[StatePartShape, ...]:
        """What one state row holds; empty without recurrent layers. `dtype`: of the states, float32 or one of 16 bits.

        States in float32 do not follow the type of the weights. With those in 16 bits a row also holds the inputs
        since the last grid line (`kernels/grid_cells.py`), and these, like windows, exactly: in `input_dtype`, that of
        the weights.
        """
        if dtype == "float32":
            return self._plain_state_parts("float32", "float32")
        plain, num_layers = self._plain_state_parts(dtype, input_dtype), self.num_recurrent_layers
        tails = tail_parts(self, input_dtype)
        return (*plain, *(StatePartShape(name, num_layers, shape, kind) for name, shape, kind in tails))

    def _plain_state_parts(self, dtype: str, window_dtype: str) -> tuple[StatePartShape, ...]:
        num_layers = self.num_recurrent_layers
        if self.short_conv is not None:
            return (StatePartShape("conv", num_layers, (self.hidden_size, self.short_conv.width - 1), window_dtype),)
        if self.gated_delta is not None:
            delta = self.gated_delta
            return (
                StatePartShape("conv", num_layers, (delta.conv_dim, delta.conv_width - 1), window_dtype),
                StatePartShape("delta", num_layers, (delta.num_value_heads, delta.key_dim, delta.value_dim), dtype),
            )
        if self.mamba2 is None:
            return ()
        mamba2 = self.mamba2
        return (
            StatePartShape("conv", num_layers, (mamba2.conv_dim, mamba2.conv_width - 1), window_dtype),
            StatePartShape("ssm", num_layers, (mamba2.num_heads, mamba2.head_dim, mamba2.state_size), dtype),
        )

    def history_parts(self, capacity: int, dtype: str, *, has_draft_head: bool = False) -> tuple[StatePartShape, ...]:
        """What one history slot of `capacity` tokens holds: the raw inputs of the convolutions and what these made of
        them in the weights' `dtype`, in which they were computed, and float32 for what would stay in the state rounded.
        """
        windows = [part for part in self.state_parts() if part.name == "conv"]
        windows += [self.draft_part()] if has_draft_head else []
        parts = [
            StatePartShape(part.name, part.num_layers, (capacity + part.shape[1], part.shape[0]), dtype)
            for part in windows
        ]
        num_layers = self.num_recurrent_layers
        if self.gated_delta is not None:
            delta = self.gated_delta
            parts += [
                StatePartShape("k", num_layers, (capacity, delta.num_key_heads, delta.key_dim), dtype),
                StatePartShape("u", num_layers, (capacity, delta.num_value_heads, delta.value_dim), "float32"),
                StatePartShape("g", num_layers, (capacity, delta.num_value_heads), "float32"),
            ]
        elif self.mamba2 is not None:
            mamba2 = self.mamba2
            parts += [
                StatePartShape("x", num_layers, (capacity, mamba2.num_heads, mamba2.head_dim), dtype),
                StatePartShape("dt", num_layers, (capacity, mamba2.num_heads), "float32"),
                StatePartShape("B", num_layers, (capacity, mamba2.num_groups, mamba2.state_size), dtype),
            ]
        return tuple(parts)


class ConfigFields:
    """A config dict with typed access: every error names the field and the model type."""

    def __init__(self, values: Mapping[str, Any], model_type: str) -> None:
        self.values = values
        self.model_type = model_type

    def error(self, message: str) -> ConfigError:
        return ConfigError(f"config of model type {self.model_type!r}: {message}")

    def get(self, name: str, *aliases: str) -> Any:
        """The first of the names that is present and not null, else None."""
        return next((self.values[key] for key in (name, *aliases) if self.values.get(key) is not None), None)

    def integer(self, name: str, *aliases: str, default: int | None = None, minimum: int = 1) -> int:
        value = self.get(name, *aliases)
        value = default if value is None else value
        if value is None:
            raise self.error(f"field {name!r} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(f"field {name!r} must be an integer of at least {minimum}, not {value!r}")
        return value

    def number(self, name: str, *aliases: str, default: float | None = None) -> float:
        value = self.get(name, *aliases)
        value = default if value is None else value
        if value is None:
            raise self.error(f"field {name!r} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value <= 0:
            raise self.error(f"field {name!r} must be a positive number, not {value!r}")
        return float(value)

    def flag(self, name: str, *aliases: str, default: bool) -> bool:
        value = self.get(name, *aliases)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(f"field {name!r} must be true or false, not {value!r}")
        return value

    def choice(self, name: str, allowed: tuple[str, ...], default: str) -> str:
        value = self.get(name)
        value = default if value is None else value
        if value not in allowed:
            raise self.error(f"{name} = {value!r} is not supported (supported: {', '.join(allowed)})")
        return str(value)

    def grouped_heads(self) -> tuple[int, int]:
        """(query heads, key-value heads), the first a multiple of the second."""
        num_heads = self.integer("num_attention_heads")
        num_kv_heads = self.integer("num_key_value_heads", default=num_heads)
        if num_heads % num_kv_heads:
            raise self.error(
                f"num_attention_heads = {num_heads} is not a multiple of num_key_value_heads = {num_kv_heads}"
            )
        return num_heads, num_kv_heads
