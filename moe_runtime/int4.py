"""int4 weights: how values become codes, bytes and scales, and back. `QuantScheme` (quantization.py) is the front of it.

A value is (code - zero point) * scale, with codes from 0 to 15. Some values that follow one another in a matrix row, a group, share a scale
and a zero point; the last group of a row may be shorter. Without zero points it is 8. Scales and zero points of an [out, in] matrix are one
tensor [out, groups], or [out, 2 * groups]: a row's scales, then its zero points; files have whole numbers as zero points, made ones have fractions.

Codes lie two to a byte, in blocks of 64 values of 32 bytes: byte i of a block has value i in its lower half and value i + 32 in its upper
half, so that 32 neighbours come out of 32 bytes with one operation each. A row ends with a whole block, whose surplus codes are 0.
"""

from __future__ import annotations

import torch

BLOCK = 64
LARGEST_CODE = 15
MIDDLE = 8
"""The zero point where there are none in the file."""
SHRUNK = (1.0, 0.92, 0.84)
"""Parts of a group's range, of which the one with the smallest squared error is taken."""


def packed_bytes(num_in: int) -> int:
    """Bytes of a row of so many values."""
    return -(-num_in // BLOCK) * BLOCK // 2


def pack(codes: torch.Tensor) -> torch.Tensor:
    """codes: uint8 (..., in), from 0 to 15. Returns uint8 (..., packed_bytes(in))."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % BLOCK))
    halves = padded.view(*codes.shape[:-1], -1, 2, BLOCK // 2)
    return (halves[..., 1, :] << 4).bitwise_or_(halves[..., 0, :]).flatten(-2)


def unpack(payload: torch.Tensor, num_in: int) -> torch.Tensor:
    """payload: uint8 (..., packed_bytes(in)). Returns the codes, uint8 (..., in)."""
    blocks = payload.view(*payload.shape[:-1], -1, 1, BLOCK // 2)
    return torch.cat((blocks & LARGEST_CODE, blocks >> 4), dim=-2).flatten(-3)[..., :num_in]


def dequantize(payload: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, num_in: int) -> torch.Tensor:
    """payload: (..., out, packed_bytes(in)); scale, zero: what belongs to every value, (..., out, in). Returns float32 (..., out, in)."""
    return (unpack(payload, num_in).float() - zero) * scale


def encode(weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """weight: (..., out, in); scale, zero as of `dequantize`. The payload with the nearest codes; NaN becomes code 0."""
    return pack(_codes(weight.float(), scale, zero).nan_to_num_().to(torch.uint8))


def best_scales(weight: torch.Tensor, group: int) -> torch.Tensor:
    """weight: (..., out, in). Scales and zero points, (..., out, 2 * groups), in float32 with bfloat16's precision.

    For parts (SHRUNK) of a group's range: codes are spread over it, then scale and zero point fitted to the codes by least squares; the
    part with the smallest squared error is taken. NaN and infinity show in the result.
    """
    values, num_in = weight.float(), weight.shape[-1]
    whole = num_in // group * group
    parts = [values[..., :whole].reshape(*values.shape[:-1], -1, group)] if whole else []
    if whole < num_in:
        parts.append(values[..., None, whole:])
    fitted = [_fit(groups) for groups in parts]
    return torch.cat([f[0] for f in fitted] + [f[1] for f in fitted], dim=-1)


def _fit(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """groups: float32 (..., groups, values). Their scales and zero points, (..., groups)."""
    low, high = groups.aminmax(dim=-1, keepdim=True)
    mean = groups.mean(dim=-1, keepdim=True)
    same = torch.where(mean == 0, 1.0, mean / 8)  # The scale where all values are the same.
    best: list[torch.Tensor] = []
    for part in SHRUNK:
        scale = (high - low) * (part / LARGEST_CODE)
        scale = torch.where(scale == 0, same, scale)
        codes = _codes(groups, scale, LARGEST_CODE / 2 - (low + high) / 2 / scale)
        middle = codes.mean(dim=-1, keepdim=True)
        codes.sub_(middle)
        spread = codes.square().sum(dim=-1, keepdim=True)
        fitted = (codes * (groups - mean)).sum(dim=-1, keepdim=True) / spread
        scale = torch.where(spread == 0, scale, fitted).bfloat16().float()
        zero = (middle - mean / scale).bfloat16().float()
        error = (_codes(groups, scale, zero).sub_(zero).mul_(scale) - groups).square_().sum(-1, keepdim=True)
        found = [error, scale, zero]
        if best:
            found = [torch.where(error < best[0], a, b) for a, b in zip(found, best, strict=True)]
        best = found
    return best[1].squeeze(-1), best[2].squeeze(-1)


def _codes(values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """The nearest codes, float32; NaN stays NaN."""
    return (values / scale).add_(zero).round_().clamp_(0, LARGEST_CODE)
