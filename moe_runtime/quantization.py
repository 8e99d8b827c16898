"""FP8, int8 and int4 weights, FP8 activations: how values become bytes and scales, and back. The oracle for all kernels that use them.

A value is payload * scale. FP8 weights [out, in] have a scale per block of 128 x 128, per output channel, or per tensor, int8
weights per output channel; activations, rounded as they come, per group of 128 along a row for block weights, else per row.
Payload is float8 e4m3 (Micikevicius et al., 2022) or int8 from -127 to 127 (symmetric: no zero point; a file may have -128 too), scales
are float32. int4 weights have a scale, and may have a zero point, per group of values along a row: see `int4`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_runtime import int4

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
INT8_MAX = 127.0
GROUP = 128
"""Values that share a scale, along each axis of a weight block and along a row of activations."""


_FEW_VALUES = 4096


@dataclass(frozen=True)
class QuantScheme:
    """How the experts' weights are stored. `None` stands for weights in the model's own dtype."""

    name: str
    """`fp8_block`, `fp8_channel`, `fp8_tensor`, `int8_channel`, or as of `int4_scheme`."""
    group: int = 0
    """int4: values along a row that share a scale; 0: all of the row."""
    zero_points: bool = False
    """int4: whether groups have zero points too."""
    short_scales: bool = False
    """int4: whether scales and zero points are bfloat16 in memory, not float32."""

    @property
    def payload(self) -> torch.dtype:
        """Type of the payload: FP8, torch.int8, or torch.uint8 for two int4 values."""
        return {"int4": torch.uint8, "int8": torch.int8}.get(self.payload_name, FP8)

    @property
    def payload_name(self) -> str:
        """`FP8`, `int8` or `int4`, for messages."""
        kind = self.name.partition("_")[0]
        return "FP8" if kind == "fp8" else kind

    @property
    def scale_dtype(self) -> torch.dtype:
        """Type of the scales in memory."""
        return torch.bfloat16 if self.short_scales else torch.float32

    def payload_shape(self, num_out: int, num_in: int) -> tuple[int, int]:
        """Shape of the payload of an [out, in] matrix: rows of bytes for int4, else its own."""
        return num_out, int4.packed_bytes(num_in) if self.payload == torch.uint8 else num_in

    @property
    def per_channel(self) -> bool:
        """Whether each row of a matrix, an output channel, has scales of its own."""
        return self.name == "fp8_channel" or self.payload != FP8

    def scale_shape(self, num_out: int, num_in: int) -> tuple[int, int]:
        """Shape of the scales of an [out, in] matrix."""
        if self.name == "fp8_block":
            return -(-num_out // GROUP), -(-num_in // GROUP)
        if self.payload == torch.uint8:
            return num_out, -(-num_in // self.group_of(num_in)) * (2 if self.zero_points else 1)
        return (num_out, 1) if self.per_channel else (1, 1)

    def group_of(self, num_in: int) -> int:
        """int4: values of a row of so many that share a scale."""
        return self.group or max(1, num_in)

    @property
    def row_step(self) -> int:
        """A matrix may be cut into pieces between rows that are multiples of this; see `scale_rows`."""
        return GROUP if self.name == "fp8_block" else 1

    def scale_rows(self, scale: torch.Tensor, first: int, stop: int) -> torch.Tensor:
        """The scales (rows of a matrix's scale) of its rows first..stop-1, as of a matrix of their own; first is a multiple of row_step."""
        if self.name == "fp8_block":
            return scale[first // GROUP : -(-stop // GROUP)]
        return scale[first:stop] if self.per_channel else scale

    def quantize_weight(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """weight: (..., out, in). Returns the payload (..., *payload_shape(out, in)) and scales (..., *scale_shape(out, in))."""
        scale = self.scales_for(weight).to(self.scale_dtype)
        return self.encode(weight, scale), scale

    def scales_for(self, weight: torch.Tensor) -> torch.Tensor:
        """weight: (..., out, in). Scales to encode it with, float32 (..., *scale_shape(out, in)); int4 with zero points only."""
        if self.payload == torch.uint8:
            assert self.zero_points, self.name
            return int4.best_scales(weight, self.group_of(weight.shape[-1]))
        return self.scale_of(self.largest(weight))

    def largest(self, weight: torch.Tensor) -> torch.Tensor:
        """weight: (..., out, in), not for int4. The largest magnitude of the values that share a scale, float32 (..., *scale_shape(out, in))."""
        *lead, num_out, num_in = weight.shape
        rows, columns = self.scale_shape(num_out, num_in)
        high, wide = (GROUP, GROUP) if self.name == "fp8_block" else (-(-num_out // rows), num_in)
        padded = torch.nn.functional.pad(
            weight.float(), (0, columns * wide - num_in, 0, rows * high - num_out)
        )
        return padded.abs().view(*lead, rows, high, columns, wide).amax(dim=(-3, -1))

    def encode(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """weight: (..., out, in). The payload under scales (..., *scale_shape(out, in)); integers round ties to even."""
        if self.payload == torch.uint8:
            return int4.encode(weight, *self._spread_groups(scale, weight.shape[-1]))
        codes = weight.float() / self._spread(scale, *weight.shape[-2:])
        if self.payload == FP8:
            return _to_fp8(codes)
        return codes.round_().clamp_(-INT8_MAX, INT8_MAX).nan_to_num_().to(torch.int8)

    def scale_of(self, largest: torch.Tensor) -> torch.Tensor:
        """The scale that brings the largest magnitude within the codes; 1 where all values are zero.

        FP8: the next power of two, under which any dtype with FP8's range holds the products payload * scale as they are; FP8 is as fine in
        the upper half of its range as in all of it. int8 is not, so its largest code is used. NaN and infinity, which int8 has no
        codes for, show in its scales.
        """
        if self.payload == FP8:
            ratio = largest / FP8_MAX
            # Round the mantissa up into the exponent; infinity stays.
            power = ((ratio.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
            return torch.where(ratio > 0, power, 1.0)
        return torch.where(largest == 0, 1.0, largest / INT8_MAX)

    def dequantize(
        self, payload: torch.Tensor, scale: torch.Tensor, num_in: int | None = None
    ) -> torch.Tensor:
        """payload, scale as of quantize_weight; num_in: the matrix's, which int4 does not show. Returns float32 (..., out, in)."""
        if self.payload == torch.uint8:
            assert num_in is not None
            return int4.dequantize(payload, *self._spread_groups(scale, num_in), num_in)
        values = fp8_to_float(payload) if self.payload == FP8 else payload.float()
        return values * self._spread(scale, *payload.shape[-2:])

    def quantize_rows(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: (rows, in) activations. Returns FP8 (rows, in) and float32 scales (rows, groups); groups is 1 but for blocks.

        Of FP8 schemes only: int8 weights are multiplied with activations as they are.
        """
        assert self.payload == FP8, self.name
        return quantize_rows(x, self._activation_group(x.shape[1]))

    def round_rows(self, x: torch.Tensor) -> torch.Tensor:
        """What activations (rows, in) become by going through FP8: quantised and back, in x's dtype."""
        rounded = dequantize_rows(*self.quantize_rows(x), self._activation_group(x.shape[1]))
        return rounded.to(x.dtype)

    def _activation_group(self, num_in: int) -> int:
        return GROUP if self.name == "fp8_block" else max(1, num_in)

    def _spread(self, scale: torch.Tensor, num_out: int, num_in: int) -> torch.Tensor:
        """The scale of every element, or a shape that broadcasts to it."""
        if self.name != "fp8_block":
            return scale
        return scale.repeat_interleave(GROUP, -2)[..., :num_out, :].repeat_interleave(GROUP, -1)[..., :num_in]

    def _spread_groups(self, scale: torch.Tensor, num_in: int) -> tuple[torch.Tensor, torch.Tensor]:
        """int4: the scale and the zero point of every value, float32."""
        wide = scale.float().repeat_interleave(self.group_of(num_in), -1)
        if not self.zero_points:
            return wide[..., :num_in], wide.new_full((1,), int4.MIDDLE)
        scales, zeros = wide.chunk(2, dim=-1)
        return scales[..., :num_in], zeros[..., :num_in]


FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR = (QuantScheme(n) for n in ("fp8_block", "fp8_channel", "fp8_tensor"))
INT8_CHANNEL = QuantScheme("int8_channel")
INT4_GROUPS = (32, 64, 128)
"""Values that may share a scale, but for whole rows."""


INT4_MADE = QuantScheme("int4_group32_bf16", 32, zero_points=True, short_scales=True)
"""What weights become while they are loaded."""


def int4_scheme(group: int, zero_points: bool = False) -> QuantScheme:
    """How files have int4: `int4_group32` and the like, `int4_channel` for group 0 (whole rows); with `_zero_points` behind it if there are any."""
    assert group in (0, *INT4_GROUPS), group
    name = f"int4_group{group}" if group else "int4_channel"
    return QuantScheme(name + ("_zero_points" if zero_points else ""), group, zero_points)


def quantize_rows(x: torch.Tensor, group: int = GROUP) -> tuple[torch.Tensor, torch.Tensor]:
    """x: (rows, in). Returns FP8 (rows, in) and float32 scales (rows, ceil(in / group)), one per `group` values of a row."""
    rows, num_in = x.shape
    groups = -(-num_in // group)
    values = x.float()
    if num_in % group:
        values = torch.nn.functional.pad(values, (0, groups * group - num_in))
    values = values.reshape(rows, groups, group)
    scale = scale_of(values.abs().amax(dim=-1))
    return _to_fp8((values / scale.unsqueeze(2)).view(rows, groups * group)[:, :num_in]), scale


def dequantize_rows(payload: torch.Tensor, scale: torch.Tensor, group: int = GROUP) -> torch.Tensor:
    """The inverse of `quantize_rows`, in float32."""
    rows, num_in = payload.shape
    values = fp8_to_float(payload)
    if num_in % group:
        return values.mul_(scale.repeat_interleave(group, 1)[:, :num_in])
    return values.view(rows, scale.shape[1], group).mul_(scale.unsqueeze(2)).view(rows, num_in)


def row_bytes(hidden_size: int) -> int:
    """Bytes of a packed row of `hidden_size` values: D x FP8, padding to 4, G x float32 scales."""
    return _scales_at(hidden_size) + 4 * -(-hidden_size // GROUP)


def _scales_at(hidden_size: int) -> int:
    return -(-hidden_size // 4) * 4


def empty_packed_rows(x_TD: torch.Tensor) -> torch.Tensor:
    """uint8 (T, row_bytes(D)) for the rows of x: to be filled but for the padding, which is zero."""
    T, D = x_TD.shape
    rows = torch.empty(T, row_bytes(D), dtype=torch.uint8, device=x_TD.device)
    rows[:, D : _scales_at(D)] = 0
    return rows


def pack_rows(x_TD: torch.Tensor) -> torch.Tensor:
    """x_TD: float. Returns uint8 (T, row_bytes(D)): its `quantize_rows`, values and scales of a row side by side."""
    rows = empty_packed_rows(x_TD)
    for part, made in zip(unpack_rows(rows, x_TD.shape[1]), quantize_rows(x_TD), strict=True):
        part.copy_(made)
    return rows


def unpack_rows(rows: torch.Tensor, hidden_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """rows: uint8 (R, row_bytes(hidden_size)). Returns FP8 (R, hidden_size) and float32 scales (R, G), views of them."""
    return rows[:, :hidden_size].view(FP8), rows[:, _scales_at(hidden_size) :].view(torch.float32)


def fp8_to_float(payload: torch.Tensor) -> torch.Tensor:
    """payload.float(), nine times faster for many values on a CPU, where torch converts FP8 one by one."""
    if payload.device.type != "cpu" or payload.numel() < _FEW_VALUES:
        return payload.float()
    # float16 has the same fields but for one more bit of exponent (0x4000), whose bias is 8 larger. Sign extension has filled
    # that bit with the sign. NaN is the one code with all bits set: adding one to its last bit carries into that bit.
    half = payload.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    half |= (half + 0x80).bitwise_and_(0x4000)
    return half.view(torch.float16).float().mul_(2.0**8)


def scale_of(largest: torch.Tensor) -> torch.Tensor:
    """The scale that brings the largest magnitude to the largest FP8 value; 1 where all values are zero."""
    return torch.where(largest > 0, largest / FP8_MAX, 1.0)


def _to_fp8(values: torch.Tensor) -> torch.Tensor:
    # Rounding may leave the largest just past the range, which e4m3fn would turn into NaN. NaN itself stays NaN.
    return values.clamp(-FP8_MAX, FP8_MAX).to(FP8)
