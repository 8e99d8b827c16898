"""The settings, in one place: each field is a keyword argument of `LLM`, a command-line flag, and a line of --help.

Parsed once, frozen afterwards. A field's metadata gives its help text, group, other spellings and allowed values;
`moe_runtime.cli` makes the flags from it.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from moe_runtime.errors import ConfigError

AUTO = "auto"
C = TypeVar("C", bound="_Checked")


def _field(
    default: Any,
    group: str,
    text: str,
    *,
    aliases: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    several: bool = False,
) -> Any:
    """A setting. `aliases` are other flag spellings; `low`/`high` bound a number, both included.

    `several`: a text which, on the command line, may also be given as several words; they are joined by commas.
    """
    metadata = {
        "group": group,
        "help": text,
        "aliases": aliases,
        "choices": choices,
        "low": low,
        "high": high,
        "several": several,
    }
    return dataclasses.field(default=default, metadata=metadata)


class _Checked:
    """Checks choices and bounds after construction; raises ConfigError naming the field and the allowed values."""

    def __post_init__(self) -> None:
        for f in fields(self):  # type: ignore[arg-type]
            value, meta = getattr(self, f.name), f.metadata
            if value is None or not meta:
                continue
            kind = str(f.type).replace(" | None", "")
            if kind in _KINDS and (
                not isinstance(value, _KINDS[kind]) or (kind != "bool" and isinstance(value, bool))
            ):
                raise ConfigError(f"{f.name}={value!r}: must be of type {kind}")
            if meta["choices"] and value not in meta["choices"]:
                raise ConfigError(f"{f.name}={value!r}: allowed are {', '.join(meta['choices'])}")
            low, high = meta["low"], meta["high"]
            if (low is not None and not value >= low) or (high is not None and not value <= high):
                bounds = f"at least {low}" if high is None else f"from {low} to {high}"
                raise ConfigError(f"{f.name}={value!r}: must be {bounds}")


_KINDS: dict[str, Any] = {"int": int, "float": (int, float), "str": str, "bool": bool}


@dataclass(frozen=True)
class EngineConfig(_Checked):
    """What a rank needs to know. The same object, unchanged, reaches every process."""

    # fmt: off
    model: str = _field("demo", "model", "Folder of a checkpoint in the hub's layout, or `demo`", aliases=("model-path",))
    tokenizer: str | None = _field(None, "model", "Folder of the tokenizer, if not the model's", aliases=("tokenizer-path",))
    skip_tokenizer_init: bool = _field(False, "model", "Work with token ids only")
    dtype: str = _field(AUTO, "model", "Type of weights and activations; auto: the checkpoint's",
                        choices=(AUTO, "float32", "bfloat16", "float16"))
    quantization: str = _field(AUTO, "model", "How experts are kept in memory; auto: as the checkpoint has them; none: in the model's type;"
                               " fp8: scales per block of 128 x 128, fp8_channel: per output channel, fp8_tensor: per matrix; int8: scales per output channel, int4: per group of values, both on CPUs, of dense layers too",
                               choices=(AUTO, "none", "fp8", "fp8_channel", "fp8_tensor", "int8", "int4"))
    max_model_len: int | None = _field(None, "model", "Longest prompt plus output, in tokens; default: the model's", aliases=("context-length",), low=1)
    seed: int = _field(0, "model", "Seed for requests that give none is drawn from this", aliases=("random-seed",))

    ep: int = _field(1, "parallel", "Number of expert-parallel ranks", aliases=("ep-size", "expert-parallel-size"), low=1, high=1024)
    device: str = _field(AUTO, "parallel", "auto: cuda if there is one", choices=(AUTO, "cpu", "cuda"))
    num_redundant_experts: int = _field(0, "parallel", "Extra copies of experts in every MoE layer", aliases=("ep-num-redundant-experts",), low=0)
    init_expert_location: str | None = _field(None, "parallel", "Which expert goes where: a placement file of this project, SGLang, TensorRT-LLM, vLLM,"
                                              " vllm-ascend or EPLB, or such JSON itself; trivial or nothing: in order", aliases=("expert-map-path",))
    dispatcher: str = _field(AUTO, "parallel", "How tokens travel between ranks", aliases=("all2all-backend", "moe-a2a-backend"),
                             choices=(AUTO, "local", "collective", "one_sided"))
    dispatch_buffer_mib: int = _field(16, "parallel", "Shared memory per rank for the one_sided dispatcher, in MiB", low=1)
    ep_dispatch_algorithm: str = _field(AUTO, "parallel", "Which copy of an expert computes a token, where it has several: the nearest (static), any (random),"
                                        " or what keeps the fullest rank lowest, from counts exchanged in every layer (dynamic); auto: dynamic on CPUs, in steps with many tokens",
                                        choices=(AUTO, "static", "random", "dynamic"))
    combine: str = _field("exact", "parallel", "Who sums a token's expert results: its own rank (exact: the same bits for any number of ranks), or each"
                          " rank its own share first (per_rank: fewer bytes)", choices=("exact", "per_rank"))
    dispatch_dtype: str = _field(AUTO, "parallel", "Type in which tokens travel to their experts: the model's, or FP8 with a scale per 128 values;"
                                 " auto: FP8 where Triton experts round them so anyway, else the model's", choices=(AUTO, "model", "fp8"))
    overlap: str = _field(AUTO, "parallel", "Compute one half of a step's tokens while the other half's travel (on), or a MoE layer's rows"
                          " in chunks (chunks); auto: what measured step times say", choices=(AUTO, "off", "on", "chunks"))
    dispatch_delay_ms: float = _field(0.0, "parallel", "Hold messages between ranks back, to try out a slower network (one_sided dispatcher on CPUs)",
                                      low=0, high=10_000)
    enable_eplb: bool = _field(False, "parallel", "Move experts between ranks while serving, as the load asks for")
    eplb_config: str | None = _field(None, "parallel", "Settings of --enable-eplb, a JSON object with vLLM's names: see docs/rebalancing.md")
    eplb_dry_run: bool = _field(False, "parallel", "With --enable-eplb: say what would be moved and what it would gain, and move nothing")
    eplb_algorithm: str | None = _field(None, "parallel", "How placements are planned while serving, ours or deepseek: algorithm of --eplb-config")
    eplb_rebalance_num_iterations: int | None = _field(None, "parallel", "Steps from one look at the load to the next: step_interval of --eplb-config", low=1)
    eplb_min_rebalancing_utilization_threshold: float | None = _field(
        None, "parallel", "Balancedness from which on nothing is moved: min_utilization of --eplb-config", low=0.0, high=1.0)
    step_timeout: float = _field(300.0, "parallel", "Seconds after which a silent rank counts as lost",
                                 aliases=("distributed-timeout-seconds", "dist-timeout"), low=1)

    moe_backend: str = _field(AUTO, "kernels", "How experts are computed", aliases=("moe-runner-backend",), choices=(AUTO, "reference", "cpu", "cpu_native", "triton", "deterministic"))
    attention_backend: str = _field(AUTO, "kernels", "How attention is computed", choices=(AUTO, "reference", "cpu", "cpu_native", "triton", "deterministic"))
    layer_backend: str = _field(AUTO, "kernels", "How norms, dense products and activations are computed", choices=(AUTO, "torch", "cpu_native", "triton", "deterministic"))
    cpu_kernels: str = _field(AUTO, "kernels", "Instruction set for which the C++ kernels of CPUs are built, on first use; auto: the best that the CPU has;"
                              " off: do without them", choices=(AUTO, "off", "avx512_bf16", "avx512", "avx2", "portable"))
    deterministic: bool = _field(False, "kernels", "Give a request the same logprobs, bit for bit, whatever runs beside it and on however many ranks; slower",
                                 aliases=("enable-deterministic-inference",))

    enforce_eager: bool = _field(False, "kernels", "Launch every step from Python: no CUDA graphs", aliases=("disable-cuda-graph",))
    cuda_graph_sizes: str | None = _field(None, "kernels", "Tokens a rank of the decode steps that are recorded as CUDA graphs, as in 1,2,4,8;"
                                          " default: 1,2,4,8,16,24,... up to max_num_seqs or 512",
                                          aliases=("cudagraph-capture-sizes", "cuda-graph-bs"), several=True)
    cuda_graph_max_size: int | None = _field(None, "kernels", "Largest of those sizes", aliases=("max-cudagraph-capture-size", "cuda-graph-max-bs"),
                                             low=1, high=65536)

    block_size: int = _field(16, "cache", "Tokens per KV-cache block", aliases=("page-size",), low=1, high=1024)
    num_kv_blocks: int | None = _field(None, "cache", "KV-cache blocks per rank; default: from free memory", aliases=("num-gpu-blocks-override",), low=1)
    kv_cache_dtype: str = _field(AUTO, "cache", "Type of the KV cache; auto: the model's; fp8 means fp8_e4m3", choices=(AUTO, "fp8_e4m3", "fp8"))
    memory_utilization: float = _field(0.8, "cache", "Share of the rank's free memory given to the KV cache", low=0.01, high=1.0,
                                       aliases=("gpu-memory-utilization", "mem-fraction-static"))
    enable_prefix_caching: bool = _field(True, "cache", "Reuse the KV of any common prefix")

    max_num_seqs: int = _field(256, "scheduler", "Sequences running at once per rank", aliases=("max-running-requests",), low=1)
    max_num_batched_tokens: int = _field(2048, "scheduler", "Token budget of a step per rank", aliases=("max-prefill-tokens", "chunked-prefill-size"), low=1)
    max_queued_requests: int = _field(4096, "scheduler", "Requests waiting per rank before new ones get 503", low=1)

    expert_load_memory_mib: int = _field(64, "expert loads", "Memory per rank for the record of expert loads, in MiB", low=1)
    record_routes_share: float = _field(0.0, "expert loads", "Share of requests of which the record keeps every token's experts (takes half of that memory)",
                                        low=0, high=1)
    expert_distribution_dir: str = _field("expert_distribution", "expert loads", "Folder for records of expert loads, one folder each")

    log_level: str = _field("info", "logging", "Least severe message shown", choices=("debug", "info", "warning", "error"))
    trace_steps: int = _field(0, "logging", "Steps, from the first on, of which each rank writes a trace for ui.perfetto.dev", low=0)
    trace_dir: str = _field("trace", "logging", "Folder for the traces: one file per rank, or one for all after POST /stop_profile")
    log_stats_interval: float = _field(10.0, "logging", "Seconds between throughput lines while busy; 0: none", low=0)
    # fmt: on


@dataclass(frozen=True)
class EplbConfig(_Checked):
    """How the placement of experts follows the load. vLLM's names where it has one."""

    # fmt: off
    window_size: int = _field(1000, "eplb", "Most recent steps whose load counts", low=1)
    step_interval: int = _field(3000, "eplb", "Steps from one look at the load to the next", low=1)
    num_redundant_experts: int = _field(0, "eplb", "Extra copies of experts in every MoE layer", low=0)
    log_balancedness: bool = _field(False, "eplb", "Log the balancedness")
    log_balancedness_interval: int = _field(1000, "eplb", "Steps between these lines", low=1)
    min_utilization: float = _field(1.0, "eplb", "Balancedness from which on nothing is planned", low=0.0, high=1.0)
    min_gain: float = _field(0.05, "eplb", "Share of the MoE layers' modelled time that a move must be expected to save", low=0.0, high=1.0)
    hysteresis: float = _field(2.0, "eplb", "How many times its cost a move must be expected to save until the next look", low=0.0)
    max_moved: float = _field(0.05, "eplb", "Share of all experts' slots that a plan may change; 1: plan as if nothing was anywhere", low=0.0, high=1.0)
    algorithm: str = _field("ours", "eplb", "How placements are planned: ours, or deepseek (EPLB's global form, which regards neither max_moved nor where experts are)", choices=("ours", "deepseek"))
    hardware: str = _field("auto", "eplb", "What the gain of a move is modelled for: h200, b200, cpu, a .yaml file, or auto (by the device)")
    max_bytes_per_step: int = _field(4 << 20, "eplb", "Bytes of weights that a rank fetches during one step at most", low=1 << 12)
    deadline_seconds: float = _field(600.0, "eplb", "Time after which a move is given up", low=0.1)
    num_staging_slots: int = _field(1, "eplb", "Slots per rank and MoE layer that stay empty, to move experts into", low=1, high=64)
    # fmt: on


@dataclass(frozen=True)
class ServerConfig(_Checked):
    """The HTTP side's settings, beside the engine's."""

    # fmt: off
    host: str = _field("127.0.0.1", "server", "Address to listen on")
    port: int = _field(8000, "server", "Port to listen on", low=1, high=65535)
    served_model_name: str | None = _field(None, "server", "Model name in the API; default: the model's folder name")
    api_key: str | None = _field(None, "server", "Require this bearer token; the MOE_RUNTIME_API_KEY variable also sets it")
    root_path: str = _field("", "server", "Path prefix behind a proxy", aliases=("fastapi-root-path",))
    chat_template: str | None = _field(None, "server", "File with a chat template, instead of the model's")
    generation_config: str = _field(AUTO, "server", "Sampling defaults: auto (the model's generation_config.json) or none",
                                    choices=(AUTO, "none"), aliases=("sampling-defaults",))
    shutdown_timeout: float = _field(25.0, "server", "Seconds that running requests get after SIGTERM", low=0, high=25)
    log_requests: bool = _field(False, "server", "Log each request", aliases=("enable-log-requests",))
    # fmt: on


@dataclass(frozen=True)
class BatchConfig(_Checked):
    """What launch/generate.py reads and writes, beside the engine's settings."""

    # fmt: off
    input: str = _field("", "batch", "File of requests, one JSON object a line, in OpenAI's batch format", aliases=("input-file",))
    record: str | None = _field(None, "batch", "Folder for the record of expert loads of this run")
    output: str = _field("", "batch", "File of answers; if it exists, the requests answered there are skipped", aliases=("output-file",))
    served_model_name: str | None = _field(None, "batch", "Model name that requests may give; default: the model's folder name")
    chat_template: str | None = _field(None, "batch", "File with a chat template, instead of the model's")
    generation_config: str = _field(AUTO, "batch", "Sampling defaults: auto (the model's generation_config.json) or none",
                                    choices=(AUTO, "none"), aliases=("sampling-defaults",))
    # fmt: on


def with_environment(config: ServerConfig) -> ServerConfig:
    """The settings that the environment fills where the command line left them out."""
    key = os.environ.get("MOE_RUNTIME_API_KEY")
    return replace(config, api_key=key) if key and config.api_key is None else config


def user_cache_folder() -> Path:
    """Where built things are kept: the user's XDG cache folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says that a relative path there is to be ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "moe-runtime"


def replace(config: C, **changes: Any) -> C:
    """A copy of a config with some fields changed, checked again. Raises ConfigError on unknown names."""
    names = [f.name for f in fields(config)]  # type: ignore[arg-type]
    unknown = [n for n in changes if n not in names]
    if unknown:
        import difflib

        near = difflib.get_close_matches(unknown[0], names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"unknown argument {unknown[0]!r}{hint}")
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]
