"""A rank's record of expert loads as the engine deals with it: commands are carried out, and news goes to the front-end."""

from __future__ import annotations

import logging
import platform
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from moe_runtime.engine.messages import LoadNews, Recorded
from moe_runtime.placement.record import RecordMeta, write_meta, write_rank
from moe_runtime.placement.recorder import KEPT_ROWS
from moe_runtime.quantization import row_bytes
from moe_runtime.weights.identity import checkpoint_identity

if TYPE_CHECKING:
    from moe_runtime.config import EngineConfig
    from moe_runtime.engine.messages import RecordLoads
    from moe_runtime.models.spec import ModelSpec
    from moe_runtime.placement.record import Array
    from moe_runtime.placement.recorder import LoadRecorder
    from moe_runtime.topology import Topology

NEWS_INTERVAL_S = 1.0

logger = logging.getLogger(__name__)


class _Writing:
    """A record on its way to disk, on a thread of its own: a slow disk must not hold up the steps of all ranks."""

    def __init__(self, rank: int, command: RecordLoads, arrays: dict[str, Array], meta: RecordMeta) -> None:
        """`meta` is written by rank 0."""
        num_steps = arrays["num_steps_W"]
        self.answer = Recorded(rank, command.request, len(num_steps), int(num_steps.sum()))
        self._folder, self._arrays, self._meta = Path(command.folder), arrays, meta
        self._thread = threading.Thread(target=self._run, name="record-writer", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        rank = self.answer.rank
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_rank(self._folder, rank, self._arrays)
            if rank == 0:
                write_meta(self._folder, self._meta)
        except OSError as problem:
            self.answer.error = f"{self._folder}: {problem.strerror or problem}"
        except Exception as problem:
            logger.exception("writing a record failed")
            self.answer.error = f"{self._folder}: {problem!r}"


@dataclass
class LoadRecords:
    """One rank's. `what` describes the model; its `model`, `started_at` and `placements` are filled in when a record is written."""

    rank: int
    recorder: LoadRecorder
    what: RecordMeta
    _started_at: str = ""
    _last_news: float = 0.0
    _steps_since: int = 0
    _writing: _Writing | None = None

    def __post_init__(self) -> None:
        self._started_at = _now()

    def carry_out(self, command: RecordLoads) -> Recorded | None:
        """Start, stop, or begin to write: then the answer comes from `written`. What goes wrong is part of the answer."""
        match command.action:
            case "start":
                self.recorder.start()
                self._started_at = _now()
            case "stop":
                self.recorder.stop()
            case "dump" if self.busy:
                return Recorded(self.rank, command.request, error="another record is still being written")
            case "dump":
                meta = msgspec.structs.replace(
                    self.what,
                    model=command.model,
                    started_at=self._started_at,
                    placements=self.recorder.placements,
                )
                self._writing = _Writing(self.rank, command, self.recorder.arrays(), meta)
                return None
        return Recorded(self.rank, command.request)

    @property
    def busy(self) -> bool:
        """Whether a record is being written, or its answer is still here."""
        return self._writing is not None

    def written(self) -> Recorded | None:
        """The answer to a command to write, once that has been done."""
        if self._writing is None or not self._writing.done:
            return None
        answer, self._writing = self._writing.answer, None
        return answer

    def news(self) -> LoadNews | None:
        """After each step: what the front-end should hear now, if anything."""
        self._steps_since += 1
        now = time.monotonic()
        if now - self._last_news < NEWS_INTERVAL_S and self._steps_since < KEPT_ROWS:
            return None
        self._last_news, self._steps_since = now, 0
        return LoadNews(self.rank, [(s.step, s.phase, s.rows) for s in self.recorder.take_rows()])


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def describe(
    config: EngineConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    topology: Topology,
    expert_bytes: int,
    split: str,
) -> RecordMeta:
    """The parts of a record's description that hold for the whole run.

    expert_bytes: of one expert of one layer; split: how copies are chosen, of RUN_TIME_SPLITS.
    """
    return_bytes = spec.hidden_size * dtype.itemsize
    sent_bytes = row_bytes(spec.hidden_size) if config.dispatch_dtype == "fp8" else return_bytes
    return RecordMeta(
        model="",
        checkpoint=checkpoint_identity(config.model),
        architecture=spec.architecture,
        num_layers=spec.num_moe_layers,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        num_ranks=topology.world_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.moe_intermediate_size,
        expert_bytes=expert_bytes,
        row_bytes=sent_bytes,
        return_bytes=return_bytes,
        dtype=str(dtype).removeprefix("torch."),
        hardware=f"{_device_name(topology.device)}, {topology.local_world_size} ranks on rank 0's host",
        started_at="",
        placements=[],
        split=split,
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()
