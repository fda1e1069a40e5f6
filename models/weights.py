"""A decoder with its weights: from a checkpoint's files, or seeded random ones for tests.

Compares what the config needs with what the checkpoint has before any data is read, and reports every difference in
one error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch

from turnkeep.models.checkpoint_files import Checkpoint, TensorsInMemory, WeightsError, open_checkpoint
from turnkeep.models.config import ModelConfig
from turnkeep.models.decoder import Decoder
from turnkeep.models.model_source import ModelSource
from turnkeep.models.registry import weight_map
from turnkeep.models.weight_map import ParameterSource, TensorPart, WeightMap

__all__ = ["Progress", "WeightsError", "load_model", "random_model", "random_tensors"]

# stage, bytes of weights done, bytes of weights in all
Progress = Callable[[str, int, int], None]
MAX_LISTED = 20


def load_model(
    source: ModelSource,
    *,
    dtype: torch.dtype | str,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> Decoder:
    """The model with its weights in `dtype` (a torch dtype or its name), ready to run on `device`.

    Raises ConfigError for a config that is not supported, ModelFilesError for damaged files, and WeightsError that
    lists every missing, unexpected or misshapen tensor; ValueError for a dtype that models cannot have.
    """
    config = ModelConfig.from_dict(source.config_dict())
    return fill_decoder(config, open_checkpoint(source), dtype=dtype, device=device, progress=progress)


def fill_decoder(
    config: ModelConfig,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype | str,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> Decoder:
    """A decoder of this configuration with the checkpoint's tensors. Raises WeightsError."""
    names, stored = stored_map(weight_map(config), checkpoint.shapes())
    _check_tensors(config, names, checkpoint, stored)
    with torch.device(device):
        decoder = Decoder(config, model_dtype(dtype)).to(device)
    fill_parameters(decoder, names, checkpoint, stored, progress)
    return decoder.eval()


def fill_parameters(
    module: torch.nn.Module,
    names: WeightMap,
    checkpoint: Checkpoint,
    stored: Mapping[str, str],
    progress: Progress | None = None,
) -> None:
    """Read every parameter of a module whose map is that of `stored_map`."""
    parameters = dict(module.named_parameters())
    if parameters.keys() != names.sources.keys():
        raise AssertionError(f"parameters without a source: {sorted(parameters.keys() ^ names.sources.keys())}")
    total = sum(parameter.numel() * parameter.element_size() for parameter in parameters.values())
    done = 0
    for name, parameter in parameters.items():
        parameter.copy_(_assemble(names.sources[name], checkpoint, stored, parameter.shape))
        done += parameter.numel() * parameter.element_size()
        if progress is not None:
            progress("weights", done, total)


def model_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A torch dtype or its name as a dtype. Raises ValueError for one that models cannot have."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype must be float32, bfloat16 or float16, not {dtype!r}")
    return found


def stored_map(names: WeightMap, stored_names: Iterable[str]) -> tuple[WeightMap, dict[str, str]]:
    """The map with every parameter made up of what the checkpoint has, and map's name -> checkpoint's name."""
    stored = {names.canonical(name): name for name in stored_names}
    sources = dict(names.sources)
    for name, others in names.alternatives.items():
        for source in (sources[name], *others):
            if all(part.name in stored for part in source.parts):
                sources[name] = source
                break
    return replace(names, sources=sources), stored


def _assemble(
    source: ParameterSource, checkpoint: Checkpoint, stored: Mapping[str, str], shape: torch.Size
) -> torch.Tensor:
    parts = [_read_part(part, checkpoint, stored) for part in source.parts]
    tensor = parts[0] if len(parts) == 1 else torch.cat(parts, source.dim)
    if source.change == "drop_dim1":
        tensor = tensor.squeeze(1)
    elif source.change == "negative_exp":
        tensor = tensor.float().exp().neg()
    elif source.change == "plus_one":
        tensor = tensor.float() + 1.0
    tensor = tensor.reshape(shape)
    if source.row_factors:
        rows, factors = zip(*source.row_factors, strict=True)
        by_row = torch.tensor(factors, dtype=torch.float32).repeat_interleave(torch.tensor(rows))
        # In float32, so that the weight is rounded once more and not its factor too.
        tensor = tensor.float() * by_row.view(-1, *[1] * (tensor.dim() - 1))
    return tensor


def _read_part(part: TensorPart, checkpoint: Checkpoint, stored: Mapping[str, str]) -> torch.Tensor:
    tensor = checkpoint.read(stored[part.name])
    if part.by_group is None:
        return tensor
    num_groups, rows = part.by_group
    kinds = torch.split_with_sizes(tensor.view(num_groups, sum(rows), *tensor.shape[1:]), list(rows), dim=1)
    return torch.cat([kind.flatten(0, 1) for kind in kinds])


def _check_tensors(config: ModelConfig, names: WeightMap, checkpoint: Checkpoint, stored: dict[str, str]) -> None:
    shapes = checkpoint.shapes()
    needed = {part.name: part.shape for source in names.sources.values() for part in source.parts}
    missing = tuple(name for name in needed if name not in stored)
    unexpected = [
        name
        for name in stored
        if name not in needed
        and not name.startswith((*names.kept_aside, *names.other_modalities))
        and not name.endswith(names.ignored)
    ]
    misshapen = [
        f"{name}: {list(shapes[stored[name]])} instead of {list(shape)}"
        for name, shape in needed.items()
        if name in stored and shapes[stored[name]] != shape
    ]
    # Some checkpoints store the tied output head a second time.
    if config.tie_word_embeddings and "lm_head.weight" in unexpected and not missing and not misshapen:
        unexpected.remove("lm_head.weight")
        embedding = checkpoint.read(stored[names.sources["embedding"].parts[0].name])
        if not torch.equal(checkpoint.read(stored["lm_head.weight"]), embedding):
            misshapen.append("lm_head.weight: differs from the embedding, though tie_word_embeddings is set")
    if missing or unexpected or misshapen:
        lists = {"missing": missing, "unexpected": tuple(unexpected), "misshapen": tuple(misshapen)}
        lines = [f"{word} ({len(found)}): {_listed(found)}" for word, found in lists.items() if found]
        raise WeightsError(
            f"the weights do not fit the config of model type {config.model_type!r}: " + "; ".join(lines), **lists
        )


def _listed(names: tuple[str, ...]) -> str:
    more = f", and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more


def random_tensors(config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """Seeded float32 tensors under the checkpoint names of this configuration, of sizes that keep a model stable."""
    return random_map_tensors(weight_map(config), seed)


def random_map_tensors(names: WeightMap, seed: int) -> dict[str, torch.Tensor]:
    """`random_tensors` under the names of any map."""
    generator = torch.Generator().manual_seed(seed)
    parts = [(part, source.change) for source in names.sources.values() for part in source.parts]
    # A norm that is stored around 0 gets the values of other norms once 1 is added.
    return {
        part.name: _random_tensor(part, generator).sub_(1.0 if change == "plus_one" else 0.0) for part, change in parts
    }


def _random_tensor(part: TensorPart, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(part.shape, generator=generator)
    if part.name.endswith("A_log"):
        return noise.mul(0.5).add(0.5)
    if part.name.endswith("dt_bias"):
        return noise.sub(2.0)  # steps of about 0.1
    if len(part.shape) == 1:
        return noise.mul(0.1) if part.name.endswith("bias") else noise.mul(0.1).add(1.0)
    return noise.div(part.shape[-1] ** 0.5)


def random_model(config: ModelConfig, seed: int, *, dtype: torch.dtype | str = "float32") -> Decoder:
    """A decoder with seeded random weights, equal on every machine."""
    return fill_decoder(config, TensorsInMemory(random_tensors(config, seed)), dtype=dtype)
