"""That a recorded decode step needs nothing from the host, as far as this can be shown without a GPU.

Tensors are on torch's meta device: not on a CPU, so the code takes the ways of a GPU, and without values, so none can be read. Kernels
are named instead of launched. A mode watches every operation of torch while the step is recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.gpu_model import BLOCK_SIZE, small_model
from moe_runtime.core import ScheduledSequence, Sequence, StepPlan
from moe_runtime.dispatch import collective_fixed, triton_grouping
from moe_runtime.dispatch.collective import CollectiveDispatcher
from moe_runtime.dispatch.fp8_payload import Fp8Payload
from moe_runtime.dispatch.local import LocalDispatcher
from moe_runtime.dispatch.triton_one_sided import TritonOneSidedDispatcher
from moe_runtime.engine.graphs import KeptCounts, Record, Run, StepGraphs
from moe_runtime.engine.model_runner import build_batch
from moe_runtime.experts import triton_router
from moe_runtime.layers.triton_ops import TritonOps
from moe_runtime.models.decoder import Decoder
from moe_runtime.moe import ExpertParallelMoe
from moe_runtime.placement.layout import contiguous, layer_placement
from tests.helpers.engine_ranks import GREEDY

if TYPE_CHECKING:
    from moe_runtime.dispatch.base import Dispatcher

META, CPU = torch.device("meta"), torch.device("cpu")
HIDDEN = 64
ATTENTION = {"rotate_and_store", "decode", "merge_splits"}
EXPERTS = {"route_kernel", "grouped_gemm", "build_block_map"}


class _NoUpload(TorchFunctionMode):
    """Values of Python never reach `__torch_dispatch__` as tensors of the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.tensor, torch.as_tensor, torch.from_numpy), (
            f"{func.__name__} of host values"
        )
        return func(*args, **(kwargs or {}))


class NothingFromTheHost(TorchDispatchMode):
    """Fails on operations that read values or sizes from the device, and on any tensor or values of the host."""

    def __enter__(self) -> Any:
        self._no_upload = _NoUpload()
        self._no_upload.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._no_upload.__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        if func.overloadpacket is torch.ops.aten.index and not any(
            x.dtype in (torch.bool, torch.uint8) for x in args[1] if x is not None
        ):
            # Only masks make the shape depend on values.
            tags = set()
        assert not tags, f"{func} reads the device: {tags}"
        device = (kwargs or {}).get("device", META)
        assert torch.device(device) == META, f"{func} makes a tensor on {device}"
        found = tree_leaves((args, kwargs, result := func(*args, **(kwargs or {}))))
        hosts = [x for x in found if isinstance(x, torch.Tensor) and x.device != META]
        assert not hosts, f"{func} works with {len(hosts)} tensors of the host"
        return result


@pytest.mark.parametrize(
    "act",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.cpu(),
        lambda x: x + torch.ones(3),
        lambda x: torch.tensor([1, 2, 3], device=META) + x,
        lambda x: torch.unique(x),
        lambda x: x.copy_(torch.zeros(3)),
    ],
)
def test_the_mode_sees_what_a_graph_cannot_hold(act: Any) -> None:
    x = torch.zeros(3, device=META)
    with pytest.raises(AssertionError), NothingFromTheHost():
        act(x)


@dataclass
class MetaHeap:
    """Segments of a size and no content; addresses are the host's business, which kernels get as they are."""

    rank: int
    num_ranks: int
    segment: torch.Tensor
    addresses_N: torch.Tensor

    def close(self) -> None:
        pass


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of kernels in the order of their launches, which are left out."""
    from triton.runtime.interpreter import InterpretedFunction

    names: list[str] = []

    def launcher(self: Any, grid: Any) -> Any:
        return lambda *args, **kwargs: names.append(self.fn.__name__)

    monkeypatch.setattr(InterpretedFunction, "__getitem__", launcher)
    return names


class NoWork:
    """Of a collective that takes no time."""

    def wait(self) -> None:
        pass


def make_dispatcher(kind: str, monkeypatch: pytest.MonkeyPatch) -> Dispatcher:
    if kind == "local":
        return LocalDispatcher(triton_grouping.group_pairs)
    if kind.startswith("collective"):
        monkeypatch.setattr(
            collective_fixed, "all_to_all", lambda group, rows: (torch.empty_like(rows), NoWork())
        )
        combine = kind.removeprefix("collective ")
        return CollectiveDispatcher(None, 1.0, combine, device_tokens=64)  # type: ignore[arg-type]
    heap = MetaHeap(
        0, 2, torch.empty(1 << 20, dtype=torch.uint8, device=META), torch.ones(2, dtype=torch.int64)
    )
    dispatcher = TritonOneSidedDispatcher(
        heap, hidden_size=HIDDEN, topk=2, dtype=torch.bfloat16, step_timeout=1.0, is_alive=lambda _: True,
        combine="per_rank" if "per_rank" in kind else "exact", in_flight=2,
    )  # fmt: skip
    return Fp8Payload(dispatcher) if "fp8" in kind else dispatcher


def capture(dispatcher: Dispatcher, num_ranks: int, record: Record) -> StepGraphs:
    """Sizes 2 and 4 of a small decoder, as rank 0 has it."""
    model = small_model(META, torch.bfloat16, triton=True, hidden=HIDDEN)
    spec = model.decoder.spec
    layers = spec.num_moe_layers
    slots = [spec.num_experts // num_ranks] * layers
    decoder = Decoder(spec, slots, torch.bfloat16, META, TritonOps(), triton_router.route)
    placement = contiguous(layers, spec.num_experts, num_ranks)
    placements = [layer_placement(placement, layer, 0, META) for layer in range(layers)]
    graphs = StepGraphs((2, 4), 100, 4095, BLOCK_SIZE, spec.vocab_size, META)
    moe = ExpertParallelMoe(dispatcher, model.moe.kernel, placements, 0)
    graphs.capture(decoder, model.attention, moe, record)
    return graphs


def decoding(lengths: list[int]) -> StepPlan:
    """A step in which sequences of these lengths decode."""
    scheduled = []
    for first, length in enumerate(lengths):
        blocks = list(range(10 * first, 10 * first + -(-length // BLOCK_SIZE)))
        sequence = Sequence(str(first), [5] * length, GREEDY, block_table=blocks)
        scheduled.append(ScheduledSequence(sequence, length - 1, 1))
    return StepPlan(tuple(scheduled))


@pytest.mark.parametrize(
    "kind",
    ["local", "collective exact", "collective per_rank", "one_sided", "one_sided per_rank", "one_sided fp8"],
)
def test_a_recorded_step_needs_nothing_from_the_host(
    kind: str, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recordings: list[list[str]] = []

    def record(run: Run) -> Run:
        """As a capture does: what happens on the host now does not happen again."""
        launched.clear()
        with NothingFromTheHost():
            run()
        recordings.append(list(launched))
        return lambda: None

    graphs = capture(make_dispatcher(kind, monkeypatch), 1 if kind == "local" else 2, record)
    assert len(recordings) == 2
    for names in recordings:
        assert set(names) >= ATTENTION | EXPERTS
        assert ("send" in names) is ("one_sided" in kind)
    plan = decoding([3, 40, 90])
    assert graphs.fits(plan)
    watch = KeptCounts()
    logits = graphs.replay(build_batch(plan, BLOCK_SIZE, 4, CPU), watch)
    assert [ids.shape for ids in watch.ids] == [(3, 2)] * 2
    assert len(watch.rows) == 2
    assert logits.shape[0] == 3


def test_reading_the_routing_on_the_host_is_seen(launched: list[str]) -> None:
    """The collective dispatcher's other way, for prompts."""

    def record(run: Run) -> Run:
        with NothingFromTheHost():
            run()
        return run

    with pytest.raises(AssertionError, match=r"makes a tensor on cpu|of the host"):
        capture(CollectiveDispatcher(None, 1.0, device_tokens=0), 2, record)  # type: ignore[arg-type]
