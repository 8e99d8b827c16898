"""FP8 through the whole engine: checkpoints of the hub's formats against transformers on the dequantised weights."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from moe_runtime import LLM, SamplingParams
from moe_runtime.errors import ConfigError
from moe_runtime.experts import triton_grouped
from moe_runtime.layers import triton_ops_kernels
from moe_runtime.models.quantized import with_weight_schemes
from moe_runtime.models.registry import load_spec
from moe_runtime.triton_support.fp8_rows import quantize_rows
from moe_runtime.weights.demo_model import demo_model_path
from moe_runtime.weights.loader import load_weights
from tests.helpers.checkpoint_files import FILE, reference
from tests.helpers.engine_ranks import Builder, Output, Script, check_same, config, run_engine
from tests.helpers.fp8_checkpoints import FORMATS, write_fp8
from tests.helpers.parity import Reference, check_greedy
from tests.helpers.quantised_parity import GREEDY, check_engine, family_cases
from tests.helpers.run_decoder import logprobs_with_cpu_experts
from tests.helpers.spawn import run_ranks
from tests.helpers.tiny_models import make_tiny

if TYPE_CHECKING:
    from moe_runtime.engine.outputs import RequestOutput

TEXT = Path(__file__).parents[1] / "data" / "perplexity.txt"
SIZES = {"num_hidden_layers": 2, "hidden_size": 160, "intermediate_size": 140, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2}
CASES = family_cases(("deepseek", "ct_channel"), ("qwen3_moe", "deepseek", 2))


def write(family: str, name: str, folder: Path, seed: int) -> tuple[Path, Path]:
    own = {} if family == "olmoe" else {"head_dim": 16}
    if family.startswith("qwen"):
        own["moe_intermediate_size"] = 140
    make_tiny(family, folder / "source", seed, **SIZES, **own)
    write_fp8(folder / "source", FORMATS[name], folder / "fp8", folder / "plain")
    return folder / "fp8", folder / "plain"


def check(plain: Path, outputs: list[RequestOutput]) -> None:
    check_greedy(Reference(reference(plain)), outputs, 16)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "name", "ep"), CASES)
def test_matches_transformers(family: str, name: str, ep: int, tmp_path: Path, seed: int) -> None:
    folder, plain = write(family, name, tmp_path, seed)
    chosen = check_engine(folder, plain, ep, seed)
    scheme = "fp8_block" if name == "deepseek" else "fp8_channel"
    assert [(c["quantization"], c["moe_backend"]) for c in chosen] == [(scheme, "cpu")] * ep


def test_an_unquantised_checkpoint_is_quantised_on_loading(tmp_path: Path, seed: int) -> None:
    """The values are as this test's own arithmetic quantises the experts, and only them."""
    folder, plain = write("qwen3_moe", "powers", tmp_path, seed)
    source = tmp_path / "source"
    tensors = load_file(source / FILE)
    quantised = load_file(plain / FILE)
    save_file(
        tensors | {name: tensor for name, tensor in quantised.items() if ".experts." in name}, plain / FILE
    )
    prompts = [[3, 1, 4, 1, 5], list(range(30))]
    flags = {"ep": 2, "dtype": "float32", "skip_tokenizer_init": True, "num_kv_blocks": 64}
    with LLM(model=str(source), quantization="fp8", **flags) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert {rank.info["quantization"] for rank in llm._engine.ready} == {"fp8_block"}
    check(plain, outputs)
    with pytest.raises(ConfigError, match="stored as fp8_block"):
        LLM(model=str(folder), quantization="fp8_channel", **flags)


def test_int8_made_on_loading(tmp_path: Path, seed: int) -> None:
    """The values are as this test's own arithmetic makes them, and each of two ranks keeps experts and dense layers in int8."""
    folder, _ = write("qwen3_moe", "deepseek", tmp_path, seed)
    source, plain = tmp_path / "source", tmp_path / "int8"
    shutil.copytree(source, plain)

    def rounded(weight: torch.Tensor) -> torch.Tensor:
        step = weight.abs().amax(dim=1, keepdim=True) / 127
        return (weight / step).round() * step

    tensors = load_file(source / FILE)
    quantised = [n for n in tensors if n.endswith("_proj.weight") or n == "lm_head.weight"]
    assert {n.split(".")[-2] for n in tensors} - {n.split(".")[-2] for n in quantised} == {
        "embed_tokens", "gate", "norm", "q_norm", "k_norm", "input_layernorm", "post_attention_layernorm",
    }  # fmt: skip
    save_file({n: rounded(t) if n in quantised else t for n, t in tensors.items()}, plain / FILE)
    flags = {"dtype": "float32", "skip_tokenizer_init": True, "num_kv_blocks": 64, "quantization": "int8"}
    with LLM(model=str(source), ep=2, **flags) as llm:
        outputs = llm.generate([[3, 1, 4, 1, 5], list(range(30))], GREEDY, use_tqdm=False)
        for rank in llm._engine.ready:
            chosen = [rank.info[name] for name in ("quantization", "dense_weights", "layer_backend")]
            assert chosen == ["int8_channel", "int8_channel", "torch"]
    check(plain, outputs)
    with pytest.raises(ConfigError, match="stored as fp8_block"):
        LLM(model=str(folder), **flags)


class Launches:
    """In place of a kernel: launches it, and says of each launch whether it wrote FP8 rows."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.packed = kernel, []  # type: tuple[Any, list[bool]]

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **constants: Any) -> None:
            self.packed.append(any(isinstance(a, torch.Tensor) and a.dtype == torch.float8_e4m3fn for a in args))
            self.kernel[grid](*args, **constants)

        return launch


class AsOnGpu(Builder):
    """Experts round their input too, which ranks on CPUs spare themselves."""

    def decide(self) -> None:
        super().decide()
        self.spec = replace(self.spec, quantize_activations=True)


class Ran(NamedTuple):
    """One engine's run on one rank."""

    outputs: dict[str, Output]
    steps: int
    packed_norms: int
    widths: set[int]
    """Of the rows that the experts rounded themselves."""
    dispatch_dtype: str


def each_way(rank: int, num_ranks: int, folder: str, ways: list[dict[str, Any]], seed: int) -> list[Ran]:
    """An engine for each of the settings, with the same prompts."""
    draw = random.Random(seed + rank)
    prompts = [[draw.randrange(60) for _ in range(n)] for n in (5, 1)]
    results = []
    for settings in ways:
        with pytest.MonkeyPatch.context() as patched:
            norms, widths = Launches(triton_ops_kernels.rms_norm), set()

            def rounds(x: torch.Tensor, *rest: Any, seen: set[int] = widths) -> None:
                seen.add(x.shape[1])
                quantize_rows(x, *rest)

            patched.setattr(triton_ops_kernels, "rms_norm", norms)
            patched.setattr(triton_grouped, "quantize_rows", rounds)
            builder = AsOnGpu(config(folder, ep=num_ranks, **settings), ())
            outputs, stats = run_engine(builder, Script(prompts))
            chosen = {choice.what: choice.name for choice in builder.choices}
            results.append(
                Ran(outputs, stats.steps, sum(norms.packed), widths, chosen["dispatch_dtype"])
            )
    return results


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ep", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_norm_makes_the_rows_of_fp8_experts(ep: int, tmp_path: Path, seed: int) -> None:
    """One kernel adds, normalises and rounds: bit for bit what experts that round their input themselves give, and the CPU path's tokens."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 160, "moe_intermediate_size": 140, "head_dim": 16}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2}
    make_tiny("qwen3_moe", tmp_path / "source", seed, **sizes)
    write_fp8(tmp_path / "source", FORMATS["deepseek"], tmp_path / "fp8", tmp_path / "plain")
    on_cpu = {"attention_backend": "cpu", "layer_backend": "torch", "moe_backend": "cpu"}
    ways = [{}, {"dispatch_dtype": "model"}, on_cpu]
    for fused, unfused, plain in run_ranks(each_way, ep, str(tmp_path / "fp8"), ways, seed, timeout=280):
        assert [r.dispatch_dtype for r in (fused, unfused, plain)] == ["fp8", "model", "model"]
        assert fused.packed_norms == 2 * fused.steps > 0, "once in each layer of each step"
        assert unfused.packed_norms == plain.packed_norms == 0
        assert 160 in unfused.widths
        assert 160 not in fused.widths, "the experts rounded their input again"
        assert fused.outputs == unfused.outputs
        check_same(plain.outputs, fused.outputs, 0.05)


@pytest.mark.slow
def test_perplexity_of_the_demo_model() -> None:
    """Of a fixed text, with the experts quantised on loading, against bfloat16."""
    spec, adapter = load_spec(demo_model_path())
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_model_path())
    ids = tokenizer(TEXT.read_text(encoding="utf-8"))["input_ids"]
    assert len(ids) > 300
    perplexity = {}
    for asked in ("none", "fp8", "fp8_channel", "fp8_tensor", "int8", "int4"):
        asked_spec = with_weight_schemes(spec, asked)
        held = [list(range(spec.num_experts))] * spec.num_moe_layers
        decoder = load_weights(demo_model_path(), asked_spec, adapter, held, torch.bfloat16, "cpu")
        logprobs = logprobs_with_cpu_experts(decoder, ids)
        chosen = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])
        perplexity[asked] = float(chosen.mean().neg().exp())
    print(f"perplexity of {len(ids)} tokens: {perplexity}")
    assert perplexity["none"] < 60, "the model does not understand the text"
    for asked in perplexity:
        bound = 0.05 if asked == "int4" else 0.01
        assert abs(perplexity[asked] / perplexity["none"] - 1) < bound, asked
