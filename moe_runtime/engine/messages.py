"""What the front-end and the ranks say to each other: msgpack over ZeroMQ, never pickle.

The front-end numbers its messages ("ticks") and sends every tick to every rank, with the commands that concern
that rank; so ranks can tell in the lockstep header whether all have seen the same things before they go idle.
"""

from __future__ import annotations

import msgspec

from moe_runtime.core import SamplingParams, TokenLogprobs


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


Command = Submit | Abort | Stop | ResetPrefixCache


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
    step_tokens: int = 0
    """Tokens computed in the last step."""


class StepOutput(msgspec.Struct, tag="step"):
    """Rank -> front-end after a step that produced something."""

    rank: int
    updates: list[SequenceUpdate]
    stats: RankStats


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


RankMessage = StepOutput | Ready | Progress | Failed
