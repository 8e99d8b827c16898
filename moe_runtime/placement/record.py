"""A recorded expert load: what the recorder writes, and planner, simulator and report read.

A record is a folder: `record.json` (RecordMeta), and `rank<r>.npz` for each source rank, written by that rank.

Legend: W windows in order of time, P phases, N source ranks, L MoE layers, E logical experts, K experts per token,
t tokens whose routes were kept.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from moe_runtime.errors import ConfigError
from moe_runtime.placement.run_time_split import RUN_TIME_SPLITS
from moe_runtime.whole_file import whole_file

PHASES = ("prefill", "decode")
"""The P axis. A token is `decode` if its sequence computes just it in a step and its prompt is done."""
RECORD_VERSION = 1
"""Raised when older readers would misunderstand a record. Fields that are added have defaults and do not raise it: older records are
read with those, and older readers leave the new fields out."""
NO_PLACEMENT = -1
"""In LoadRecord.placement_W: no single placement was in force in the window, or it has been forgotten."""
META_FILE = "record.json"

Array = npt.NDArray[Any]
RankSlots = list[list[list[int]]]
"""[layer][rank][slot] -> expert, -1 for an empty slot, as core.ExpertPlacement.slots."""


class RecordMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What the numbers belong to."""

    version: int = RECORD_VERSION
    model: str
    """The name it was served under."""
    checkpoint: str
    """Identity of the checkpoint: sha256 of its config.json and of the names and sizes of its weight files."""
    architecture: str
    num_layers: int
    num_experts: int
    top_k: int
    num_ranks: int
    hidden_size: int
    intermediate_size: int
    """Of one expert."""
    expert_bytes: int
    """Of one expert of one layer, as it is kept and as it would be moved."""
    row_bytes: int
    """Of one token row on its way to an expert."""
    return_bytes: int
    """Of one row on its way back."""
    dtype: str
    hardware: str
    """In words: device name and number of ranks per host."""
    started_at: str
    """ISO 8601, UTC."""
    placements: list[RankSlots]
    """Those in force during the record, oldest first; the latest ones, if there were many."""
    split: str = ""
    """How ranks chose among copies, of `run_time_split.RUN_TIME_SPLITS`; empty if the record does not say."""


def split_of_record(meta: RecordMeta) -> str:
    """How ranks chose among copies; waterfill for records that do not say."""
    return meta.split or "waterfill"


@dataclass(frozen=True)
class Routes:
    """The experts chosen for each token of the sampled requests."""

    step_t: Array
    """int64: the engine's step number."""
    rank_t: Array
    """int32: source rank."""
    phase_t: Array
    """int8: index into PHASES."""
    request_t: Array
    """int32: a number per sampled request of its rank."""
    topk_ids_tLK: Array
    """int16: logical experts, -1 for none."""


@dataclass(frozen=True)
class LoadRecord:
    """Counts in windows of whole steps; every rank took part in every step."""

    meta: RecordMeta
    first_step_W: Array
    """int64: step number of the window's first step."""
    num_steps_W: Array
    """int64: steps with work in the window."""
    end_time_W: Array
    """float64: unix time in seconds when the window's last step ended."""
    placement_W: Array
    """int32: index into meta.placements of the placement in force, or NO_PLACEMENT."""
    counts_WPNLE: Array
    """int64: (token, k) pairs that tokens of source rank n sent to expert e."""
    tokens_WPN: Array
    """int64: tokens computed; padding is not counted."""
    wait_us_WN: Array
    """int64: how long the rank waited for other ranks' rows."""
    forward_us_WN: Array
    """int64: how long its forward passes took."""
    routes: Routes

    @property
    def loads(self) -> Array:
        """int64 (W, L, E) pairs per expert: sums over phases and source ranks."""
        loads_WLE: Array = self.counts_WPNLE.sum(axis=(1, 2))
        return loads_WLE

    @property
    def route_window_t(self) -> Array:
        """int64 (t,): the window in which each kept token was computed; -1 if it was before all of them."""
        window_t: Array = np.searchsorted(self.first_step_W, self.routes.step_t, side="right") - 1
        return window_t


_SHARED = {"first_step_W", "num_steps_W", "end_time_W", "placement_W"}
_OF_RANK = {"counts_WPLE", "tokens_WP", "wait_us_W", "forward_us_W"}
_ROUTES = {"routes_step_t", "routes_phase_t", "routes_request_t", "routes_topk_ids_tLK"}
RANK_ARRAYS = tuple(sorted(_SHARED | _OF_RANK | _ROUTES))
"""Names in a rank's npz file; see LoadRecord and Routes, here without the axis N."""


def rank_file(folder: Path, rank: int) -> Path:
    """Where source rank `rank` writes."""
    return folder / f"rank{rank}.npz"


def write_rank(folder: Path, rank: int, arrays: dict[str, Array]) -> None:
    """Write a rank's part whole or not at all. `arrays` has exactly RANK_ARRAYS."""
    assert sorted(arrays) == sorted(RANK_ARRAYS), sorted(arrays)
    path = rank_file(folder, rank)
    with whole_file(path) as draft, draft.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # its stubs take the names for allow_pickle


def write_meta(folder: Path, meta: RecordMeta) -> None:
    """Write record.json; made for people too."""
    text = json.dumps(msgspec.to_builtins(meta), separators=(",", ":"))
    with whole_file(folder / META_FILE) as draft:
        draft.write_bytes(msgspec.json.format(text.encode(), indent=1))


def load_record(folder: Path) -> LoadRecord:
    """Read all ranks' parts. Raises ConfigError that names the file and what is wrong with it."""
    try:
        meta = msgspec.json.decode((folder / META_FILE).read_bytes(), type=RecordMeta)
    except OSError as error:
        raise ConfigError(f"record {str(folder)!r}: {META_FILE} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"record {str(folder)!r}: {META_FILE}: {error}") from error
    if meta.version != RECORD_VERSION:
        raise ConfigError(
            f"record {str(folder)!r} has version {meta.version}; this program reads version {RECORD_VERSION}"
        )
    if meta.split not in ("", *RUN_TIME_SPLITS):
        raise ConfigError(
            f"record {str(folder)!r}: {META_FILE}: split {meta.split!r} must be one of {', '.join(RUN_TIME_SPLITS)}"
        )
    _check_meta(folder, meta)
    parts = [_read_rank(folder, rank, meta) for rank in range(meta.num_ranks)]
    # Ranks may have kept different numbers of windows: what all of them have counts.
    first = max(int(p["first_step_W"][0]) if len(p["first_step_W"]) else 0 for p in parts)
    parts = [_from_step(p, first) for p in parts]
    for rank, part in enumerate(parts):
        if not np.array_equal(part["first_step_W"], parts[0]["first_step_W"]):
            raise ConfigError(
                f"record {str(folder)!r}: ranks 0 and {rank} did not record the same steps; were they written by one dump?"
            )
    shared = parts[0]
    return LoadRecord(
        meta=meta,
        first_step_W=shared["first_step_W"],
        num_steps_W=shared["num_steps_W"],
        end_time_W=shared["end_time_W"],
        placement_W=shared["placement_W"],
        counts_WPNLE=np.stack([p["counts_WPLE"] for p in parts], axis=2).astype(np.int64),
        tokens_WPN=np.stack([p["tokens_WP"] for p in parts], axis=2).astype(np.int64),
        wait_us_WN=np.stack([p["wait_us_W"] for p in parts], axis=1).astype(np.int64),
        forward_us_WN=np.stack([p["forward_us_W"] for p in parts], axis=1).astype(np.int64),
        routes=Routes(
            step_t=np.concatenate([p["routes_step_t"] for p in parts]),
            rank_t=np.repeat(
                np.arange(meta.num_ranks, dtype=np.int32), [len(p["routes_step_t"]) for p in parts]
            ),
            phase_t=np.concatenate([p["routes_phase_t"] for p in parts]),
            request_t=np.concatenate([p["routes_request_t"] for p in parts]),
            topk_ids_tLK=np.concatenate([p["routes_topk_ids_tLK"] for p in parts]),
        ),
    )


def _check_meta(folder: Path, meta: RecordMeta) -> None:
    where = f"record {str(folder)!r}: {META_FILE}"
    for name in ("num_layers", "num_experts", "top_k", "num_ranks", "hidden_size", "intermediate_size", "expert_bytes", "row_bytes",
                 "return_bytes"):  # fmt: skip
        if getattr(meta, name) < 1:
            raise ConfigError(f"{where}: {name} is {getattr(meta, name)}, must be at least 1")
    wanted = (meta.num_layers, meta.num_ranks)
    if not meta.placements:
        raise ConfigError(
            f"{where}: placements is empty, must have at least the one that the ranks started with"
        )
    for i, placement in enumerate(meta.placements):
        widths = {len(rank) for layer in placement for rank in layer}
        ids = {expert for layer in placement for rank in layer for expert in rank}
        if (len(placement), *{len(layer) for layer in placement}) != wanted or len(widths) != 1:
            raise ConfigError(
                f"{where}: placement {i} must have {meta.num_layers} layers of {meta.num_ranks} ranks with equally many slots"
            )
        if not ids <= set(range(-1, meta.num_experts)):
            raise ConfigError(
                f"{where}: placement {i} has expert {max(ids)}; allowed are -1 to {meta.num_experts - 1}"
            )


def _read_rank(folder: Path, rank: int, meta: RecordMeta) -> dict[str, Array]:
    path = rank_file(folder, rank)
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = sorted(set(RANK_ARRAYS) - set(file.files))
            if missing:
                raise ConfigError(f"{path}: lacks the arrays {', '.join(missing)}")
            part = {name: file[name] for name in RANK_ARRAYS}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except ConfigError:
        raise
    except Exception as error:
        # A damaged file raises whatever zipfile, zlib or numpy come upon: EOFError, BadZipFile, zlib.error, ValueError, ...
        raise ConfigError(
            f"{path}: is damaged, or not an npz file without pickles: {str(error) or repr(error)}"
        ) from error
    _check(path, part, meta)
    return part


def _check(path: Path, part: dict[str, Array], meta: RecordMeta) -> None:
    sizes = {
        "W": part["first_step_W"].size, "P": len(PHASES), "L": meta.num_layers, "E": meta.num_experts, "K": meta.top_k,
        "t": part["routes_step_t"].size,
    }  # fmt: skip
    for name, array in part.items():
        wanted = tuple(sizes[axis] for axis in name.rpartition("_")[2])
        if array.shape != wanted or array.dtype.kind not in "iuf" or not np.isfinite(array).all():
            raise ConfigError(
                f"{path}: {name} is {array.dtype} of shape {array.shape}, wanted finite numbers of shape {wanted}"
            )
    for name, least, limit in (
        ("routes_topk_ids_tLK", -1, meta.num_experts),
        ("routes_phase_t", 0, len(PHASES)),
        ("placement_W", NO_PLACEMENT, len(meta.placements)),
        ("counts_WPLE", 0, 2**62),
        ("tokens_WP", 0, 2**62),
        ("num_steps_W", 0, 2**62),
    ):
        array = part[name]
        if array.size and not (least <= array.min() and array.max() < limit):
            raise ConfigError(
                f"{path}: {name} has values from {array.min()} to {array.max()}, allowed are {least} to {limit - 1}"
            )


def _from_step(part: dict[str, Array], first: int) -> dict[str, Array]:
    """The windows from step `first` on."""
    keep = part["first_step_W"] >= first
    return {name: array[keep] if name in _SHARED | _OF_RANK else array for name, array in part.items()}
