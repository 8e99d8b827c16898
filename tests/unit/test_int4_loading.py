"""int4 checkpoints of compressed-tensors and int4 made on loading: values, memory, bytes read, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moe_runtime import int4
from moe_runtime.backends import choose_activations
from moe_runtime.errors import CheckpointError, ConfigError
from moe_runtime.models.quantized import with_weight_schemes
from moe_runtime.models.registry import load_spec
from moe_runtime.quantization import INT4_MADE, INT8_CHANNEL
from moe_runtime.weights.loader import weight_bytes
from tests.helpers.checkpoint_files import FILE, Tensors, drop, edit, load, put, reference
from tests.helpers.int4_checkpoints import INT4_FORMATS, pack, write_int4
from tests.helpers.run_decoder import logprobs_with_cpu_experts
from tests.helpers.tiny_models import FAMILIES, make_tiny, reference_logprobs

GRID = [(family, name) for family in FAMILIES for name in INT4_FORMATS]
QUICK = [("mixtral", "group32"), ("qwen2_moe", "group128"), ("qwen3_moe", "group32_zero_points")]
QUICK += [("olmoe", "channel_zero_points"), ("qwen3_moe", "group64"), ("mixtral", "channel")]
CASES = [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in GRID]


def write(family: str, name: str, folder: Path, seed: int, **changes: Any) -> tuple[Path, Path]:
    """A checkpoint in int4, and the same values unquantised. Rows of all lengths modulo 8, and longer than a group or a block."""
    draw = random.Random(seed)
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"intermediate_size": draw.randint(33, 40)}
    if family == "olmoe":
        sizes |= {"num_attention_heads": 1, "hidden_size": draw.choice([66, 68])}
    else:
        sizes |= {"head_dim": draw.choice([6, 8]), "hidden_size": draw.randint(65, 72)}
    if family.startswith("qwen"):
        sizes["moe_intermediate_size"] = draw.randint(17, 24)
    if family == "qwen2_moe":
        sizes["shared_expert_intermediate_size"] = draw.randint(9, 12)
    make_tiny(family, folder / "source", seed, **(sizes | changes))
    write_int4(folder / "source", INT4_FORMATS[name], folder / "int4", folder / "plain")
    return folder / "int4", folder / "plain"


def codes_of(tensors: Tensors, matrix: str) -> list[list[int]]:
    """The codes of a matrix, one by one out of the bits of its words."""
    width = int(tensors[matrix + "_shape"][1])
    words = tensors[matrix + "_packed"].tolist()
    return [[(row[i // 8] >> 4 * (i % 8)) % 16 for i in range(width)] for row in words]


def scales_of(tensors: Tensors, matrix: str) -> list[list[float]]:
    """Scales, then zero points, of each row."""
    rows = tensors[matrix + "_scale"].float().tolist()
    if matrix + "_zero_point" not in tensors:
        return rows
    words = tensors[matrix + "_zero_point"].tolist()
    return [
        [*row, *(float((word >> 4 * (i % 8)) % 16) for word in words[i // 8])] for i, row in enumerate(rows)
    ]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_matches_transformers_on_the_dequantised_weights(
    family: str, name: str, tmp_path: Path, seed: int
) -> None:
    folder, plain = write(family, name, tmp_path, seed)
    decoder, report = load(folder)
    assert {mlp.scheme for mlp in decoder.moe_mlps()} == {INT4_FORMATS[name].scheme}
    unread = [t.nbytes for n, t in load_file(folder / FILE).items() if n.endswith("_shape")]
    assert report.bytes_read == report.bytes_in_checkpoint - sum(unread)
    draw = random.Random(seed)
    text = [draw.randrange(decoder.spec.vocab_size) for _ in range(40)]
    expected = reference_logprobs(reference(plain), text)
    assert expected.std() > 0.3, "the reference's distribution is too flat to show a difference"
    torch.testing.assert_close(logprobs_with_cpu_experts(decoder, text), expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize("name", ["group32", "group32_zero_points", "channel_zero_points"])
def test_a_rank_keeps_the_codes_of_its_experts_and_reads_no_others(
    name: str, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of a few rows; the estimate of memory is exact."""
    folder, _ = write("qwen3_moe", name, tmp_path, seed)
    _, whole = load(folder)
    spec, _ = load_spec(folder)
    # An empty slot, and an expert twice.
    held = [3, -1, 1, 3]

    def spoil(tensors: Tensors) -> None:
        for expert in set(range(spec.num_experts)) - set(held):
            for tensor in (t for n, t in tensors.items() if f".experts.{expert}." in n and "_scale" in n):
                tensor.fill_(float("nan"))

    edit(folder, spoil)
    monkeypatch.setattr("moe_runtime.weights.reading.FP8_CHUNK_BYTES", 100)
    decoder, report = load(folder, local_experts=[held] * spec.num_moe_layers)
    tensors = load_file(folder / FILE)
    hidden, inner = spec.hidden_size, spec.moe_intermediate_size
    for layer, mlp in enumerate(decoder.moe_mlps()):
        weights = mlp.expert_weights()
        assert weights.gate_up_scale is not None
        assert weights.down_scale is not None
        for slot, expert in enumerate(held):
            if expert < 0:
                assert not weights.dequantize_gate_up(slot).any()
                assert not weights.dequantize_down(slot).any()
                continue
            matrix = f"model.layers.{layer}.mlp.experts.{expert}.{{}}_proj.weight"
            gate, up, down = (matrix.format(part) for part in ("gate", "up", "down"))
            found = int4.unpack(weights.gate_up_pFD[slot], hidden).tolist()
            assert found == codes_of(tensors, gate) + codes_of(tensors, up)
            assert int4.unpack(weights.down_pDF[slot], inner).tolist() == codes_of(tensors, down)
            assert weights.gate_up_scale[slot][0].tolist() == scales_of(tensors, gate)
            assert weights.gate_up_scale[slot][1].tolist() == scales_of(tensors, up)
            assert weights.down_scale[slot].tolist() == scales_of(tensors, down)
    assert report.expert_bytes_read == pytest.approx(whole.expert_bytes_read * 3 / spec.num_experts)
    taken = sum(p.numel() * p.element_size() for p in decoder.parameters())
    assert weight_bytes(decoder.spec, [len(held)] * spec.num_moe_layers, torch.float32) == taken


@pytest.mark.parametrize("name", ["group128", "group32_zero_points"])
def test_experts_can_be_dequantised_on_loading(name: str, tmp_path: Path, seed: int) -> None:
    folder, plain = write("mixtral", name, tmp_path, seed)
    for dtype in (torch.float32, torch.bfloat16):
        decoder, _ = load(folder, "none", dtype=dtype)
        expected, _ = load(plain, dtype=dtype)
        for (a_name, a), (b_name, b) in zip(
            decoder.named_parameters(), expected.named_parameters(), strict=True
        ):
            assert a_name == b_name
            assert torch.equal(a, b), a_name


def test_made_on_loading(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts in int4, dense layers and the head in int8, the rest as it was; each matrix as the oracle makes it, in whatever chunks."""
    _, plain = write("qwen2_moe", "group128", tmp_path, seed)
    monkeypatch.setattr("moe_runtime.weights.reading.FP8_CHUNK_BYTES", 100)
    decoder, _ = load(plain, "int4")
    tensors = load_file(plain / FILE)
    mlp = list(decoder.moe_mlps())[1]
    weights = mlp.expert_weights()
    assert weights.scheme == INT4_MADE
    assert weights.gate_up_scale is not None
    for expert in range(decoder.spec.num_experts):
        matrix = f"model.layers.1.mlp.experts.{expert}.{{}}_proj.weight"
        for found, scale, part in (
            (weights.gate_up_pFD[expert].chunk(2)[1], weights.gate_up_scale[expert][1], "up"),
            (weights.down_pDF[expert], weights.down_scale[expert], "down"),  # type: ignore[index]
        ):
            payload, scales = INT4_MADE.quantize_weight(tensors[matrix.format(part)])
            assert torch.equal(found, payload)
            assert torch.equal(scale, scales)
    assert decoder.spec.dense_scheme == INT8_CHANNEL
    payload, scale = INT8_CHANNEL.quantize_weight(tensors["lm_head.weight"])
    assert decoder.head is not None
    assert torch.equal(decoder.head.weight, payload)
    assert decoder.get_parameter("layers.0.attention.qkv.weight").dtype == torch.int8
    kept = {p.dtype for n, p in decoder.named_parameters() if "norm" in n or "router" in n or "embed" in n}
    assert kept == {torch.float32}
    taken = sum(p.numel() * p.element_size() for p in decoder.parameters())
    slots = [decoder.spec.num_experts] * decoder.spec.num_moe_layers
    assert weight_bytes(decoder.spec, slots, torch.float32) == taken


def test_nan_is_not_made_int4(tmp_path: Path, seed: int) -> None:
    _, plain = write("mixtral", "group128", tmp_path, seed)
    matrix = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    edit(plain, lambda tensors: tensors[matrix][3].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=rf"{matrix} in .* holds NaN or infinity$"):
        load(plain, "int4")


MATRIX = "model.layers.1.mlp.experts.2.down_proj.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"


def change(name: str, edited: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: edited(tensors[name]).contiguous()})


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("group32", drop(MATRIX + "_scale"), rf"lacks scales of int4 tensors: {MATRIX}_scale$"),
        ("group32", change(MATRIX + "_scale", lambda s: s[:, :1]), r"_scale .*int4_group32 scales of a matrix"),
        ("group32", change(MATRIX + "_scale", lambda s: s / 0), rf"{MATRIX}_packed in .* holds NaN or infinity$"),
        ("group32", drop(MATRIX + "_shape"), rf"lacks {MATRIX}_shape, the shape of {MATRIX}_packed$"),
        ("group32", change(MATRIX + "_packed", lambda w: w[:, 1:]), rf"{MATRIX}_packed .* in 4 bits has \["),
        ("group32", put(QUERY + "_g_idx", torch.zeros(72)), rf"does not know: {QUERY}_g_idx$"),
        ("group32", put(MATRIX + "_zero_point", torch.zeros(9, 2)), rf"does not know: {MATRIX}_zero_point$"),
        ("group32_zero_points", drop(MATRIX + "_zero_point"), rf"lacks {MATRIX}_zero_point, the zero points of {MATRIX}$"),
        ("group32_zero_points", change(MATRIX + "_zero_point", lambda z: z[1:]), r"_zero_point in .* shape \[8, 2\], but int4_group32_zero_points of a matrix of \[72, 40\] has \[9, 2\] words"),
        ("group32_zero_points", change(MATRIX + "_zero_point", lambda z: z.float()), r"_zero_point in .* type F32"),
        ("group32_zero_points", put("lm_head.weight_zero_point", torch.zeros(3)), r"lm_head\.weight_zero_point has zero points of lm_head\.weight, which is not int4$"),
    ],
)  # fmt: skip
def test_damaged_checkpoints(
    name: str, damage: Callable[[Tensors], Any], message: str, tmp_path: Path, seed: int
) -> None:
    """Every rank says the same of names, shapes and types, whichever experts it holds; values are seen by those who read them."""
    folder, _ = write("qwen3_moe", name, tmp_path, seed, hidden_size=72, moe_intermediate_size=40)
    edit(folder, damage)
    spec, _ = load_spec(folder)
    for held in ([2], [0]) if "NaN" not in message else ([2],):
        with pytest.raises(CheckpointError, match=message):
            load(folder, local_experts=[held] * spec.num_moe_layers)


def test_every_code_in_every_place_of_a_word(tmp_path: Path, seed: int) -> None:
    folder, _ = write("qwen3_moe", "group32", tmp_path, seed, hidden_size=131, moe_intermediate_size=18)
    matrix = "model.layers.0.mlp.experts.2.up_proj.weight"
    draw = random.Random(seed)
    codes = [[*draw.sample([*range(16)] * 8, 128), 15, 0, 7] for _ in range(18)]
    edit(folder, put(matrix + "_packed", pack(codes)))
    decoder, _ = load(folder)
    assert int4.unpack(next(iter(decoder.moe_mlps())).gate_up[2][18:], 131).tolist() == codes


def test_settings(tmp_path: Path, seed: int) -> None:
    """Asked for by name, the experts stay as the file has them, and dense layers go to the model's dtype."""
    folder, _ = write("mixtral", "group128", tmp_path, seed)
    spec, _ = load_spec(folder)
    for asked in ("auto", "int4"):
        found = with_weight_schemes(spec, asked)
        assert (found.expert_scheme, found.dense_scheme) == (INT4_FORMATS["group128"].scheme, None)
    for asked in ("fp8", "int8"):
        with pytest.raises(ConfigError, match=rf"'{asked}': .*stored as int4_group128; use auto"):
            with_weight_schemes(spec, asked)
    with pytest.raises(
        ConfigError, match=r"'auto': int4 experts are computed on CPUs only; none dequantises"
    ):
        with_weight_schemes(spec, "auto", "cuda")
    assert with_weight_schemes(spec, "none", "cuda").expert_scheme is None
    assert choose_activations(spec, torch.bfloat16, log=False) == []
