"""The placement of experts that a server starts with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_runtime.errors import ConfigError
from moe_runtime.placement.cost import Cluster
from moe_runtime.placement.formats import parse, read_file
from moe_runtime.placement.layout import check_redundant, contiguous
from moe_runtime.placement.planner import plan
from moe_runtime.placement.stored import Model, StoredLoads
from moe_runtime.placement.validate import to_placement
from moe_runtime.weights.identity import checkpoint_identity

if TYPE_CHECKING:
    from moe_runtime.config import EngineConfig
    from moe_runtime.core import ExpertPlacement
    from moe_runtime.models.spec import ModelSpec

TRIVIAL = "trivial"
"""SGLang's word for no file at all."""


def initial_placement(config: EngineConfig, spec: ModelSpec, num_ranks: int) -> ExpertPlacement:
    """In order, or as --init-expert-location says. Raises ConfigError."""
    given = config.init_expert_location
    if given is None or given == TRIVIAL:
        return contiguous(spec.num_moe_layers, spec.num_experts, num_ranks, config.num_redundant_experts)
    inline = given.lstrip()[:1] in ("{", "[")
    what = "init_expert_location" if inline else f"init_expert_location={given}"
    try:
        stored = parse(given.encode()) if inline else read_file(given)
    except ConfigError as error:
        raise ConfigError(f"init_expert_location: {error}") from error
    model = placement_model(spec, num_ranks, checkpoint_identity(config.model))
    if isinstance(stored, StoredLoads):
        return _planned(stored, model, config.num_redundant_experts, what)
    placement = to_placement(stored, model, what)
    copies = sum(expert >= 0 for rank in placement.slots[0] for expert in rank) - spec.num_experts
    if config.num_redundant_experts not in (0, copies):
        raise ConfigError(
            f"num_redundant_experts={config.num_redundant_experts}, but {what} has {copies}: the file says how many there are;"
            " leave num_redundant_experts out"
        )
    return placement


def placement_model(spec: ModelSpec, num_ranks: int, checkpoint: str = "") -> Model:
    """What placement files are held against."""
    return Model(spec.num_experts, num_ranks, spec.moe_layers, spec.num_layers, checkpoint)


def _planned(stored: StoredLoads, model: Model, num_redundant: int, what: str) -> ExpertPlacement:
    """From statistics; as if all ranks were in one node."""
    layers = model.pick_layers(stored.loads_WLE.shape[1], None, what)
    if stored.loads_WLE.shape[2] != model.num_experts:
        raise ConfigError(
            f"{what}: is for {stored.loads_WLE.shape[2]} experts, but the model has {model.num_experts}"
        )
    check_redundant(num_redundant, model.num_experts, model.num_ranks)
    cluster = Cluster.single(model.num_ranks)
    return plan(stored.loads_WLE[:, layers], cluster, num_slots=model.num_experts + num_redundant).placement
