"""What the commands of launch/plan.py read: loads of experts from a record or a file of statistics, and what a model is like.

Legend: W windows, L MoE layers, E experts.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from moe_runtime.errors import ConfigError
from moe_runtime.placement.cost import Cluster
from moe_runtime.placement.formats import read_file
from moe_runtime.placement.record import META_FILE, LoadRecord, load_record
from moe_runtime.placement.stored import Array, Model, StoredLoads


@dataclass(frozen=True)
class Loads:
    """Loads to plan from."""

    loads_WLE: Array
    record: LoadRecord | None
    """What they come from, if it is a record of this project."""
    checkpoint: str
    """Identity, if it is known, else empty."""


def read_loads(path: Path) -> Loads:
    """From a record's folder, or a file with SGLang's `logical_count` or EPLB's `weight`. Raises ConfigError."""
    if path.is_dir() or path.name == META_FILE:
        record = load_record(path if path.is_dir() else path.parent)
        if not len(record.num_steps_W):
            raise ConfigError(f"record {str(path)!r} is empty: no step was recorded")
        return Loads(record.loads, record, record.meta.checkpoint)
    stored = read_file(path)
    if not isinstance(stored, StoredLoads):
        raise ConfigError(f"{path}: holds a placement ({stored.format}), not loads of experts")
    return Loads(stored.loads_WLE, None, "")


def read_record(path: Path) -> LoadRecord:
    """A record's folder, with at least one window. Raises ConfigError."""
    loads = read_loads(path)
    if loads.record is None:
        raise ConfigError(
            f"{path}: has sums only; this needs a record made by this project (a folder with {META_FILE})"
        )
    return loads.record


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """What `model_of` reads."""
    group = parser.add_argument_group("the model, as far as files do not tell")
    group.add_argument(
        "--model", type=Path, metavar="DIR", help="checkpoint folder, from which all of this is read"
    )
    group.add_argument("--experts", type=number, metavar="E", help="number of experts")
    group.add_argument(
        "--decoder-layers",
        type=number,
        metavar="N",
        help="number of decoder layers, those without experts included",
    )
    group.add_argument(
        "--moe-layers", type=ranges, metavar="LIST", help="decoder layers that have experts, as 3-60 or 1,3,5"
    )


def model_of(
    args: argparse.Namespace,
    num_ranks: int,
    assumed_layers: tuple[int, ...],
    num_experts: int,
    checkpoint: str = "",
) -> Model:
    """The model as flags or the checkpoint say; the rest: what is assumed if they do not."""
    if args.model is not None:
        if args.experts is not None or args.decoder_layers is not None or args.moe_layers is not None:
            raise ConfigError("--model tells --experts, --decoder-layers and --moe-layers: leave them out")
        # Takes transformers, thus seconds.
        from moe_runtime.models.registry import load_spec
        from moe_runtime.weights.demo_model import resolve_model
        from moe_runtime.weights.identity import checkpoint_identity

        folder = resolve_model(str(args.model))
        spec, _ = load_spec(folder)
        return Model(
            spec.num_experts, num_ranks, spec.moe_layers, spec.num_layers, checkpoint_identity(folder)
        )
    moe_layers = args.moe_layers or assumed_layers
    decoder_layers = args.decoder_layers or max(moe_layers) + 1
    if max(moe_layers) >= decoder_layers:
        raise ConfigError(
            f"--moe-layers names layer {max(moe_layers)}; --decoder-layers {decoder_layers} has none of it"
        )
    return Model(args.experts or num_experts, num_ranks, moe_layers, decoder_layers, checkpoint)


def cluster_of(topology: str | None, num_ranks: int) -> Cluster:
    """`nodes=2x8`, or all ranks on one node. Raises ConfigError if its ranks are not `num_ranks`."""
    if topology is None:
        return Cluster.single(num_ranks)
    cluster = Cluster.parse(topology)
    if cluster.num_ranks != num_ranks:
        raise ConfigError(f"--topology {topology} has {cluster.num_ranks} ranks, --ep {num_ranks}")
    return cluster


def number(text: str) -> int:
    """An argument that is an integer from 1."""
    if not text.isdecimal() or not 1 <= int(text) <= 2**20:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer from 1")
    return int(text)


def count(text: str) -> int:
    """An argument that is an integer from 0."""
    return 0 if text == "0" else number(text)


def counts(text: str) -> tuple[int, ...]:
    """An argument as `0,16,32`."""
    return tuple(count(part) for part in text.split(","))


def ranges(text: str) -> tuple[int, ...]:
    """An argument as `0,3-5`: ascending numbers, each once."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        low = count(first)
        numbers += range(low, (count(last) if dash else low) + 1)
    if not numbers or len(numbers) > 4096 or sorted(set(numbers)) != numbers:
        raise argparse.ArgumentTypeError(f"{text!r} must be ascending numbers, as 3-60 or 1,3,5")
    return tuple(numbers)
