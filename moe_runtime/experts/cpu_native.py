"""Experts on CPUs in C++ (moe_runtime/native/experts.cpp): gather, gate and up, activation and down in one call.

A slot's weights are read once for all its rows, in the order in which they lie in memory, and sums are kept in float32; between
the activation and the second product rows are rounded to bfloat16. On CPUs with AMX, slots with many rows go to torch's
matrix products.

Legend: R token rows, S expert rows, D hidden, F expert intermediate size, p slots.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from moe_runtime.experts.base import wide_tokens
from moe_runtime.experts.cpu import CpuExperts
from moe_runtime.layers.activation import SWIGLU_OAI
from moe_runtime.native.build import most_rows
from moe_runtime.quantization import FP8, GROUP

if TYPE_CHECKING:
    from moe_runtime.core import ExpertBatch
    from moe_runtime.experts.base import ExpertNeed, ExpertWeights
    from moe_runtime.native.build import Native

ACTIVATION_CODES = {"silu": 0, "gelu": 1, "gelu_pytorch_tanh": 2, "relu": 3, SWIGLU_OAI: 4}
"""As the enum Activation in native/activation.h."""
FORMAT_CODES = {torch.bfloat16: 0, FP8: 1, torch.int8: 2, torch.uint8: 3}
"""As the enum Format in native/products.h."""
WORK_INTS = 3
"""int64 values that the library keeps for a slot."""


class _Scales(ctypes.Structure):
    """Scales of native/experts.cpp."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("rows_per_scale", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("zero_points", ctypes.c_int64),
        ("short_scales", ctypes.c_int64),
    )


class _Call(ctypes.Structure):
    """ExpertsCall of native/experts.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "tokens", "row_index", "rows_of_slot", "gate_up", "down", "gate_up_bias", "down_bias", "inner_rows", "out",
        )),
        *((name, ctypes.c_int64) for name in (
            "num_tokens", "token_stride", "num_rows", "num_slots", "hidden", "inner", "max_rows",
        )),
        ("limit", ctypes.c_float),
        ("activation", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("gate_up_scales", _Scales),
        ("down_scales", _Scales),
    )  # fmt: skip


class NativeExperts:
    """See the module. bfloat16 only; as many threads as torch uses, and the same ones."""

    name = "cpu_native"

    def __init__(self, native: Native, max_rows: int | None = None) -> None:
        """max_rows: slots with more rows go to torch; None: as the CPU asks for."""
        self.native = native
        self.max_rows = most_rows(NO_LIMIT) if max_rows is None else max_rows

    def supports(self, need: ExpertNeed) -> str | None:
        """None if it can, else why not."""
        if need.device_type != "cpu":
            return f"runs on cpu, not on {need.device_type}"
        if need.dtype != torch.bfloat16:
            return f"{need.dtype} is not bfloat16"
        if need.activation not in ACTIVATION_CODES:
            return f"activation {need.activation!r} is not one of {', '.join(ACTIVATION_CODES)}"
        return self.native.problem

    def __call__(self, batch: ExpertBatch, weights: ExpertWeights) -> torch.Tensor:
        """Returns y_SD in bfloat16."""
        if weights.quantize_activations:
            return CpuExperts()(batch, weights)
        tokens_RD = wide_tokens(batch, torch.bfloat16)
        if tokens_RD.stride(-1) != 1:
            tokens_RD = tokens_RD.contiguous()
        row_index_S, rows_p = batch.row_index_S.contiguous(), batch.num_rows_p.contiguous()
        num_rows, hidden = row_index_S.shape[0], tokens_RD.shape[1]
        num_slots, inner = weights.down_pDF.shape[0], weights.inner
        _check(weights, num_slots, hidden, inner, rows_p)
        h_SF = tokens_RD.new_empty(num_rows, inner)
        y_SD = tokens_RD.new_empty(num_rows, hidden)
        works = torch.empty(num_slots * WORK_INTS, dtype=torch.int64)
        call = _Call(
            tokens_RD.data_ptr(), row_index_S.data_ptr(), rows_p.data_ptr(),
            weights.gate_up_pFD.data_ptr(), weights.down_pDF.data_ptr(),
            _pointer(weights.gate_up_bias_pF), _pointer(weights.down_bias_pD), h_SF.data_ptr(), y_SD.data_ptr(),
            tokens_RD.shape[0], tokens_RD.stride(0), num_rows, num_slots, hidden, inner, self.max_rows,
            math.inf if weights.activation_limit is None else weights.activation_limit,
            ACTIVATION_CODES[weights.activation], torch.get_num_threads(),
            FORMAT_CODES[weights.down_pDF.dtype], _scales(weights, weights.gate_up_scale, inner, hidden),
            _scales(weights, weights.down_scale, hidden, inner),
        )  # fmt: skip
        assert self.native.library is not None, self.native.problem
        left_out = self.native.library.moe_runtime_experts(ctypes.addressof(call), works.data_ptr())
        assert left_out >= 0, PROBLEMS[left_out]
        if left_out:
            self._by_torch(batch, weights, y_SD)
        return y_SD

    def _by_torch(self, batch: ExpertBatch, weights: ExpertWeights, y_SD: torch.Tensor) -> None:
        """Fill the rows of the slots that have more than max_rows."""
        large_p = batch.num_rows_p > self.max_rows
        rows = large_p.repeat_interleave(batch.num_rows_p).nonzero().squeeze(1)
        part = replace(batch, row_index_S=batch.row_index_S[rows], num_rows_p=batch.num_rows_p * large_p)
        y_SD[rows] = CpuExperts()(part, weights)


NO_LIMIT = 1 << 60
PROBLEMS = {-1: "a row's token is not in the batch", -2: "the slots' rows are not the batch's"}


def _check(weights: ExpertWeights, num_slots: int, hidden: int, inner: int, rows_p: torch.Tensor) -> None:
    """That memory is as the library expects it."""
    scheme = weights.scheme
    stored = torch.bfloat16 if scheme is None else scheme.payload
    shapes = (2 * inner, hidden), (hidden, inner)
    if scheme is not None:
        shapes = scheme.payload_shape(*shapes[0]), scheme.payload_shape(*shapes[1])
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "gate_up_pFD": (stored, (num_slots, *shapes[0])),
        "down_pDF": (stored, (num_slots, *shapes[1])),
        "gate_up_bias_pF": (torch.bfloat16, (num_slots, 2 * inner)),
        "down_bias_pD": (torch.bfloat16, (num_slots, hidden)),
    }
    if scheme is not None:
        gate_up, down = scheme.scale_shape(inner, hidden), scheme.scale_shape(hidden, inner)
        expected["gate_up_scale"] = (scheme.scale_dtype, (num_slots, 2, *gate_up))
        expected["down_scale"] = (scheme.scale_dtype, (num_slots, *down))
    for name, (dtype, shape) in expected.items():
        tensor = getattr(weights, name)
        if tensor is not None:
            found = (tensor.dtype, tensor.shape, tensor.is_contiguous())
            assert found == (dtype, shape, True), f"{name}: {found}"
    assert rows_p.shape == (num_slots,)


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _scales(weights: ExpertWeights, scale: torch.Tensor | None, num_out: int, num_in: int) -> _Scales:
    """scale: of all slots' matrices (or parts) of num_out rows; none without a scheme."""
    scheme = weights.scheme
    if scheme is None:
        return _Scales(None, 1, 0, 0, 0, 0, 0)
    rows, columns = scheme.scale_shape(num_out, num_in)
    groups = columns // 2 if scheme.zero_points else columns
    # Of the rows that share a scale, where it is one for all of them.
    whole = GROUP if scheme.name == "fp8_block" else max(1, num_out)
    per_scale = 1 if scheme.per_channel else whole
    kind = scheme.group_of(num_in), scheme.zero_points, scheme.short_scales
    return _Scales(_pointer(scale), per_scale, rows, groups, *kind)
