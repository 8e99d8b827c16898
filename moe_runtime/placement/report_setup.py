"""What a report looks at: the record cut in half, the windows to judge, and what is assumed.

Legend: W windows, L MoE layers, N ranks, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_runtime.core import ExpertPlacement
from moe_runtime.errors import ConfigError
from moe_runtime.placement.cost import Cluster, Cost, Hardware, ModelCost
from moe_runtime.placement.planner import plan
from moe_runtime.placement.record import NO_PLACEMENT, PHASES, LoadRecord, split_of_record
from moe_runtime.placement.report_stats import MIN_JUDGED_WINDOWS
from moe_runtime.placement.report_steps import Judge, Judged, evenly_spread
from moe_runtime.placement.report_views import replica_counts
from moe_runtime.placement.stored import Array
from moe_runtime.placement.traffic import Traffic, traffic_of

MAX_JUDGED = 32
"""Held-out windows that are judged, evenly spread over all."""
MAX_COUNTS = 4e7
"""Fewer windows are judged if the steps drawn from them would have more counts (ranks x layers x experts), but no fewer than a
verdict needs."""
MAX_DRIFT_WINDOWS = 256


@dataclass(frozen=True)
class Options:
    """What a report is to assume."""

    hardware: Hardware
    cluster: Cluster
    split: str | None = None
    """None: as in the record, and waterfill if it does not say."""
    phase: str = "all"
    redundant: int | None = None
    """Of the plan that the report makes, and None as many as in force."""
    steps_per_window: int = 4


@dataclass(frozen=True)
class Setup:
    """What all parts of the analysis look at."""

    record: LoadRecord
    options: Options
    cost: Cost
    traffic: Traffic
    end_time_W: Array
    half: int
    """Number of windows planned from."""
    windows: list[int]
    """Judged ones, counted from `half`."""

    @property
    def split(self) -> str:
        """Of run_time_split.ALL_SPLITS."""
        return self.options.split or split_of_record(self.record.meta)

    @property
    def bytes_from(self) -> str:
        return self.judged.pick(self.windows).known_from

    @property
    def past(self) -> Traffic:
        return self.traffic.windows(slice(0, self.half))

    @property
    def judged(self) -> Traffic:
        return self.traffic.windows(slice(self.half, None))

    def judge(self, placement: ExpertPlacement) -> Judged:
        judge = Judge(placement, self.cost, self.split)
        return judge.judge(self.past, self.judged, self.windows, self.options.steps_per_window)


def make_setup(record: LoadRecord, options: Options) -> Setup:
    meta = record.meta
    if options.cluster.num_ranks != meta.num_ranks:
        raise ConfigError(
            f"the record has {meta.num_ranks} ranks, the topology {options.cluster.num_ranks}: a report keeps the number of ranks"
            " (launch/plan.py simulate tries others)"
        )
    traffic = traffic_of(record, options.phase)
    if len(traffic.steps_W) < 2:
        raise ConfigError(
            "the record has one window with tokens; a report needs at least two: record for longer"
        )
    half = len(traffic.steps_W) // 2
    counts_of_window = traffic.counts_WNLE[0].size * options.steps_per_window
    most = min(MAX_JUDGED, max(MIN_JUDGED_WINDOWS, int(MAX_COUNTS / counts_of_window)))
    windows = evenly_spread(len(traffic.steps_W) - half, most)
    some_W = with_tokens(record, options.phase)
    cost = Cost(ModelCost.of(meta), options.hardware, options.cluster)
    return Setup(record, options, cost, traffic, record.end_time_W[some_W], half, windows)


def with_tokens(record: LoadRecord, phase: str) -> Array:
    """bool (W,): the windows that `traffic_of` keeps."""
    tokens_WP = record.tokens_WPN.sum(axis=2)
    tokens_W = tokens_WP.sum(axis=1) if phase == "all" else tokens_WP[:, PHASES.index(phase)]
    some_W: Array = (tokens_W > 0) & (record.num_steps_W > 0)
    return some_W


def in_force(record: LoadRecord) -> ExpertPlacement:
    """The placement of the last window that had a single one; the last of the record's if none had."""
    known = record.placement_W[record.placement_W != NO_PLACEMENT]
    index = int(known[-1]) if len(known) else len(record.meta.placements) - 1
    slots = tuple(tuple(tuple(rank) for rank in layer) for layer in record.meta.placements[index])
    return ExpertPlacement(slots=slots, num_experts=record.meta.num_experts)


def redundant_experts(placement: ExpertPlacement) -> int:
    """Replicas beyond one of each expert, in the layer that has most."""
    return int(replica_counts(placement).sum(axis=1).max()) - placement.num_experts


def make_plan(setup: Setup, redundant: int, current: ExpertPlacement | None) -> ExpertPlacement:
    return plan(
        setup.past.counts_WNLE.sum(axis=1), setup.options.cluster,
        num_slots=setup.record.meta.num_experts + redundant, current=current, max_moved=1.0,
    ).placement  # fmt: skip


def seconds_per_step(setup: Setup) -> float:
    steps = int(setup.traffic.steps_W[1:].sum())
    return float(setup.end_time_W[-1] - setup.end_time_W[0]) / steps


def _drift_groups(setup: Setup) -> int:
    """How many neighbouring windows are taken together to keep at most MAX_DRIFT_WINDOWS."""
    return -(-len(setup.traffic.steps_W) // MAX_DRIFT_WINDOWS)


def drift_loads(setup: Setup) -> Array:
    loads_WLE = setup.traffic.counts_WNLE.sum(axis=1)
    size = _drift_groups(setup)
    whole = len(loads_WLE) // size * size
    grouped: Array = loads_WLE[:whole].reshape(-1, size, *loads_WLE.shape[1:]).sum(axis=1)
    return grouped


def window_s(setup: Setup) -> float:
    ends = setup.end_time_W
    return float(ends[-1] - ends[0]) / (len(ends) - 1) * _drift_groups(setup)
