"""A report's numbers: what report.json holds. `report.analyse` computes them, `tools/plan_report` shows them.

"Before" is the placement in force at the end of the record, "after" the one that is judged. Times are modelled microseconds of the
MoE layers per step, unless they are called measured. Judged windows are held out: the second half of the record.

Legend: L MoE layers, E experts, N ranks, T points in time.
"""

from __future__ import annotations

import msgspec

REPORT_VERSION = 1
Matrix = list[list[float]]


class Interval(msgspec.Struct, frozen=True):
    """A mean, and the bounds between which it lies with 90 % confidence; no bounds for a single window."""

    mean: float
    low: float | None
    high: float | None


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What was recorded, and what the numbers were computed with."""

    model: str
    checkpoint: str
    recorded_on: str
    started_at: str
    modelled_hardware: str
    num_nodes: int
    ranks_per_node: int
    split: str
    phase: str
    num_layers: int
    num_experts: int
    top_k: int
    num_windows: int
    num_steps: int
    num_tokens: int
    seconds: float
    """Between the ends of the first and the last window."""
    seconds_per_step: float
    """Measured, from one step's end to the next's; idle times included."""
    planned_windows: int
    """Windows of the first half."""
    judged_windows: list[int]
    """Those that were judged, counted from the record's first window with tokens."""
    steps_per_window: int
    """Most steps that were drawn from a judged window."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The answer."""

    word: str
    """`apply`, `not worth it` or `not enough evidence`."""
    why: str
    gain: Interval
    """1 - time after / time before, of the same judged windows."""
    before_us: Interval
    after_us: Interval
    saved_us: float
    """Per step."""
    moved_slots: int
    migration_bytes: int
    migration_us: float
    """If nothing else uses the links and nothing overlaps with it."""
    payback_steps: float | None
    """Steps until the migration's time is saved; None if nothing is saved."""
    payback_s: float | None
    redundant_before: int
    """Replicas beyond one of each expert, per layer."""
    redundant_after: int
    extra_bytes_per_rank: int
    """Experts' weights that a rank keeps more than before, all layers."""


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """Why an expert has several replicas after the change."""

    layer: int
    expert: int
    ranks: list[int]
    load: float
    """Of the expert, in the windows planned from; 1 is its layer's mean."""
    why: str


class Layers(msgspec.Struct, frozen=True, kw_only=True):
    """The heat maps."""

    load_LE: Matrix
    """Load of each expert over the whole record; 1 is the layer's mean."""
    replicas_before_LE: list[list[int]]
    replicas_after_LE: list[list[int]]
    fullest_before_L: list[float]
    """Rows of the fullest rank over those of the mean rank, all judged windows together."""
    fullest_after_L: list[float]
    unused_L: list[int]
    """Experts without a single token."""


class OverTime(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of each rank, all layers together, over those of the mean rank; of groups of neighbouring windows."""

    seconds_T: list[float]
    """Since the end of the first window, at the end of each group."""
    before_TN: Matrix
    after_TN: Matrix
    first_judged: int
    """The first group that only has held-out windows."""


class Losses(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time goes; the parts add up to total_us. See docs/placement-report.md."""

    total_us: float
    even_us: float
    packing: float
    drift: float
    noise: float
    padding: float
    incast: float


class Between(msgspec.Struct, frozen=True, kw_only=True):
    """From rank (row) to rank (column)."""

    bytes_from: str
    """`routes` that were recorded, expected from `counts`, or `routes and counts` where only some ranks or windows have routes."""
    bytes_before_NN: Matrix
    """Rows to experts and back, per step."""
    bytes_after_NN: Matrix
    wait_before_NN: Matrix
    """How long the row's rank waits for the column's, per step, because that one computes longest in a layer."""
    wait_after_NN: Matrix
    measured_wait_us_N: list[float]
    """As recorded, per step."""
    measured_forward_us_N: list[float]
    balancedness_before: float
    balancedness_after: float


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Experts of a layer that the same tokens choose more often than chance would have it."""

    layer: int
    experts: list[int]
    lift: float
    """Tokens that chose two of them together, over those expected if experts were chosen independently."""
    tokens: int
    """(token, pair of the cluster's experts) that were counted."""
    ranks_before: int
    """Fewest ranks that hold all of them."""
    ranks_after: int


class Coactivation(msgspec.Struct, frozen=True, kw_only=True):
    """From the routes that were kept."""

    num_tokens: int
    clusters: list[Cluster]
    ranks_per_token_before: float
    """Mean number of ranks that a token's rows go to in a layer, its own included, under the static split."""
    ranks_per_token_after: float


class SweepPoint(msgspec.Struct, frozen=True, kw_only=True):
    """What another number of redundant experts would do, planned from the first half and judged by the same windows."""

    redundant: int
    step_us: Interval
    gain: Interval
    """Against the placement in force."""
    balancedness: float
    bytes_per_rank: int
    """Experts' weights on a rank."""


class Lasting(msgspec.Struct, frozen=True, kw_only=True):
    """How long the pattern of the load lasts."""

    similarity_lag: list[float]
    window_s: float
    """Mean length of a window: the unit of lags."""
    lasting: bool
    half_life_s: float | None
    longest_lag_s: float
    """How far the record lets one look."""
    replan_interval_s: float | None


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan file says of the gain it is to bring; the next report holds it against what came."""

    gain: Interval
    before_us: float
    after_us: float
    hardware: str
    split: str
    measured_forward_us: float
    """Of a step of the slowest rank, in the record it was planned from."""
    measured_tokens: float
    """Per step, of all ranks."""
    before: list[list[list[int]]]
    """The placement it was compared with: [layer][rank][slot] -> expert."""


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the last plan kept its promise."""

    predicted: Interval
    achieved: Interval
    """Modelled, on this record's windows under the plan: against the same windows under the placement before it."""
    kept: bool
    """Whether the achieved gain is at least the lower bound of the predicted one."""
    num_windows: int
    measured_before_us: float
    """Of a forward pass, in the record that was planned from."""
    measured_after_us: float
    """Of a forward pass, in this record under the plan."""
    measured_tokens_before: float
    """Per step; if it differs much from the next, the measured times cannot be compared."""
    measured_tokens_after: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    version: int = REPORT_VERSION
    about: About
    verdict: Verdict
    notes: list[str]
    layers: Layers
    reasons: list[Reason]
    over_time: OverTime
    losses_before: Losses
    losses_after: Losses
    between: Between
    coactivation: Coactivation | None
    """None without routes."""
    sweep: list[SweepPoint]
    lasting: Lasting
    audit: Audit | None
