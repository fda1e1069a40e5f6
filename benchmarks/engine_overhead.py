"""What the engine costs on top of the model: tokens/s through scheduler, cache and sampling over a bare model loop.

The bare loop calls the same model on the same tensors with nothing else: no scheduler, no cache manager, argmax for
sampling. Both run in turn in one process, segment by segment, so that a machine whose speed drifts treats them alike.
Bars: decode >= 0.60, prefill of 2,000 tokens >= 0.80. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import count
from typing import Any

from benchmarks.machine import describe_machine

PAGE_SIZE = 16
DECODE_BAR, PREFILL_BAR = 0.60, 0.80


class BareModel:
    """The model step alone: one sequence in pages of its own, tensors made once where a loop by hand would."""

    def __init__(self, model: Any, spec: Any, num_tokens: int) -> None:
        import torch

        from turnkeep.cache.storage import CacheStorage

        self.model = model
        self.num_pages = num_tokens // PAGE_SIZE + 2
        self.tensors = CacheStorage(spec, num_pages=self.num_pages + 1, num_state_rows=2).tensors
        self.row = torch.ones(1, dtype=torch.int64)
        self.index = torch.zeros(1, dtype=torch.int64)
        self.page_table = torch.arange(1, self.num_pages + 1)[None]

    def batch(self, token_ids: Any, start: int) -> Any:
        import torch

        from turnkeep.kernels.forward_batch import ForwardBatch

        length = token_ids.shape[0]
        positions = torch.arange(start, start + length)
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            seq_lens=(length,),
            context_lens=(start,),
            num_decodes=int(length == 1 and start > 0),
            cu_seqlens=torch.tensor([0, length]),
            kv_lens=torch.tensor([start + length]),
            page_table=self.page_table[:, : (start + length - 1) // PAGE_SIZE + 1],
            slot_mapping=positions + PAGE_SIZE,
            state_rows=self.row,
            exports=(),
            logit_indices=self.index if length == 1 else torch.tensor([length - 1]),
        )

    def prefill(self, prompt: list[int], chunk: int) -> Any:
        import torch

        ids = torch.tensor(prompt)
        for start in range(0, len(prompt), chunk):
            logits = self.model(self.batch(ids[start : start + chunk], start), self.tensors)
        return logits.argmax(-1)

    def decode(self, token: Any, start: int, num_tokens: int) -> Any:
        for position in range(start, start + num_tokens):
            token = self.model(self.batch(token, position), self.tensors).argmax(-1)
            token.item()  # a server has to look at each token
        return token


def run_engine(loop: Any, request_id: str, prompt: list[int], num_tokens: int) -> None:
    from turnkeep.cache.encoded_tokens import EncodedTokens
    from turnkeep.engine.messages import Submit
    from turnkeep.scheduler.request import SamplingParams

    loop.receive(
        Submit(
            request_id=request_id,
            prompt_ids=EncodedTokens(prompt),
            sampling=SamplingParams(max_new_tokens=num_tokens, ignore_eos=True),
        )
    )


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    import torch

    from turnkeep.cache.config import CacheConfig
    from turnkeep.engine.config import EngineConfig
    from turnkeep.engine.factory import build_engine, resolve_dtype
    from turnkeep.engine.sizing import cache_spec
    from turnkeep.models.catalog import find_model
    from turnkeep.models.config import ModelConfig

    dtype = resolve_dtype(arguments.dtype)
    config = EngineConfig(
        model=arguments.model,
        dtype=dtype,
        num_threads=arguments.threads,
        memory_bytes=1 << 29,
        cache=CacheConfig(prefix_caching=False),
        max_step_tokens=arguments.chunk,
    )
    loop, _ = build_engine(config, lambda event: None)
    model = loop._runner._model
    spec = cache_spec(ModelConfig.from_dict(find_model(arguments.model).config_dict()), PAGE_SIZE, dtype)
    bare = BareModel(model, spec, 4096)
    generator = torch.Generator().manual_seed(arguments.seed)
    vocab_size = model.config.vocab_size
    ids = count()

    def prompt(length: int) -> list[int]:
        return torch.randint(16, vocab_size, (length,), generator=generator).tolist()

    decode: list[tuple[float, float]] = []
    prefill: list[tuple[float, float]] = []
    with torch.inference_mode():
        for repeat in range(arguments.repeats + 1):
            short, long = prompt(100), prompt(2000)
            run_engine(loop, f"d{next(ids)}", short, arguments.tokens + 1)
            loop.step()  # the prefill
            engine_s = seconds(lambda: [loop.step() for _ in range(arguments.tokens)])
            assert not loop.has_work
            token = bare.prefill(short, arguments.chunk)
            bare_s = seconds(lambda token=token: bare.decode(token, 100, arguments.tokens))
            run_engine(loop, f"p{next(ids)}", long, 1)
            engine_prefill_s = seconds(lambda: [loop.step() for _ in range(-(-2000 // arguments.chunk))])
            assert not loop.has_work
            bare_prefill_s = seconds(lambda long=long: bare.prefill(long, arguments.chunk))
            if repeat:  # the first round warms up
                decode.append((engine_s, bare_s))
                prefill.append((engine_prefill_s, bare_prefill_s))
    return {
        "model": arguments.model,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "seed": arguments.seed,
        "decode": summary(decode, arguments.tokens),
        "prefill": summary(prefill, 2000),
    }


def summary(pairs: list[tuple[float, float]], num_tokens: int) -> dict[str, float]:
    """Medians over the repeats; the ratio is taken pair by pair."""
    return {
        "engine_tokens_per_s": round(num_tokens / statistics.median(pair[0] for pair in pairs), 1),
        "bare_tokens_per_s": round(num_tokens / statistics.median(pair[1] for pair in pairs), 1),
        "ratio": round(statistics.median(bare_s / engine_s for engine_s, bare_s in pairs), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--tokens", type=int, default=256, help="decoded tokens a repeat")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    result = measure(arguments) | {"machine": describe_machine()}
    print(f"{'':8}{'engine tok/s':>14}{'bare tok/s':>14}{'ratio':>8}{'bar':>7}")
    for name, bar in (("decode", DECODE_BAR), ("prefill", PREFILL_BAR)):
        row = result[name]
        print(
            f"{name:8}{row['engine_tokens_per_s']:14.1f}{row['bare_tokens_per_s']:14.1f}{row['ratio']:8.3f}{bar:7.2f}"
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
