"""What a placement file says, before it is held against a model; and the model that it is held against.

Legend: W windows, L MoE layers, E logical experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from moe_runtime.errors import ConfigError

MAX_LAYERS = 4096
MAX_ENTRIES = 2**26
"""Of one array or list of lists: far above any model's, and low enough to fit into memory."""

Array = npt.NDArray[Any]
Slots = tuple[tuple[tuple[int, ...], ...], ...]
"""[layer][rank][slot] -> expert, -1 for an empty slot."""


@dataclass(frozen=True)
class StoredPlacement:
    """A placement as its file gives it."""

    format: str
    slots: Slots
    """If `ranks_known` is false, each layer has one "rank" with all its slots: the ranks' shares, one after the other."""
    ranks_known: bool
    layer_ids: tuple[int, ...] | None = None
    """Numbers that the file itself gives to its layers; None: they stand in order."""
    for_every_layer: bool = False
    """The file has one list, for all layers."""
    num_experts: int | None = None
    checkpoint: str = ""
    """Identity of the checkpoint it was made for; empty if the file does not say."""
    why: tuple[str, ...] = ()
    """Reasons, a sentence each."""
    prediction: dict[str, Any] | None = None
    """What it promises (`report_data.Prediction`); None: the file does not say."""


@dataclass(frozen=True)
class StoredLoads:
    """Statistics in place of a placement: one is to be planned from them."""

    format: str
    loads_WLE: Array
    """float64, finite and not negative. The L axis counts all decoder layers or MoE layers only; see `Model.pick_layers`."""


@dataclass(frozen=True)
class Model:
    """What a placement is for. `moe_layers[i]` is the decoder layer of MoE layer i, as in `ModelSpec.moe_layers`."""

    num_experts: int
    num_ranks: int
    moe_layers: tuple[int, ...]
    num_layers: int
    """Of the decoder, those without experts included."""
    checkpoint: str = ""
    """Identity of the checkpoint; empty if it is not known."""

    @classmethod
    def of_moe_layers(
        cls, num_moe_layers: int, num_experts: int, num_ranks: int, checkpoint: str = ""
    ) -> Model:
        """One of which only the number of MoE layers is known: as if all decoder layers had experts."""
        return cls(num_experts, num_ranks, tuple(range(num_moe_layers)), num_moe_layers, checkpoint)

    def layer_name(self, index: int) -> str:
        """For messages: MoE layer `index`, and which decoder layer that is, if its number is another one."""
        layer = self.moe_layers[index]
        return f"MoE layer {index}" + (f" (decoder layer {layer})" if layer != index else "")

    def pick_layers(self, num_stored: int, layer_ids: tuple[int, ...] | None, what: str) -> list[int]:
        """For each MoE layer, its index into the file's layers, which may be all decoder layers or those with experts.

        what: names the file in the ConfigError that is raised if they are neither.
        """
        num_moe = len(self.moe_layers)
        if layer_ids is not None:
            for wanted in (self.moe_layers, tuple(range(num_moe)), tuple(range(self.num_layers))):
                if sorted(layer_ids) == list(wanted):
                    numbers = self.moe_layers if len(wanted) != num_moe else wanted
                    return [layer_ids.index(number) for number in numbers]
            raise ConfigError(
                f"{what}: has layers {_ranges(layer_ids)}; wanted {_ranges(self.moe_layers)} (decoder layers with experts)"
                f" or 0-{num_moe - 1} (counting only those)"
            )
        if num_stored == num_moe:
            return list(range(num_moe))
        if num_stored == self.num_layers:
            return list(self.moe_layers)
        alternative = "" if self.num_layers == num_moe else f" or all {self.num_layers} decoder layers"
        raise ConfigError(f"{what}: has {num_stored} layers; wanted {num_moe} (MoE layers){alternative}")


def _ranges(numbers: tuple[int, ...]) -> str:
    """(1, 2, 3, 5) -> 1-3, 5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ", ".join(texts[:8]) + (", ..." if len(texts) > 8 else "") if texts else "none"


def refuse(format_name: str, problem: str) -> NoReturn:
    """Raises ConfigError; whoever knows the file's name puts it before."""
    raise ConfigError(f"as a file of format {format_name}: {problem}")


def integers(value: object, format_name: str, where: str) -> tuple[int, ...]:
    """A list of integers that fit into int32, or ConfigError. Booleans are none."""
    if not isinstance(value, list | tuple):
        refuse(format_name, f"{where} must be a list of experts, not {type(value).__name__}")
    if len(value) > MAX_ENTRIES:
        refuse(format_name, f"{where} has {len(value)} entries; at most {MAX_ENTRIES} are read")
    for i, entry in enumerate(value):
        if type(entry) is not int or not -(2**31) <= entry < 2**31:
            refuse(format_name, f"{where}, slot {i}: {str(entry)[:40]!r} is not the number of an expert")
    return tuple(value)


def integer(value: object, format_name: str, where: str, low: int, high: int) -> int:
    """An integer in a range, both ends included, or ConfigError."""
    if type(value) is not int or not low <= value <= high:
        refuse(format_name, f"{where} is {str(value)[:40]!r}; it must be an integer from {low} to {high}")
    return value


def loads(values: object, format_name: str, where: str) -> Array:
    """float64 (W, L, E) from numbers of shape [steps, layers, experts] or [layers, experts], or ConfigError."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        refuse(format_name, f"{where} is not an array of numbers: {error}")
    if array.ndim == 2:
        array = array[None]
    if array.ndim != 3 or 0 in array.shape:
        refuse(
            format_name,
            f"{where} has shape {list(array.shape)}; wanted [layers, experts] or [steps, layers, experts]",
        )
    bad = ~np.isfinite(array) | (array < 0)
    if bad.any():
        step, layer, expert = (int(i) for i in np.argwhere(bad)[0])
        refuse(
            format_name,
            f"{where}: layer {layer}, expert {expert} has the load {array[step, layer, expert]};"
            " loads are finite and not negative",
        )
    return array
