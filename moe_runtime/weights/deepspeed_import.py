"""From a checkpoint that DeepSpeed-MoE wrote to a model folder in the hub's layout.

DeepSpeed saves a model with `deepspeed.moe.layer.MoE` layers as (`DeepSpeedEngine._save_moe_checkpoint`)

    mp_rank_00_model_states.pt                      under `module`: all tensors but the experts; the router of the MoE layer
                                                    at P is `P.deepspeed_moe.gate.wg.weight`
    layer_{l}_expert_{e}_mp_rank_00_model_states.pt expert e of the l-th MoE layer, counted over MoE layers only:
                                                    `P.deepspeed_moe.experts.deepspeed_experts.{e}.{name in the user's module}`

The names in the hub's layout come from the model family's weight rules, so a new family needs nothing here. Every tensor is
accounted for before the first byte is written; then they are copied one shard at a time.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moe_runtime.errors import CheckpointError, ConfigError
from moe_runtime.models.registry import load_spec
from moe_runtime.weights.deepspeed_files import MAIN_FILE, expert_files, holds_weights, load, tag_folder
from moe_runtime.weights.rules import plan_copies
from moe_runtime.weights.safetensors_file import DTYPES, StoredTensor
from moe_runtime.weights.writing import build_folder, write_shards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from moe_runtime.models.base import WeightRules
    from moe_runtime.models.spec import ModelSpec

ROUTER = ".deepspeed_moe.gate.wg.weight"
EXPERTS = ".deepspeed_moe.experts.deepspeed_experts."
EXPERT_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of an expert's gate, up and down matrices that are known without being told."""
BESIDE_CONFIG = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
    "generation_config.json",
)
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class ImportOptions:
    """What to convert, and how names are to be read."""

    source: Path
    """DeepSpeed's checkpoint: the folder of one tag, or the folder above it with the file `latest`."""
    target: Path
    """The model folder to make. Must not exist, or be empty."""
    config: Path | None = None
    """config.json of the model on the hub, or its folder, whose tokenizer files are copied too. None: in `source`."""
    expert_names: tuple[str, str, str] | None = None
    """What the expert module calls its gate, up and down matrices, without `.weight`. None: one of EXPERT_NAMES."""
    renames: tuple[tuple[str, str], ...] = ()
    """(regular expression, replacement), applied in order to every name but what follows `.deepspeed_moe.`."""
    shard_bytes: int = 2 * 10**9
    """Of a safetensors file; twice as much is held in memory."""


@dataclass(frozen=True)
class ImportReport:
    """What was converted."""

    num_tensors: int
    num_bytes: int
    copied: tuple[str, ...]
    """Files taken over as they are."""
    left_out: tuple[str, ...]
    """Other files of the source: optimizer states."""


@dataclass(frozen=True)
class _Entry:
    """A tensor of the source under its name in the hub's layout."""

    name: str
    path: Path
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int


def import_deepspeed(options: ImportOptions, progress: Callable[[int, int], None]) -> ImportReport:
    """Convert; `options.target` appears only when it is complete.

    progress: called with (bytes written, bytes in all). Raises CheckpointError naming files and tensors that are missing,
    unknown or unreadable, ConfigError for a configuration that DeepSpeed's layer cannot mean.
    """
    folder = tag_folder(options.source)
    reports: list[ImportReport] = []
    if options.target.exists() and (not options.target.is_dir() or any(options.target.iterdir())):
        raise CheckpointError(f"{options.target} exists; name a folder that does not exist yet")
    try:
        options.target.parent.mkdir(parents=True, exist_ok=True)
        build_folder(options.target, lambda made: reports.append(_convert(folder, made, options, progress)))
    except OSError as error:
        raise CheckpointError(f"cannot write {options.target}: {error}") from error
    return reports[0]


def _convert(
    folder: Path, made: Path, options: ImportOptions, progress: Callable[[int, int], None]
) -> ImportReport:
    copied = _copy_config(options.config or options.source, made)
    spec, adapter = load_spec(made)
    _check_gate(spec)
    rules = adapter.rules(spec)
    entries = [*_main_entries(folder, rules, spec, options), *_expert_entries(folder, rules, spec, options)]
    _check_entries(entries, rules, spec, folder)
    total = sum(entry.num_bytes for entry in entries)
    for done in write_shards(made, _tensors(entries), options.shard_bytes):
        progress(done, total)
    left_out = tuple(sorted(path.name for path in folder.iterdir() if not holds_weights(path.name)))
    return ImportReport(len(entries), total, copied, left_out)


def _copy_config(config: Path, made: Path) -> tuple[str, ...]:
    """config.json and the tokenizer's files beside it; the names of the files copied."""
    path = config / "config.json" if config.is_dir() else config
    if not path.is_file():
        raise CheckpointError(
            f"no config.json at {config}: DeepSpeed does not save one, so name that of the model on the hub, or its"
            " folder, with --config"
        )
    shutil.copyfile(path, made / "config.json")
    if not config.is_dir():
        return ("config.json",)
    beside = sorted({p for pattern in BESIDE_CONFIG for p in config.glob(pattern) if p.is_file()})
    for file in beside:
        shutil.copyfile(file, made / file.name)
    return ("config.json", *(file.name for file in beside))


def _check_gate(spec: ModelSpec) -> None:
    """DeepSpeed's gate leaves the weight of a single expert as it is and divides those of several by their sum."""
    if spec.norm_topk_prob != (spec.top_k > 1):
        does, says = ("does not divide", "does") if spec.top_k == 1 else ("divides", "does not")
        raise ConfigError(
            f"config.json: with num_experts_per_tok={spec.top_k}, DeepSpeed's gate {does} the routing weights of a token by"
            f" their sum, but this {spec.architecture} {says} (norm_topk_prob): the outputs would differ"
        )


def _main_entries(folder: Path, rules: WeightRules, spec: ModelSpec, options: ImportOptions) -> list[_Entry]:
    path = folder / MAIN_FILE
    state = load(path)
    if state.get("ds_autoep_layers"):
        raise CheckpointError(f"{path} was written by DeepSpeed's AutoEP, not by DeepSpeed-MoE layers")
    module = state.get("module")
    if not isinstance(module, dict):
        raise CheckpointError(
            f"{path} holds no tensors under `module` (checkpoints of pipeline parallelism are not supported)"
        )
    prefixes = tuple(key.removesuffix(ROUTER) + "." for key in module if key.endswith(ROUTER))
    if not prefixes:
        raise CheckpointError(f"{path} has no tensor named *{ROUTER}: the model has no DeepSpeed-MoE layer")
    entries = []
    for key, tensor in module.items():
        if key.endswith(ROUTER):
            layer = _decoder_layer(key, spec, options)
            name = _source_name(rules, "layers.{layer}.mlp.router.weight").format(layer=layer)
        elif key.startswith(prefixes):
            raise CheckpointError(
                f"{path}: {key} is part of a MoE layer, but neither its router nor an expert; residual MoE layers"
                " (use_residual) have no counterpart in the hub's layout"
            )
        else:
            name = _rename(key, options)
        entries.append(_entry(name, path, key, tensor))
    return entries


def _expert_entries(
    folder: Path, rules: WeightRules, spec: ModelSpec, options: ImportOptions
) -> Iterator[_Entry]:
    files = expert_files(folder, spec.num_moe_layers, spec.num_experts)
    sources = _expert_sources(rules, spec)
    layers: dict[int, int] = {}
    for (moe_layer, expert), path in files.items():
        for key, tensor in load(path).items():
            prefix, found, rest = key.partition(EXPERTS)
            number, _, inner = rest.partition(".")
            if not found or number != str(expert):
                raise CheckpointError(f"{path}: {key} is not a tensor of expert {expert}")
            layer = _decoder_layer(prefix + ".", spec, options)
            if layers.setdefault(layer, moe_layer) != moe_layer:
                raise CheckpointError(f"{path}: {key} belongs to layer {layer}, as does another MoE layer")
            source = sources[_expert_part(inner, path, key, options)]
            yield _entry(source.format(layer=layer, expert=expert), path, key, tensor)


def _expert_sources(rules: WeightRules, spec: ModelSpec) -> tuple[str, str, str]:
    """The hub's names of an expert's gate, up and down matrices."""
    places = {(r.target.rpartition(".")[2], r.first_row): r.source for r in rules.rules if r.per_expert}
    return places["gate_up", 0], places["gate_up", spec.moe_intermediate_size], places["down", 0]


def _expert_part(inner: str, path: Path, key: str, options: ImportOptions) -> int:
    """0, 1 or 2: which of gate, up and down an expert's tensor is."""
    known = (options.expert_names,) if options.expert_names else EXPERT_NAMES
    for names in known:
        if inner.removesuffix(".weight") in names and inner.endswith(".weight"):
            return names.index(inner.removesuffix(".weight"))
    shown = " or ".join(", ".join(f"{name}.weight" for name in names) for names in known)
    raise CheckpointError(
        f"{path}: {key}: {inner!r} is none of an expert's matrices {shown}; other names are given with --experts"
        " GATE,UP,DOWN; experts with biases or with gate and up in one matrix are not supported"
    )


def _decoder_layer(key: str, spec: ModelSpec, options: ImportOptions) -> int:
    """The decoder layer of a MoE layer's tensor: the one number in its name before `deepspeed_moe`."""
    prefix = _rename(key.partition(".deepspeed_moe.")[0], options)
    numbers = [int(part) for part in prefix.split(".") if part.isdecimal()]
    if len(numbers) != 1 or numbers[0] not in spec.moe_layers:
        raise CheckpointError(
            f"{key}: {prefix!r} has to hold the number of one of the MoE layers of config.json,"
            f" {', '.join(map(str, spec.moe_layers))}; --rename changes names"
        )
    return numbers[0]


def _source_name(rules: WeightRules, target: str) -> str:
    """The hub's name of what fills a parameter; the rules name the hub's before other layouts."""
    return next(rule.source for rule in rules.rules if rule.target == target)


def _rename(name: str, options: ImportOptions) -> str:
    for pattern, replacement in options.renames:
        try:
            name = re.sub(pattern, replacement, name)
        # A group that the pattern has not.
        except (re.error, IndexError) as error:
            raise ConfigError(f"--rename {pattern}={replacement}: {error}") from None
    return name


def _entry(name: str, path: Path, key: str, tensor: Any) -> _Entry:
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"{path}: {key} is a {type(tensor).__name__}, not a tensor")
    return _Entry(name, path, key, tuple(tensor.shape), tensor.dtype, tensor.numel() * tensor.element_size())


def _check_entries(entries: list[_Entry], rules: WeightRules, spec: ModelSpec, folder: Path) -> None:
    """The loader's own check, so that what is written can be loaded: names, coverage, shapes and types."""
    stored: dict[str, StoredTensor] = {}
    for e in entries:
        if e.name in stored:
            raise CheckpointError(f"{e.path}: {e.key} becomes {e.name}, as another tensor does")
        dtype = DTYPE_NAMES.get(e.dtype, str(e.dtype).removeprefix("torch."))
        stored[e.name] = StoredTensor(e.name, e.path, dtype, e.shape, 0, e.num_bytes)
    try:
        plan_copies(rules, spec, stored, [list(range(spec.num_experts))] * spec.num_moe_layers)
    except CheckpointError as error:
        raise CheckpointError(
            f"{folder}, with the hub's names, does not fit config.json: {error} (--rename changes names)"
        ) from None


def _tensors(entries: list[_Entry]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors' own copies: in a checkpoint tied tensors share memory, which safetensors does not allow."""
    loaded: tuple[Path, dict[str, Any]] | None = None
    for e in entries:
        if loaded is None or loaded[0] != e.path:
            state = load(e.path)
            loaded = (e.path, state["module"] if e.path.name == MAIN_FILE else state)
        yield e.name, loaded[1][e.key].clone(memory_format=torch.contiguous_format)
