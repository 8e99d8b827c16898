"""What callers of `LLM` and `AsyncLLM` get back. Field names follow vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class DumpedRecord:
    """A record of expert loads that has been written; `placement.record.load_record` reads it."""

    folder: Path
    num_windows: int
    num_steps: int


@dataclass(frozen=True)
class ProfileResult:
    """A trace of all ranks that has been written."""

    file: Path
    summary: dict[str, Any]
    """See `profiling.joined.summarize`."""


@dataclass(frozen=True)
class Logprob:
    """Natural logarithm of a token's probability before temperature, penalties and bias."""

    logprob: float
    rank: int | None = None
    """1 for the most likely token of the vocabulary."""
    decoded_token: str | None = None


@dataclass(frozen=True)
class CompletionDelta:
    """News of one completion: what was added since the last delta. The last one has a finish_reason."""

    index: int
    """Which of the request's `n` completions."""
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    """One dict per token of token_ids: the chosen token first, then the most likely ones."""
    num_prompt_tokens: int
    num_cached_tokens: int
    finish_reason: str | None = None
    """`stop`, `length` or `abort`."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for the end-of-sequence token."""


@dataclass
class CompletionOutput:
    """One finished (or growing) completion."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    """Sum of the chosen tokens' logprobs, if logprobs were asked for."""
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """One prompt's completions, in index order."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache (of completion 0)."""
