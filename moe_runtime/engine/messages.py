"""What the front-end and the ranks say to each other: msgpack over ZeroMQ, never pickle.

The front-end numbers its messages ("ticks") and sends every tick to every rank, with the commands that concern
that rank; so ranks can tell in the lockstep header whether all have seen the same things before they go idle.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal

import msgspec

from moe_runtime.core import SamplingParams, TokenLogprobs
from moe_runtime.profiling.timeline import Span


class Submit(msgspec.Struct, tag="submit"):
    """Start a sequence on the receiving rank."""

    request_id: str
    """Unique per sequence."""
    prompt_token_ids: list[int]
    sampling: SamplingParams
    """`seed` is always set here; it already includes the completion's index."""
    eos_token_ids: list[int]


class Abort(msgspec.Struct, tag="abort"):
    """Forget a sequence; unknown ids are ignored (it may just have finished)."""

    request_id: str


class Stop(msgspec.Struct, tag="stop"):
    """End the ranks after this step. The front-end drains first if it wants to."""


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache"):
    """Drop every cached block that no running sequence uses."""


class Rebalance(msgspec.Struct, tag="rebalance"):
    """To rank 0: look at the load now, or move experts to where they are wanted."""

    request: int
    """Number from 1, by which the answer is known."""
    slots: list[list[list[int]]] | None = None
    """[layer][rank][slot] -> expert, -1 for none; None: plan from the load."""
    force: bool = False
    """Carry a plan out even if it is not expected to be worth it."""


class RecordLoads(msgspec.Struct, tag="record_loads"):
    """Start, stop or write the record of expert loads; the rank answers with Recorded."""

    request: int
    """By which the answer is known."""
    action: Literal["start", "stop", "dump"]
    folder: str = ""
    """Where to write; on the rank's host."""
    model: str = ""
    """The name under which the model is served, for the record."""


class Profile(msgspec.Struct, tag="profile"):
    """Keep the spans of the next steps and send them as Profiled."""

    request: int
    """By which the answer is known."""
    num_steps: int
    """0: end what is under way, and send what there is."""


Command = Submit | Abort | Stop | ResetPrefixCache | RecordLoads | Profile | Rebalance


class Tick(msgspec.Struct):
    """Front-end -> each rank."""

    number: int
    """1, 2, 3, ... without gaps."""
    commands: list[Command]


class SequenceUpdate(msgspec.Struct):
    """News of one sequence."""

    request_id: str
    new_token_ids: list[int] = []
    new_logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    finish_reason: str | None = None
    """`stop`, `length`, `abort` or `error`."""
    stop_reason: int | None = None
    error: str | None = None
    """With finish_reason `error`: what was wrong with the request."""
    error_param: str | None = None


STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""vLLM's buckets for the tokens of a step."""
_TO_TEN_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0)
REQUEST_TIME_BOUNDS = (
    *_TO_TEN_S,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
    1920.0,
    7680.0,
)
"""vLLM's buckets for what a request takes as a whole, in seconds."""


class Distribution(msgspec.Struct):
    """Values seen since start, counted in buckets."""

    counts: list[int]
    """How many were at most each bound (and above the one before); the last one: above all bounds."""
    total: float = 0
    """Their sum."""

    @classmethod
    def empty(cls, bounds: Sequence[float]) -> Distribution:
        """No values yet, for ascending `bounds`."""
        return cls([0] * (len(bounds) + 1))

    def add(self, value: float, bounds: Sequence[float]) -> None:
        """Count a value; `bounds` are those it was made with."""
        self.counts[bisect_left(bounds, value)] += 1
        self.total += value


STALL_BOUNDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Buckets of how long a step waited for a change of the placement, in seconds."""


class EplbStats(msgspec.Struct):
    """Rebalancing as one rank sees it; what is decided is rank 0's."""

    state: str = "idle"
    """`idle`, `planning` or `moving`."""
    applied: int = 0
    skipped: int = 0
    """Looks at the load after which nothing was moved."""
    failed: int = 0
    """Looks or requests that came to nothing before anything was moved."""
    rolled_back: int = 0
    """Moves given up; the map is as before their last round."""
    moved_bytes: int = 0
    """Weights this rank has fetched."""
    version: int = 0
    """Of the placement in force: rounds since start."""
    last_applied_at: float = 0.0
    """Unix time; 0: never."""
    degraded: str = ""
    """What failed, until the next success."""
    decision: str = ""
    """The last one, in words."""
    answered: int = 0
    """The last request of an operator that is over, by number."""
    answer: str = ""
    """What came of it: `applied`, `skipped`, `failed` or `rolled_back`."""
    answer_reason: str = ""
    gain: float | None = None
    """Expected share of the MoE layers' time saved by the last plan."""
    balancedness: float | None = None
    """Of the current placement when it was looked at last."""
    stalls_s: Distribution = msgspec.field(default_factory=lambda: Distribution.empty(STALL_BOUNDS))
    """Time that steps waited for changes of the map."""


class RankStats(msgspec.Struct):
    """A rank's gauges after a step, and counters since start."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    """Blocks held by the prefix cache only; they can be evicted."""
    prompt_tokens: int = 0
    """Of prompts whose first token has been sampled, reused tokens included."""
    generation_tokens: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    preemptions: int = 0
    steps: int = 0
    wait_us: int = 0
    """Waited for other ranks' rows."""
    forward_us: int = 0
    """Spent in forward passes."""
    bytes_local: int = 0
    """Of rows that the dispatcher kept, since their experts are this rank's own."""
    bytes_within_host: int = 0
    """Of rows and the words beside them that it sent to other ranks of this host."""
    bytes_between_hosts: int = 0
    """Likewise, to ranks of other hosts."""
    dispatch_rounds: int = 0
    """Exchanges between ranks, in dispatch and combine."""
    two_batch_steps: int = 0
    """Steps of which one half was computed while the other half's tokens travelled."""
    chunked_steps: int = 0
    """Steps whose MoE rows travelled in chunks."""
    graph_steps: int = 0
    """Steps that were replayed from a CUDA graph."""
    step_tokens: int = 0
    """Tokens computed in the last step."""
    tokens_of_steps: Distribution = msgspec.field(
        default_factory=lambda: Distribution.empty(STEP_TOKEN_BOUNDS)
    )
    """Of the steps that had any, in the buckets of STEP_TOKEN_BOUNDS."""
    queue_times_s: Distribution = msgspec.field(
        default_factory=lambda: Distribution.empty(REQUEST_TIME_BOUNDS)
    )
    """From a sequence's arrival at the rank to the first step with tokens of it, in those of REQUEST_TIME_BOUNDS."""
    eplb: EplbStats | None = None
    """None without rebalancing."""


class StepOutput(msgspec.Struct, tag="step"):
    """Rank -> front-end after a step that produced something."""

    rank: int
    updates: list[SequenceUpdate]
    stats: RankStats


class PlacementNews(msgspec.Struct, tag="placement"):
    """Rank -> front-end: where experts are, after each round of a move."""

    rank: int
    version: int
    slots: list[list[list[int]]]
    """[layer][rank][slot] -> expert, -1 for an empty slot."""


class LoadNews(msgspec.Struct, tag="loads"):
    """Rank -> front-end, about once a second while it computes: what its experts have done since the last one."""

    rank: int
    steps: list[tuple[int, int, list[int]]]
    """(step, index into placement.record.PHASES, expert rows computed in each MoE layer)."""


class Recorded(msgspec.Struct, tag="recorded"):
    """Rank -> front-end: the answer to RecordLoads."""

    rank: int
    request: int
    num_windows: int = 0
    num_steps: int = 0
    """In the record."""
    error: str = ""
    """Why it could not be done."""


class Profiled(msgspec.Struct, tag="profiled"):
    """Rank -> front-end: what a rank did when, once the steps of a Profile are over."""

    rank: int
    request: int
    spans: list[Span]


class MoeShape(msgspec.Struct):
    """What placements of this model are held against; as `placement.stored.Model`."""

    num_experts: int
    moe_layers: tuple[int, ...]
    """Number in the decoder of each layer with experts."""
    num_layers: int
    """Of the decoder."""
    checkpoint: str
    """Its identity."""


class Ready(msgspec.Struct, tag="ready"):
    """Rank -> front-end once it can take requests."""

    rank: int
    pid: int
    """0 if the rank runs on another host than the front-end."""
    max_model_len: int
    vocab_size: int
    num_kv_blocks: int
    block_size: int
    info: dict[str, str]
    """What was chosen and why, for /server_info."""
    placement: list[list[list[int]]] | None = None
    """As PlacementNews.slots; None if experts stay where they are."""
    moe: MoeShape | None = None
    """None if experts stay where they are."""


class Progress(msgspec.Struct, tag="progress"):
    """Rank -> front-end while loading."""

    rank: int
    pid: int
    """0 if the rank runs on another host than the front-end."""
    stage: str
    fraction: float


class Failed(msgspec.Struct, tag="failed"):
    """Rank -> front-end: it is about to exit with an error the user should read."""

    rank: int
    kind: str
    """Class name of the error."""
    message: str


RankMessage = StepOutput | PlacementNews | LoadNews | Recorded | Profiled | Ready | Progress | Failed
