"""Flags that users bring from vLLM and SGLang, where they are more than another name for one of ours."""

from __future__ import annotations

NEGATIVES: dict[str, tuple[str, ...]] = {
    "enable_prefix_caching": ("disable-radix-cache",),
    "log_requests": ("disable-log-requests",),
}
"""Flags that switch a boolean setting off."""

_NOT_YET: dict[str, str] = {
    "tensor parallelism": "tensor-parallel-size tp-size tp moe-tp moe-tp-size moe-dense-tp-size dense-tp-size",
    "pipeline parallelism": "pipeline-parallel-size pp-size pp",
    "context parallelism": "decode-context-parallel-size dcp prefill-context-parallel-size pcp attn-cp-size dcp-size",
    "several front-ends, or one apart from the ranks": "api-server-count headless data-parallel-external-lb"
    " data-parallel-hybrid-lb tokenizer-worker-num",
    "other models than text decoders": "limit-mm-per-prompt mm-processor-kwargs is-embedding enable-multimodal task runner convert",
    "falling back on transformers' model code": "model-impl",
    "sleeping and waking up": "enable-sleep-mode enable-memory-saver",
    "custom logit processors": "logits-processors enable-custom-logit-processor",
    "a choice of sampling kernels": "sampling-backend",
    "a limit of top logprobs (it is 20)": "max-logprobs",
    "a limit of logged text (texts are not logged)": "max-log-len log-requests-level enable-log-outputs",
    "TLS": "ssl-keyfile ssl-certfile ssl-ca-certs",
    "CORS headers": "allowed-origins allow-credentials allowed-methods allowed-headers",
    "an administrator's key": "admin-api-key",
    "a Unix socket": "uds",
    "choosing the kernels' communication mode": "deepep-mode",
    "load balancing of experts": "eplb-rebalance-layers-per-chunk",
    "modes of recording expert loads (they are always recorded; see --expert-load-memory-mib)": "expert-distribution-recorder-mode"
    " expert-distribution-recorder-buffer-size enable-expert-distribution-metrics enable-return-routed-experts",
    "sizing the KV cache in bytes or tokens (use --num-kv-blocks)": "kv-cache-memory-bytes max-total-tokens",
    "KV cache outside the device's memory": "kv-offloading-size swap-space cpu-offload-gb"
    " enable-hierarchical-cache hicache-ratio hicache-size",
    "KV cache events": "kv-events-config",
    "a choice of eviction policy": "radix-eviction-policy prefix-caching-hash-algo",
    "a choice of scheduling policy": "scheduling-policy schedule-policy enable-priority-scheduling",
    "overlapped scheduling": "async-scheduling disable-overlap-schedule",
    "grouping of streamed tokens": "stream-interval",
    "compilation": "compilation-config enable-torch-compile O O0 O1 O2 O3",
    "speculative decoding": "speculative-config speculative-algorithm speculative-draft-model-path"
    " speculative-num-steps speculative-num-draft-tokens speculative-eagle-topk",
    "grammars": "structured-outputs-config guided-decoding-backend grammar-backend",
    "tool calls and reasoning parsers": "enable-auto-tool-choice tool-call-parser reasoning-parser",
    "disaggregated prefill": "kv-transfer-config disaggregation-mode disaggregation-transfer-backend"
    " disaggregation-bootstrap-port",
    "LoRA": "enable-lora lora-modules lora-paths max-loras max-lora-rank max-loras-per-batch",
    "overriding generation settings (send them with each request)": "override-generation-config",
    "overriding the model's configuration": "hf-overrides json-model-override-args",
    "tracing": "otlp-traces-endpoint enable-trace",
    "profiling": "profiler-config",
    "elastic ranks": "enable-elastic-ep elastic-ep-backend max-ep-size enable-fault-tolerance"
    " enable-elastic-expert-backup",
    "code from a checkpoint": "trust-remote-code",
    "tokenizer modes": "tokenizer-mode tokenizer-revision",
}
"""What is missing: the flags, without dashes, that would ask for it."""

_INSTEAD: dict[str, str] = {
    "q": "use --quantization",
    "enable-expert-parallel": "experts are always sharded here; use --ep N",
    "data-parallel-size": "attention is data-parallel over the expert-parallel ranks; use --ep N",
    "dp-size": "attention is data-parallel over the expert-parallel ranks; use --ep N",
    "dp": "attention is data-parallel over the expert-parallel ranks; use --ep N",
    "enable-dp-attention": "attention is always data-parallel here; leave it out",
    "enable-dp-lm-head": "the head is always data-parallel here; leave it out",
    "data-parallel-size-local": "torchrun's --nproc-per-node says how many ranks a host has",
    "data-parallel-address": "use torchrun's --master-addr, before the script's name",
    "data-parallel-rpc-port": "use torchrun's --master-port, before the script's name",
    "data-parallel-backend": "ranks are started by torchrun; leave it out",
    "enable-dbo": "use --overlap on, or leave it out: by default measured step times decide",
    "enable-two-batch-overlap": "use --overlap on, or leave it out: by default measured step times decide",
    "dbo-decode-token-threshold": "measured step times decide from how many tokens on; leave it out",
    "dbo-prefill-token-threshold": "measured step times decide from how many tokens on; leave it out",
    "tbo-token-distribution-threshold": "a step is cut at the sequence nearest to half of its tokens, or inside one; leave it out",
    "enable-single-batch-overlap": "shared experts are always computed while tokens travel; leave it out",
    "enable-mixed-chunk": "prompts are always computed beside decodes; leave it out",
    "prefill-attention-backend": "prompts and decodes have one; use --attention-backend",
    "decode-attention-backend": "prompts and decodes have one; use --attention-backend",
    "disable-metrics": "/metrics is always served, at no cost worth a switch; leave it out",
    "enable-server-load-tracking": "/load is always served; leave it out",
    "enable-request-id-headers": "answers always carry X-Request-Id; leave it out",
    "skip-server-warmup": "there is no warm-up; leave it out",
    "uvicorn-log-level": "use --log-level",
    "disable-uvicorn-access-log": "requests are logged with --log-requests only; leave it out",
    "load-balance-method": "requests go to the rank with the least left to do; leave it out",
    "enable-chunked-prefill": "chunked prefill is always on; --max-num-batched-tokens sets the size",
    "revision": "checkpoints are folders here; download the revision you want and pass its folder to --model",
    "download-dir": "checkpoints are folders here; pass the folder to --model",
    "load-format": "only safetensors are loaded; leave it out",
    "chat-template-content-format": "content parts are understood without it; leave it out",
    "enable-metrics": "/metrics is always served; leave it out",
    "enable-prompt-tokens-details": "cached tokens are always reported; leave it out",
    "enable-cache-report": "cached tokens are always reported; leave it out",
    "disable-log-stats": "use --log-stats-interval 0",
    "decode-log-interval": "use --log-stats-interval SECONDS",
    "watchdog-timeout": "use --step-timeout SECONDS",
    "distributed-executor-backend": "ranks are started by torchrun; leave it out",
    "nnodes": "give it to torchrun, before the script's name",
    "node-rank": "give it to torchrun, before the script's name",
    "master-addr": "give it to torchrun, before the script's name",
    "master-port": "give it to torchrun, before the script's name",
    "nproc-per-node": "give it to torchrun, before the script's name",
    "dist-init-addr": "use torchrun's --master-addr and --master-port, before the script's name",
}
"""Flags for which there is another way."""

UNSUPPORTED: dict[str, str] = {
    flag: f"not supported yet ({what})" for what, flags in _NOT_YET.items() for flag in flags.split()
} | _INSTEAD
"""A peer's flag without dashes, and why it is refused."""
