"""How the next token of each row of logits is chosen: plain values, no request and no tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, frozen=True)
class SamplingRow:
    """One row's choice. temperature 0 is greedy; every default leaves the logits as they are.

    position: tokens before the sampled one, which with seed keys the noise. forbidden_ids: never chosen (stop tokens
    while fewer than min_new_tokens were generated). repetition_penalty looks at prompt_ids and output_ids, frequency
    and presence penalties at output_ids alone. top_k 0 keeps all tokens. allowed_bits: one bit for every token of the
    vocabulary (lowest bit of the first byte first); the others are never chosen, whatever their bias.
    """

    position: int = 0
    seed: int = 0  # 64 bits
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    forbidden_ids: Sequence[int] = ()
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    allowed_bits: bytes | None = None

    @property
    def has_penalty(self) -> bool:
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def changes_logits(self) -> bool:
        is_restricted = bool(self.forbidden_ids) or self.allowed_bits is not None
        return is_restricted or bool(self.logit_bias) or self.has_penalty


GREEDY = SamplingRow()


@dataclass(slots=True, frozen=True)
class SamplingBatch:
    """The rows of one call, in the order of the logits. Build plain greedy rows from GREEDY: they cost nothing."""

    rows: Sequence[SamplingRow]

    @property
    def is_plain_greedy(self) -> bool:
        return all(row is GREEDY or (row.temperature == 0.0 and not row.changes_logits) for row in self.rows)
