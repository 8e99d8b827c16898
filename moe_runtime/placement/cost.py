"""What a step costs: a model of the time of the MoE layers, for comparing placements.

    step = sum over layers of  max over ranks of computing  +  dispatch  +  combine  [+ exchange of counts]

* Computing of a rank is the larger of its multiplications (6 D F operations per row, rows padded to whole tiles per expert) and its
  memory traffic (the weights of the experts that have rows at all, and the rows themselves): the roofline of a grouped product
  (Williams, Waterman and Patterson, CACM 52(4), 2009). In decode the weights of activated experts dominate. Where a core reads
  weights and then multiplies with them (`Hardware.overlap` false), it is the sum of both.
* Dispatch and combine end when the last rank has sent and received everything: the rank that most rows go to (incast) counts. Rows
  within a node and between nodes use two links with bandwidths of their own, at the same time.

What it leaves out: attention and dense layers, which no placement changes; overlap; congestion inside the network.

Legend: L layers, N ranks, p slots per rank, E experts, C replicas of an expert, D hidden size, F expert intermediate size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from moe_runtime.errors import ConfigError
from moe_runtime.placement.record import RecordMeta

Array = npt.NDArray[Any]
COUNT_BYTES = 4
"""Of one number in the exchange of counts."""


@dataclass(frozen=True)
class Hardware:
    """One rank's device and its links; all rates are what can be reached, not peaks on paper."""

    name: str
    matmul_flops: float
    """Multiplications and additions per second in expert products."""
    memory_bytes_s: float
    link_bytes_s: float
    """To and from ranks of the same node, each direction."""
    internode_bytes_s: float
    """To and from ranks of other nodes, each direction."""
    latency_us: float
    """Of one exchange between ranks, without bytes."""
    tile_rows: int
    """Rows of an expert are padded to a multiple of this."""
    overlap: bool = True
    """Whether weights are read while others are multiplied with; a YAML file may leave it out."""

    @staticmethod
    def named(name: str) -> Hardware:
        """A preset (`h200`, `b200`, `cpu`) or a YAML file with this class's fields. Raises ConfigError."""
        if name in PRESETS:
            return PRESETS[name]
        path = Path(name)
        if path.suffix not in (".yaml", ".yml"):
            raise ConfigError(f"hardware {name!r}: choose from {', '.join(PRESETS)}, or name a .yaml file")
        try:
            given = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"hardware file {name!r} cannot be read: {error}") from error
        return Hardware._from_dict(given, name)

    @staticmethod
    def for_device(name: str, device_name: str | None) -> Hardware:
        """As `named`, and `auto`: the preset for a GPU of that name (one that no preset is for: h200), or for a CPU if it is None."""
        if name != "auto":
            return Hardware.named(name)
        if device_name is None:
            return PRESETS["cpu"]
        return PRESETS["b200" if "B200" in device_name.upper() else "h200"]

    @staticmethod
    def _from_dict(given: object, where: str) -> Hardware:
        wanted = [f.name for f in fields(Hardware) if f.name not in ("name", "overlap")]
        if not isinstance(given, dict) or set(given) - {"name", "overlap"} != set(wanted):
            raise ConfigError(
                f"hardware file {where!r} must have exactly the fields {', '.join(wanted)} (and may have name, overlap)"
            )
        overlap = given.get("overlap", True)
        if not isinstance(overlap, bool):
            raise ConfigError(f"hardware file {where!r}: overlap={overlap!r} must be true or false")
        for field in wanted:
            value = given[field]
            if isinstance(value, str):  # YAML 1.1 reads 1e12 as text
                try:
                    value = float(value)
                except ValueError:
                    value = None
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(
                    f"hardware file {where!r}: {field}={given[field]!r} must be a number above 0"
                )
            given[field] = int(value) if field == "tile_rows" else float(value)
        name = str(given.get("name", Path(where).stem))
        return Hardware(name=name, overlap=overlap, **{f: given[f] for f in wanted})


PRESETS = {
    # Reached rates: about 70 % of the data sheets' dense BF16, 85 % of memory, 85 % of NVLink, 90 % of one 400 Gbit/s card.
    "h200": Hardware("h200", 690e12, 4.1e12, 380e9, 45e9, 10.0, 64),
    "b200": Hardware("b200", 1570e12, 6.8e12, 750e9, 45e9, 10.0, 128),
    # One core of a server with bfloat16 in AVX-512, and shared memory between processes; what packing rows takes counts as latency.
    # Fitted to traces of the demo model (docs/how-to-tune-placement.md).
    "cpu": Hardware("cpu", 2.5e11, 2.2e10, 2e9, 1e9, 300.0, 1, overlap=False),
}


@dataclass(frozen=True)
class Cluster:
    """Ranks in nodes: rank r is on node r // ranks_per_node."""

    num_nodes: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.ranks_per_node < 1:
            raise ConfigError(
                f"cluster of {self.num_nodes} nodes with {self.ranks_per_node} ranks each: both must be at least 1"
            )

    @staticmethod
    def parse(text: str) -> Cluster:
        """`nodes=4x8` is 4 nodes of 8 ranks. Raises ConfigError."""
        head, _, tail = text.partition("=")
        nodes, _, ranks = tail.partition("x")
        if head != "nodes" or not nodes.isdecimal() or not ranks.isdecimal():
            raise ConfigError(f"topology {text!r} must look like nodes=4x8: 4 nodes with 8 ranks each")
        return Cluster(int(nodes), int(ranks))

    @staticmethod
    def single(num_ranks: int) -> Cluster:
        return Cluster(1, num_ranks)

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def same_node_NN(self) -> Array:  # noqa: N802
        """bool: whether two ranks share a node."""
        node_N = np.arange(self.num_ranks) // self.ranks_per_node
        return node_N[:, None] == node_N


@dataclass(frozen=True)
class ModelCost:
    """What the cost model must know of a model. Sizes in elements or bytes, of one layer."""

    hidden: int
    intermediate: int
    expert_bytes: int
    row_bytes: int
    """Of one token row on its way to an expert."""
    return_bytes: int
    """Of one row on its way back."""
    top_k: int

    @staticmethod
    def of(meta: RecordMeta) -> ModelCost:
        """As the record says."""
        return ModelCost(
            hidden=meta.hidden_size,
            intermediate=meta.intermediate_size,
            expert_bytes=meta.expert_bytes,
            row_bytes=meta.row_bytes,
            return_bytes=meta.return_bytes,
            top_k=meta.top_k,
        )


@dataclass(frozen=True)
class StepTime:
    """Microseconds of one step, by layer."""

    compute_us_L: Array
    dispatch_us_L: Array
    combine_us_L: Array
    counts_us: float
    """Per layer."""

    @property
    def total_us(self) -> float:
        by_layer = self.compute_us_L + self.dispatch_us_L + self.combine_us_L + self.counts_us
        return float(by_layer.sum())


@dataclass(frozen=True)
class Cost:
    """The cost model of one model on one kind of hardware in one cluster."""

    model: ModelCost
    hardware: Hardware
    cluster: Cluster

    def step(self, rows_LNp: Array, sent_LNN: Array, *, counts_of: int = 0) -> StepTime:
        """Time of one step.

        rows_LNp: rows that each slot computes; sent_LNN: token rows from each rank to each other (see `sent_rows`), the diagonal
        free. `counts_of`: with a dynamic split a dispatcher that does not exchange counts anyway (`one_sided`) adds an exchange of
        them, one number per expert; give the number of experts then, else 0.
        """
        counts_us = self.counts_us(counts_of) if counts_of else 0.0
        return StepTime(
            compute_us_L=self.compute_us(rows_LNp).max(axis=-1),
            dispatch_us_L=self.travel_us(sent_LNN, self.model.row_bytes),
            combine_us_L=self.travel_us(np.swapaxes(sent_LNN, -1, -2), self.model.return_bytes),
            counts_us=counts_us,
        )

    def step_time_us(self, rows_LNp: Array, sent_LNN: Array, *, counts_of: int = 0) -> float:
        """Total microseconds of `step`."""
        return self.step(rows_LNp, sent_LNN, counts_of=counts_of).total_us

    def compute_us(self, rows_xNp: Array) -> Array:
        """float64 (..., N): what each rank's experts take for these rows per slot."""
        model, hardware = self.model, self.hardware
        tile = hardware.tile_rows
        padded = (np.ceil(rows_xNp / tile) * tile).sum(axis=-1)
        multiply_s = padded * (6.0 * model.hidden * model.intermediate / hardware.matmul_flops)
        row_bytes = rows_xNp.sum(axis=-1) * (model.row_bytes + model.return_bytes)
        memory_s = (
            (rows_xNp > 0).sum(axis=-1) * float(model.expert_bytes) + row_bytes
        ) / hardware.memory_bytes_s
        return (np.maximum(multiply_s, memory_s) if hardware.overlap else multiply_s + memory_s) * 1e6

    def travel_us(self, sent_xNN: Array, row_bytes: int) -> Array:
        """float64 (...): until all rows from rank (next to last axis) to rank (last axis) have arrived."""
        same_NN = self.cluster.same_node_NN
        remote = sent_xNN * (1.0 - np.eye(self.cluster.num_ranks))
        slowest = np.zeros(sent_xNN.shape[:-2])
        for rows, rate in (
            (remote * same_NN, self.hardware.link_bytes_s),
            (remote * ~same_NN, self.hardware.internode_bytes_s),
        ):
            for axis in (-1, -2):
                slowest = np.maximum(slowest, rows.sum(axis=axis).max(axis=-1) / rate)
        latency_us = self.hardware.latency_us if self.cluster.num_ranks > 1 else 0.0
        return slowest * (row_bytes * 1e6) + latency_us

    def counts_us(self, num_experts: int) -> float:
        """Microseconds of one exchange in which every rank tells every other its number of tokens for each expert."""
        others = self.cluster.num_ranks - 1
        inside = min(self.cluster.ranks_per_node - 1, others)
        size = COUNT_BYTES * num_experts
        slowest = max(
            inside * size / self.hardware.link_bytes_s,
            (others - inside) * size / self.hardware.internode_bytes_s,
        )
        return self.hardware.latency_us * (others > 0) + slowest * 1e6

    def move_us(self, moved_bytes_NN: Array) -> float:
        """Time to copy weights from rank to rank (bytes, by source and destination), nothing else using the links."""
        return float(self.travel_us(moved_bytes_NN, 1))


def sent_rows(rows_NEC: Array, slot_EC: Array, slots_per_rank: int, tokens_N: Array) -> Array:
    """float64 (N, N): token rows each rank sends to each, expected from counts alone.

    A token travels to a rank once, however many of its experts are there. Of source n's tokens the share that goes to rank m is
    1 - prod over slots of m of (1 - rows of the slot / tokens of n), as if a token's experts were chosen independently; recorded
    routes give the exact number (`simulate`).
    """
    num_ranks = rows_NEC.shape[0]
    some = slot_EC >= 0
    rank_x = slot_EC[some] // slots_per_rank
    share_Nx = rows_NEC[:, some] / np.maximum(tokens_N, 1)[:, None]
    with np.errstate(divide="ignore"):
        missed_Nx = np.log1p(-np.minimum(share_Nx, 1.0))
    missed_NN = np.zeros((num_ranks, num_ranks))
    np.add.at(missed_NN.T, rank_x, missed_Nx.T)
    return -np.expm1(missed_NN) * np.asarray(tokens_N)[:, None]


def slot_rows(rows_NEC: Array, slot_EC: Array, num_ranks: int, slots_per_rank: int) -> Array:
    """int64 (N, p): rows that each slot computes."""
    some = slot_EC >= 0
    rows = np.zeros(num_ranks * slots_per_rank, dtype=np.int64)
    rows[slot_EC[some]] = rows_NEC.sum(axis=0)[some]
    return rows.reshape(num_ranks, slots_per_rank)
