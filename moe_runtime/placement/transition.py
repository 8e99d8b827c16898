"""From one placement to another in rounds. A round fills empty slots with copies, and only then changes the map.

Every round starts from, and leads to, a placement that is whole: each expert has a slot. So the old map serves while copies
travel, and a round can be given up at any time. It keeps one slot of every rank empty for the next round; then there
always is a next one (see `_walk`).

Legend: N ranks, p slots per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moe_runtime.core import ExpertPlacement
from moe_runtime.errors import ConfigError

LayerSlots = tuple[tuple[int, ...], ...]
"""[rank][slot] -> expert, -1 for an empty slot."""


@dataclass(frozen=True)
class ExpertCopy:
    """One expert's weights travel to an empty slot."""

    expert: int
    from_rank: int
    from_slot: int
    to_rank: int
    to_slot: int


@dataclass(frozen=True)
class LayerChange:
    """What a round does to one layer: after the copies `after` may take the place of `before`."""

    layer: int
    before: LayerSlots
    after: LayerSlots
    copies: tuple[ExpertCopy, ...]


def with_empty_slots(placement: ExpertPlacement, num_empty: int) -> ExpertPlacement:
    """The placement with `num_empty` more slots on every rank, all empty."""
    more = (-1,) * num_empty
    slots = tuple(tuple(rank + more for rank in layer) for layer in placement.slots)
    return replace(placement, slots=slots)


def check_reachable(current: ExpertPlacement, target: ExpertPlacement) -> None:
    """Raises ConfigError, with layer and rank, unless rounds lead from `current` to `target`."""
    if target.num_experts != current.num_experts or len(target.slots) != len(current.slots):
        raise ConfigError(
            f"the placement is for {len(target.slots)} MoE layers of {target.num_experts} experts;"
            f" the model has {len(current.slots)} of {current.num_experts}"
        )
    for layer, (old, new) in enumerate(zip(current.slots, target.slots, strict=True)):
        if len(new) != len(old):
            raise ConfigError(f"MoE layer {layer}: the placement has {len(new)} ranks; there are {len(old)}")
        seen: set[int] = set()
        for rank, slots in enumerate(new):
            held = [expert for expert in slots if expert != -1]
            wrong = [e for e in held if not 0 <= e < current.num_experts]
            if wrong:
                raise ConfigError(
                    f"MoE layer {layer}, rank {rank}: expert {wrong[0]} does not exist; allowed are 0 to"
                    f" {current.num_experts - 1}, and -1 for an empty slot"
                )
            if len(set(held)) < len(held):
                raise ConfigError(f"MoE layer {layer}, rank {rank} holds an expert twice: {held}")
            if len(held) > len(old[rank]) - 1:
                raise ConfigError(
                    f"MoE layer {layer}, rank {rank}: {len(held)} experts; it has {len(old[rank])} slots, of which one"
                    f" stays empty for the next move, so at most {len(old[rank]) - 1} are allowed"
                )
            seen.update(held)
        if missing := set(range(current.num_experts)) - seen:
            raise ConfigError(f"MoE layer {layer}: expert {min(missing)} has no slot")


def next_round(current: ExpertPlacement, target: ExpertPlacement) -> list[LayerChange]:
    """The next changes on the way, one for each layer that is not there yet; none if all are.

    Which slot of its rank an expert is in does not matter: those that stay keep theirs. `check_reachable` must have passed,
    and every rank of `current` must have an empty slot.
    """
    changes = []
    for layer, (before, wanted) in enumerate(zip(current.slots, target.slots, strict=True)):
        arrivals = _Round(before, wanted).arrivals()
        change = _change(layer, before, wanted, arrivals)
        if change.after != before:
            changes.append(change)
    return changes


def num_copies(current: ExpertPlacement, target: ExpertPlacement) -> int:
    """Experts that have to travel, over all layers and ranks."""
    return sum(
        len(set(new) - set(old) - {-1})
        for before, after in zip(current.slots, target.slots, strict=True)
        for old, new in zip(before, after, strict=True)
    )


def apply_changes(placement: ExpertPlacement, changes: Sequence[LayerChange]) -> ExpertPlacement:
    """The placement after a whole round."""
    slots = list(placement.slots)
    for change in changes:
        slots[change.layer] = change.after
    return replace(placement, slots=tuple(slots), version=placement.version + 1)


class _Round:
    """Chooses which experts arrive on which ranks of one layer in one round."""

    def __init__(self, before: LayerSlots, wanted: LayerSlots) -> None:
        self.limit = [len(slots) - 1 for slots in before]
        """Experts a rank may hold after the round."""
        self.have = [set(slots) - {-1} for slots in before]
        self.want = [set(slots) - {-1} for slots in wanted]
        self.empty = [slots.count(-1) for slots in before]
        """Slots in which something can arrive."""
        self.found: list[tuple[int, int]] = []
        """(rank, expert) that arrive."""
        self.settled = {e for have, want in zip(self.have, self.want, strict=True) for e in have & want}
        """Experts that a rank which is to hold them does hold after what has been found: others may drop them."""

    def arrivals(self) -> list[tuple[int, int]]:
        """In a fixed order, so that all ranks find the same."""
        ranks = range(len(self.have))
        progress = True
        while progress:
            progress = False
            for rank in ranks:
                for expert in sorted(self.want[rank] - self._after(rank)):
                    if self._has_room(rank):
                        self._add(rank, expert)
                        progress = True
            for rank in ranks if not progress else ():
                if self.want[rank] - self._after(rank) and (chain := self._walk(rank)):
                    for to_rank, expert in chain:
                        self._add(to_rank, expert)
                    progress = True
                    break
        return self.found

    def _add(self, rank: int, expert: int) -> None:
        self.found.append((rank, expert))
        self.empty[rank] -= 1
        self.have[rank].add(expert)
        self.settled.add(expert)

    def _after(self, rank: int) -> set[int]:
        """What the rank holds after what has been found: what it shall hold, and what nobody else has taken over yet."""
        return (self.have[rank] & self.want[rank]) | (self.have[rank] - self.settled)

    def _has_room(self, rank: int) -> bool:
        return self.empty[rank] > 0 and len(self._after(rank)) < self.limit[rank]

    def _walk(self, start: int) -> list[tuple[int, int]]:
        """Arrivals that give each rank on a way as many experts as they take from it; empty if there are none.

        A rank that misses an expert and is full holds one that is to go; some rank misses that. The way follows such
        experts until a rank has room, or until it meets itself: then what lies before the meeting is left out.
        """
        chain: list[tuple[int, int]] = []
        visited: list[int] = []
        rank = start
        while rank not in visited:
            visited.append(rank)
            step = next(
                (
                    (to, expert)
                    for expert in sorted(self._after(rank) - self.want[rank])
                    for to, want in enumerate(self.want)
                    if expert in want and self.empty[to] > 0
                ),
                None,
            )
            if step is None:
                return []
            chain.append(step)
            rank = step[0]
            if self._has_room(rank):
                return chain
        return chain[visited.index(rank) :]


def _change(
    layer: int, before: LayerSlots, wanted: LayerSlots, arrivals: Sequence[tuple[int, int]]
) -> LayerChange:
    """Arrivals take the lowest empty slots; each comes from a holder that has the fewest to send."""
    slots = [list(rank) for rank in before]
    sends = [0] * len(before)
    copies = []
    for to_rank, expert in arrivals:
        source = min((r for r in range(len(before)) if expert in before[r]), key=lambda r: (sends[r], r))
        sends[source] += 1
        to_slot = slots[to_rank].index(-1)
        slots[to_rank][to_slot] = expert
        copies.append(ExpertCopy(expert, source, before[source].index(expert), to_rank, to_slot))
    want = [set(rank) for rank in wanted]
    settled = {e for rank, held in enumerate(slots) for e in held if e in want[rank]}
    after = tuple(
        tuple(-1 if e in settled and e not in want[rank] else e for e in held)
        for rank, held in enumerate(slots)
    )
    return LayerChange(layer, before, after, tuple(copies))
