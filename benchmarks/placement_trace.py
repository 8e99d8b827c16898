"""What a joined trace of all ranks (`LLM.stop_profile`) says of the MoE layers' time, by the clock that ranks of one host share.

The MoE part of a layer begins when the last rank has left its router and ends when the last rank has its results back: dispatch, the
fullest rank's experts, combine. That is what the cost model (`placement.cost`) predicts.

Legend: X passes through MoE layers (layer, and which pass through it), N ranks.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_PARTS = ("router", "dispatch", "wait", "experts", "combine")


@dataclass(frozen=True)
class MoeTimes:
    """Milliseconds of all traced passes through MoE layers, and of the steps that they are in."""

    moe_ms_X: Array
    experts_ms_XN: Array
    rows_XN: Array
    step_ms: float
    """Sum over steps."""
    num_steps: int

    @property
    def moe_ms(self) -> float:
        return float(self.moe_ms_X.sum())

    @property
    def fullest_ms(self) -> float:
        """Experts of the rank that takes longest in each pass."""
        return float(self.experts_ms_XN.max(axis=1).sum())

    @property
    def balancedness(self) -> float:
        """Rows of the mean rank over those of the fullest, summed over passes; see the glossary."""
        return float(self.rows_XN.mean(axis=1).sum() / self.rows_XN.max(axis=1).sum())

    def summary(self) -> dict[str, float]:
        """JSON-ready."""
        return {
            "moe_ms": self.moe_ms,
            "fullest_ms": self.fullest_ms,
            "step_ms": self.step_ms,
            "num_steps": self.num_steps,
            "balancedness": self.balancedness,
        }


def read_times(trace: Path) -> MoeTimes:
    """From a trace without overlap (`overlap="off"`): one dispatch, one pass through the experts and one combine in each layer."""
    by_rank: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event["ph"] == "X" and event["tid"] == 0:
            by_rank[event["pid"]].append(event)
    passes = [_passes(events) for _, events in sorted(by_rank.items())]
    common = sorted(set.intersection(*(set(p) for p in passes)))
    began_XN, ended_XN, experts_XN, rows_XN = (
        np.array([[p[key][i] for p in passes] for key in common]) for i in range(4)
    )
    steps = [e for e in by_rank[0] if e["name"] == "step"]
    return MoeTimes(
        moe_ms_X=(ended_XN.max(axis=1) - began_XN.max(axis=1)) / 1e3,
        experts_ms_XN=experts_XN / 1e3,
        rows_XN=rows_XN,
        step_ms=sum(e["dur"] for e in steps) / 1e3,
        num_steps=len(steps),
    )


def _passes(events: list[dict[str, Any]]) -> dict[tuple[int, int], tuple[float, float, float, float]]:
    """One rank's (layer, which pass through it) -> router's end, results' arrival, microseconds and rows of the experts."""
    spans: defaultdict[int, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        if event["name"] in _PARTS:
            spans[event["args"]["moe_layer"]][event["name"]].append(event)
    passes = {}
    for layer, of in spans.items():
        # Two waits a pass: for rows, and for their results.
        for i, (router, experts, last) in enumerate(
            zip(of["router"], of["experts"], of["wait"][1::2], strict=True)
        ):
            began, ended = router["ts"] + router["dur"], last["ts"] + last["dur"]
            passes[layer, i] = (began, ended, experts["dur"], experts["args"]["rows"])
    return passes
