"""Whether a placement can serve a model; what is wrong is told by layer and slot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moe_runtime.core import ExpertPlacement
from moe_runtime.errors import ConfigError
from moe_runtime.placement.stored import Model, StoredPlacement

MAX_PROBLEMS = 5
"""Told at once."""
Ranks = Sequence[Sequence[int]]
"""[rank][slot] -> expert, of one layer."""


def to_placement(stored: StoredPlacement, model: Model, what: str) -> ExpertPlacement:
    """The placement that a file gives for `model`.

    what: names the file in messages. Raises ConfigError if the file is for another checkpoint, or for another number of
    layers, ranks or experts, or the placement breaks a rule of `ExpertPlacement.slots`.
    """
    if stored.checkpoint and model.checkpoint and stored.checkpoint != model.checkpoint:
        raise ConfigError(
            f"{what}: was made for another checkpoint ({stored.checkpoint[:12]}...) than this one"
            f" ({model.checkpoint[:12]}...): record its load and plan anew, or take `checkpoint` out of the file"
        )
    if stored.num_experts is not None and stored.num_experts != model.num_experts:
        raise ConfigError(
            f"{what}: is for {stored.num_experts} experts, but the model has {model.num_experts}"
        )
    if stored.for_every_layer:
        rows = [stored.slots[0]] * len(model.moe_layers)
    else:
        picked = model.pick_layers(len(stored.slots), stored.layer_ids, what)
        rows = [stored.slots[index] for index in picked]
    if not stored.ranks_known:
        rows = [_share(row[0], model, index, what) for index, row in enumerate(rows)]
    check_slots(rows, model, what)
    return ExpertPlacement(slots=tuple(rows), num_experts=model.num_experts)


def check_slots(slots: Sequence[Ranks], model: Model, what: str) -> None:
    """Raises ConfigError with the first few problems of `slots`, [MoE layer][rank][slot]."""
    if len(slots) != len(model.moe_layers):
        raise ConfigError(f"{what}: has {len(slots)} MoE layers; wanted {len(model.moe_layers)}")
    found: list[str] = []
    for index, ranks in enumerate(slots):
        name = model.layer_name(index)
        found += [f"{name}{problem}" for problem in _layer_problems(ranks, model, slots[0])]
        if len(found) > MAX_PROBLEMS:
            break
    if found:
        more = "; and more" if len(found) > MAX_PROBLEMS else ""
        raise ConfigError(f"{what}: {'; '.join(found[:MAX_PROBLEMS])}{more}")


def _share(flat: Sequence[int], model: Model, index: int, what: str) -> tuple[tuple[int, ...], ...]:
    """A layer's slots, cut into the ranks' shares."""
    width, rest = divmod(len(flat), model.num_ranks)
    if rest:
        raise ConfigError(
            f"{what}: {model.layer_name(index)} has {len(flat)} slots, of which {model.num_ranks} ranks cannot have equally many"
        )
    return tuple(tuple(flat[rank * width : (rank + 1) * width]) for rank in range(model.num_ranks))


def _layer_problems(ranks: Ranks, model: Model, first: Ranks) -> Iterator[str]:
    """Of one layer; each goes on from the layer's name. first: those of MoE layer 0."""
    if len(ranks) != model.num_ranks:
        yield f" has {len(ranks)} ranks; wanted {model.num_ranks}"
        return
    width = len(ranks[0])
    for rank, experts in enumerate(ranks):
        if len(experts) != width:
            yield f", rank {rank} has {len(experts)} slots but rank 0 has {width}: all ranks must have equally many"
    if width != len(first[0]):
        yield f" has {width} slots per rank but MoE layer 0 has {len(first[0])}: all layers must have equally many"
    seen: set[int] = set()
    for rank, experts in enumerate(ranks):
        at: dict[int, int] = {}
        for slot, expert in enumerate(experts):
            if not -1 <= expert < model.num_experts:
                yield (
                    f", rank {rank}, slot {slot}: expert {expert} is out of range;"
                    f" allowed are 0 to {model.num_experts - 1}, and -1 for an empty slot"
                )
            elif expert in at:
                yield f", rank {rank}, slot {slot}: holds expert {expert} again, which slot {at[expert]} has"
            elif expert >= 0:
                at[expert] = slot
        seen |= at.keys()
    for expert in range(model.num_experts):
        if expert not in seen:
            yield f": expert {expert} has no slot"
