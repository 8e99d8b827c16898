"""What the server needs from the engine. `AsyncLLM` is the implementation; tests of the protocol use another."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

from moe_runtime.config import EngineConfig
from moe_runtime.core import SamplingParams
from moe_runtime.engine.messages import RankStats, Ready
from moe_runtime.engine.outputs import CompletionDelta, DumpedRecord, ProfileResult
from moe_runtime.engine.tokenizer import Tokenizer
from moe_runtime.errors import EngineDeadError
from moe_runtime.placement.balancedness import BalanceWatch


class Engine(Protocol):
    """A client of running ranks. All calls are made on one event loop."""

    @property
    def config(self) -> EngineConfig:
        """The settings it was started with."""

    @property
    def max_model_len(self) -> int:
        """The most tokens of prompt and output together."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None with skip_tokenizer_init."""

    @property
    def default_sampling(self) -> dict[str, Any]:
        """Sampling fields that the model's generation_config.json sets."""

    @property
    def stats(self) -> list[RankStats]:
        """The last news of every rank, by rank."""

    @property
    def ready(self) -> list[Ready]:
        """What every rank said when it became ready, by rank."""

    @property
    def dead(self) -> EngineDeadError | None:
        """Why nothing can be served any more, once that is so."""

    def stream(
        self,
        prompt: list[int],
        params: SamplingParams,
        request_id: str | None = None,
        routed_dp_rank: int | None = None,
    ) -> AsyncIterator[CompletionDelta]:
        """Deltas of the request's `n` completions, interleaved. Closing the iterator aborts what is not finished.

        Raises RequestError, OverloadedError or EngineDeadError, at the latest on the first step.
        """

    async def reset_prefix_cache(self) -> None:
        """Tell all ranks to drop the cached blocks that no running sequence uses. Raises EngineDeadError."""

    @property
    def balance(self) -> BalanceWatch:
        """How evenly the ranks' experts are loaded."""

    async def start_expert_distribution_record(self) -> None:
        """Forget the expert loads recorded so far and record from now on. Raises CapacityError, EngineDeadError."""

    async def stop_expert_distribution_record(self) -> None:
        """Record no more. Raises CapacityError, EngineDeadError."""

    async def dump_expert_distribution_record(self, folder: str | Path | None = None) -> DumpedRecord:
        """Write the record. Raises CapacityError, EngineDeadError."""

    async def start_profile(self, num_steps: int = 20) -> None:
        """Trace the next steps. Raises RequestError, EngineDeadError."""

    async def stop_profile(self, file: str | Path | None = None) -> ProfileResult:
        """Write the trace. Raises RequestError, CapacityError, EngineDeadError."""

    async def close(self) -> None:
        """Stop the ranks. Streams still open raise EngineDeadError."""
