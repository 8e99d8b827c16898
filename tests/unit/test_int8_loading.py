"""int8 checkpoints of compressed-tensors, plain and packed: values, memory, bytes read, and what is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_runtime.backends import choose_activations
from moe_runtime.errors import CheckpointError, ConfigError
from moe_runtime.layers.linear import GatedMlp
from moe_runtime.models.quantized import with_weight_schemes
from moe_runtime.models.registry import load_spec
from moe_runtime.quantization import FP8_TENSOR, INT8_CHANNEL
from moe_runtime.weights.loader import weight_bytes
from tests.helpers.checkpoint_files import FILE, Tensors, drop, edit, load, put, reference
from tests.helpers.int8_checkpoints import INT8_FORMATS, pack, write_int8
from tests.helpers.parity import Reference, check_rows
from tests.helpers.run_decoder import logprobs_with_cpu_experts
from tests.helpers.tiny_models import FAMILIES, make_tiny

GRID = [(family, name) for family in FAMILIES for name in INT8_FORMATS]
QUICK = [("mixtral", "w8a16_packed"), ("qwen2_moe", "w8a8_static"), ("qwen3_moe", "w8a8")]
QUICK += [("olmoe", "w8a16_packed")]
CASES = [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in GRID]


def write(family: str, name: str, folder: Path, seed: int, **changes: Any) -> tuple[Path, Path]:
    """A checkpoint in int8, and the same values unquantised. Rows of all lengths modulo 4."""
    draw = random.Random(seed)
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"intermediate_size": draw.randint(21, 24)}
    if family == "olmoe":
        sizes |= {"num_attention_heads": 1, "hidden_size": draw.choice([34, 36])}
    else:
        sizes |= {"head_dim": draw.choice([6, 8]), "hidden_size": draw.randint(33, 36)}
    if family.startswith("qwen"):
        sizes["moe_intermediate_size"] = draw.randint(17, 20)
    if family == "qwen2_moe":
        sizes["shared_expert_intermediate_size"] = draw.randint(9, 12)
    make_tiny(family, folder / "source", seed, **(sizes | changes))
    write_int8(folder / "source", INT8_FORMATS[name], folder / "int8", folder / "plain")
    return folder / "int8", folder / "plain"


def codes_of(tensors: Tensors, matrix: str) -> list[list[int]]:
    """The values of a matrix, one by one out of the bits of its words."""
    if matrix in tensors:
        return tensors[matrix].tolist()
    width = int(tensors[matrix + "_shape"][1])
    words = tensors[matrix + "_packed"].tolist()
    return [[(row[i // 4] >> 8 * (i % 4)) % 256 - 128 for i in range(width)] for row in words]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_matches_transformers_on_the_dequantised_weights(
    family: str, name: str, tmp_path: Path, seed: int
) -> None:
    folder, plain = write(family, name, tmp_path, seed)
    decoder, report = load(folder)
    assert {mlp.gate_up.dtype for mlp in decoder.moe_mlps()} == {torch.int8}
    unread = [t.nbytes for n, t in load_file(folder / FILE).items() if n.endswith(("input_scale", "_shape"))]
    assert report.bytes_read == report.bytes_in_checkpoint - sum(unread)
    draw = random.Random(seed)
    text = [draw.randrange(decoder.spec.vocab_size) for _ in range(40)]
    check_rows(Reference(reference(plain)), [text], logprobs_with_cpu_experts(decoder, text), 2e-3)


@pytest.mark.parametrize("name", ["w8a8", "w8a16_packed"])
def test_a_rank_keeps_the_values_of_its_experts_and_reads_no_others(
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
    for layer, mlp in enumerate(decoder.moe_mlps()):
        weights = mlp.expert_weights()
        assert weights.scheme == INT8_CHANNEL
        assert weights.gate_up_scale is not None
        assert weights.down_scale is not None
        for slot, expert in enumerate(held):
            if expert < 0:
                assert not weights.dequantize_gate_up(slot).any()
                continue
            matrix = f"model.layers.{layer}.mlp.experts.{expert}.{{}}_proj.weight"
            gate, up, down = (matrix.format(part) for part in ("gate", "up", "down"))
            assert weights.gate_up_pFD[slot].tolist() == codes_of(tensors, gate) + codes_of(tensors, up)
            assert weights.down_pDF[slot].tolist() == codes_of(tensors, down)
            for kept, source in (
                (weights.gate_up_scale[slot][0], gate),
                (weights.gate_up_scale[slot][1], up),
                (weights.down_scale[slot], down),
            ):
                assert kept.dtype == torch.float32
                assert kept.tolist() == tensors[source + "_scale"].float().tolist()
    assert report.expert_bytes_read == pytest.approx(whole.expert_bytes_read * 3 / spec.num_experts)
    assert report.bytes_read - report.expert_bytes_read == whole.bytes_read - whole.expert_bytes_read
    taken = sum(p.numel() * p.element_size() for p in decoder.parameters())
    assert weight_bytes(decoder.spec, [len(held)] * spec.num_moe_layers, torch.float32) == taken


@pytest.mark.parametrize("name", ["w8a8", "w8a16_packed"])
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


@pytest.mark.parametrize("name", ["w8a8", "w8a16_packed"])
def test_dense_layers_stay_int8_if_asked(
    name: str, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file's codes and scales where it has them, else made: the head; by default they are dequantised."""
    folder, plain = write("qwen2_moe", name, tmp_path, seed)
    tensors = load_file(folder / FILE)
    assert {p.dtype for n, p in load(folder)[0].named_parameters() if ".attention.qkv.w" in n} == {
        torch.float32
    }
    monkeypatch.setattr("moe_runtime.weights.reading.FP8_CHUNK_BYTES", 100)
    decoder, _ = load(folder, "int8")
    layer = "model.layers.1."
    for target, sources in (
        ("attention.qkv", [f"self_attn.{p}_proj" for p in "qkv"]),
        ("attention.out", ["self_attn.o_proj"]),
        ("mlp.shared_expert.gate_up", ["mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"]),
        ("mlp.shared_expert.down", ["mlp.shared_expert.down_proj"]),
    ):
        matrices = [f"{layer}{source}.weight" for source in sources]
        found = decoder.get_parameter(f"layers.1.{target}.weight")
        assert found.tolist() == [row for m in matrices for row in codes_of(tensors, m)]
        scale = torch.cat([tensors[m + "_scale"].float() for m in matrices])
        assert torch.equal(decoder.get_parameter(f"layers.1.{target}.weight_scale"), scale)
    payload, scale = INT8_CHANNEL.quantize_weight(tensors[HEAD])
    assert decoder.head is not None
    assert torch.equal(decoder.head.weight, payload)
    assert torch.equal(decoder.head.weight_scale, scale)
    assert {p.dtype for n, p in decoder.named_parameters() if "norm" in n or "router" in n} == {torch.float32}
    edit(plain, lambda values: values.update({HEAD: payload * scale}))
    text = [random.Random(seed).randrange(decoder.spec.vocab_size) for _ in range(40)]
    check_rows(Reference(reference(plain)), [text], logprobs_with_cpu_experts(decoder, text), 2e-3)
    taken = sum(p.numel() * p.element_size() for p in decoder.parameters())
    assert (
        weight_bytes(decoder.spec, [decoder.spec.num_experts] * decoder.spec.num_moe_layers, torch.float32)
        == taken
    )


def test_a_tied_head_and_dense_mlps(tmp_path: Path, seed: int) -> None:
    make_tiny("qwen3_moe", tmp_path, seed, tie_word_embeddings=True, mlp_only_layers=[0], num_hidden_layers=2)
    decoder, _ = load(tmp_path, "int8")
    assert (decoder.head, decoder.embedding.weight.dtype) == (None, torch.float32)
    dense = decoder.layers[0].mlp
    assert isinstance(dense, GatedMlp)
    assert {dense.gate_up.weight.dtype, dense.down.weight.dtype} == {torch.int8}
    # The largest of every row has the largest code.
    assert set(dense.gate_up.weight.abs().amax(dim=1).tolist()) == {127}


def test_every_value_in_every_place_of_a_word(tmp_path: Path, seed: int) -> None:
    """All 256 codes, -128 among them, which symmetric files may hold."""
    folder, _ = write("qwen3_moe", "w8a16_packed", tmp_path, seed, hidden_size=259, moe_intermediate_size=18)
    matrix = "model.layers.0.mlp.experts.2.up_proj.weight"
    draw = random.Random(seed)
    codes = [[*draw.sample(range(-128, 128), 256), -128, 127, 0] for _ in range(18)]
    edit(folder, put(matrix + "_packed", pack(codes)))
    decoder, _ = load(folder)
    assert next(iter(decoder.moe_mlps())).gate_up[2][18:].tolist() == codes


MATRIX = "model.layers.1.mlp.experts.2.down_proj.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"
HEAD = "lm_head.weight"


def change(name: str, edited: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: edited(tensors[name]).contiguous()})


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("w8a8", drop(MATRIX + "_scale"), rf"lacks scales of int8 tensors: {MATRIX}_scale$"),
        ("w8a8", change(MATRIX + "_scale", lambda s: s[1:]), r"_scale .*int8_channel scales of a matrix"),
        ("w8a8", change(MATRIX, lambda w: w.float()), rf"{MATRIX} .*type F32, but quantization_config .* are int8$"),
        ("w8a8", change(MATRIX, lambda w: w[:, 1:]), rf"{MATRIX} in .* has shape"),
        ("w8a8", change(QUERY, lambda w: w.float()), rf"{QUERY}_scale has scales of {QUERY}, .*type F32, not I8$"),
        ("w8a8", change(HEAD, lambda w: w.to(torch.int8)), rf"lacks scales of int8 tensors: {HEAD}_scale$"),
        ("w8a8", change("model.norm.weight", lambda w: w.to(torch.int8)), r"norm\.weight .*type I8; supported"),
        ("w8a8", change(MATRIX, lambda w: w.to(torch.int32)), rf"{MATRIX} .*type I32; supported are F64, .*, I8$"),
        ("w8a8", put(MATRIX + "_zero_point", torch.zeros(1)), rf"does not know: {MATRIX}_zero_point$"),
        ("w8a8", change(MATRIX + "_scale", lambda s: s / 0), rf"{MATRIX} in .* holds NaN or infinity$"),
        ("w8a16_packed", drop(MATRIX + "_scale"), rf"lacks scales of int8 tensors: {MATRIX}_scale$"),
        ("w8a16_packed", drop(MATRIX + "_shape"), rf"lacks {MATRIX}_shape, the shape of {MATRIX}_packed$"),
        ("w8a16_packed", drop(MATRIX + "_packed"), rf"lacks {MATRIX}_packed, though it holds {MATRIX}_shape$"),
        ("w8a16_packed", put(MATRIX + "_shape", torch.ones(2)), rf"{MATRIX}_shape .*type F32 and shape \[2\]"),
        ("w8a16_packed", put(MATRIX + "_shape", torch.tensor([36, 20, 1])), r"shape \[3\]; .* type I64 or I32$"),
        ("w8a16_packed", change(MATRIX + "_packed", lambda w: w[:, 1:]), rf"{MATRIX}_packed .* in 8 bits has \["),
        ("w8a16_packed", change(MATRIX + "_packed", lambda w: w.long()), rf"{MATRIX}_packed .* type I64 .* of type I32$"),
        # Within the same number of words.
        ("w8a16_packed", put(MATRIX + "_shape", torch.tensor([36, 17])), rf"{MATRIX}_packed in .* shape \[36, 17\], but"),
        ("w8a16_packed", put(MATRIX, torch.ones(36, 20)), rf"same weights twice: {MATRIX}, {MATRIX}_packed$"),
        ("w8a16_packed", put("model.x.weight_packed", torch.ones(3, 2)), r"lacks model\.x\.weight_shape"),
        ("w8a16_packed", put(QUERY + "_g_idx", torch.zeros(36)), rf"does not know: {QUERY}_g_idx$"),
        ("w8a16_packed", put(QUERY + "_zero_point", torch.zeros(36)), rf"does not know: {QUERY}_zero_point$"),
    ],
)  # fmt: skip
def test_damaged_checkpoints(
    name: str, damage: Callable[[Tensors], Any], message: str, tmp_path: Path, seed: int
) -> None:
    """Every rank says the same of names, shapes and types, whichever experts it holds; values are seen by those who read them."""
    folder, _ = write("qwen3_moe", name, tmp_path, seed, hidden_size=36, moe_intermediate_size=20)
    edit(folder, damage)
    spec, _ = load_spec(folder)
    for held in ([2], [0]) if "NaN" not in message else ([2],):
        with pytest.raises(CheckpointError, match=message):
            load(folder, local_experts=[held] * spec.num_moe_layers)


def test_a_file_in_another_form_than_its_configuration_says(tmp_path: Path, seed: int) -> None:
    plain_ints, plain = write("mixtral", "w8a8", tmp_path, seed)
    words, _ = write("mixtral", "w8a16_packed", tmp_path / "packed", seed)
    configs = [(folder / "config.json").read_text() for folder in (plain_ints, words, plain)]
    (plain_ints / "config.json").write_text(configs[1])
    with pytest.raises(CheckpointError, match=r"of type I8; supported are .*, I8 in I32$"):
        load(plain_ints)
    (words / "config.json").write_text(configs[0])
    with pytest.raises(CheckpointError, match=r"does not know: .*\.weight_packed"):
        load(words)
    (plain_ints / "config.json").write_text(configs[2])
    edit(plain_ints, lambda t: [t.pop(n) for n in list(t) if "_scale" in n])
    with pytest.raises(CheckpointError, match=r"type I8, but config\.json has no quantization_config"):
        load(plain_ints)


@pytest.mark.parametrize("name", ["w8a8", "w8a16_packed"])
def test_experts_left_out_of_quantisation(name: str, tmp_path: Path, seed: int) -> None:
    """Attention in int8 and experts not, as the list of modules says; they can be quantised while loading, to FP8 too."""
    folder, plain = write("qwen3_moe", name, tmp_path, seed)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["lm_head", r"re:.*\.experts\..*"]
    (folder / "config.json").write_text(json.dumps(config))
    wide = load_file(plain / FILE)
    tensors = {n: t for n, t in load_file(folder / FILE).items() if ".experts." not in n}
    save_file(tensors | {n: t for n, t in wide.items() if ".experts." in n}, folder / FILE)
    decoder, _ = load(folder)
    assert decoder.spec.expert_scheme is None
    expected, _ = load(plain)
    for (tensor_name, a), (_, b) in zip(decoder.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(a, b), tensor_name
    quantised, _ = load(folder, "fp8_tensor")
    assert quantised.spec.expert_scheme == FP8_TENSOR
    assert choose_activations(decoder.spec, torch.bfloat16, log=False) == []


def test_settings_and_what_is_said_of_activations(tmp_path: Path, seed: int) -> None:
    said = {}
    for name in INT8_FORMATS:
        folder, _ = write("mixtral", name, tmp_path / name, seed)
        spec, _ = load_spec(folder)
        for asked in ("auto", "int8"):
            assert with_weight_schemes(spec, asked).expert_scheme == INT8_CHANNEL
        with pytest.raises(ConfigError, match=r"quantization='fp8': .*stored as int8_channel; use auto"):
            with_weight_schemes(spec, "fp8")
        with pytest.raises(
            ConfigError, match=r"'auto': int8 experts are computed on CPUs only; none dequantises"
        ):
            with_weight_schemes(spec, "auto", "cuda")
        assert with_weight_schemes(spec, "none", "cuda").expert_scheme is None
        said[name] = [tuple(c) for c in choose_activations(spec, torch.bfloat16, log=False)]
    kept = "the checkpoint asks for int8, W8A8; here activations stay as they are, W8A16"
    assert said["w8a8"] == [("expert_activations", "bfloat16", kept)]
    (static,) = said["w8a8_static"]
    assert static[2] == f"{kept}; its static scales are not used"
    assert said["w8a16_naive"] == said["w8a16_packed"] == []
    spec, _ = load_spec(tmp_path / "w8a8" / "int8")
    (undone,) = choose_activations(with_weight_schemes(spec, "none"), torch.float32, log=False)
    assert undone.why == kept.removesuffix(", W8A16")
