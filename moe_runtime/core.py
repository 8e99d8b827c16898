"""The vocabulary: the data that passes between the parts. No torch import at run time.

Shape letters, one legend for the project:
T tokens on this rank this step | K experts per token | D hidden size | F expert intermediate size
E logical experts | N ranks | p slots per rank | R token rows received | S expert rows to compute
B sequences in the batch | M blocks in the longest block table | L MoE layers | V vocabulary
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from moe_runtime.errors import RequestError

if TYPE_CHECKING:
    import torch

MAX_LOGPROBS = 20


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens. Names and meaning follow vLLM's class of the same name.

    Raises RequestError on a value out of range.
    """

    n: int = 1
    """Completions per prompt."""
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    """Draws depend on the seed, the completion's index and the token's position only."""
    max_tokens: int | None = 16
    """None: as many as the context allows."""
    min_tokens: int = 0
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    """Number of most likely tokens whose logprob is returned beside the chosen one's; None: none at all."""
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        check = _Checker(self)
        check("n", self.n, 1, 128, integer=True)
        check("temperature", self.temperature, 0.0, 100.0)
        check("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check("top_k", self.top_k, -1, 2**31, integer=True)
        check("min_p", self.min_p, 0.0, 1.0)
        check("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        check("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check("min_tokens", self.min_tokens, 0, 2**31, integer=True)
        if self.max_tokens is not None:
            check("max_tokens", self.max_tokens, 1, 2**31, integer=True)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens={self.min_tokens} is larger than max_tokens={self.max_tokens}", "min_tokens"
                )
        if self.seed is not None:
            check("seed", self.seed, -(2**63), 2**63 - 1, integer=True)
        if self.logprobs is not None:
            check("logprobs", self.logprobs, 0, MAX_LOGPROBS, integer=True)
        if not isinstance(self.logit_bias, dict | None):
            raise RequestError("logit_bias must map token ids to numbers from -100 to 100", "logit_bias")
        for token, bias in (self.logit_bias or {}).items():
            if not isinstance(token, int) or token < 0:
                raise RequestError(f"logit_bias: {token!r} is not a token id", "logit_bias")
            check("logit_bias", bias, -100.0, 100.0)
        if not isinstance(self.stop_token_ids, list | tuple | None) or any(
            not isinstance(t, int) or t < 0 for t in self.stop_token_ids or []
        ):
            raise RequestError(
                f"stop_token_ids={self.stop_token_ids!r}: token ids are integers from 0", "stop_token_ids"
            )
        if not isinstance(self.stop, str | list | tuple | None) or any(
            not isinstance(s, str) or not s for s in self.stop_strings
        ):
            raise RequestError(f"stop={self.stop!r}: stop strings must be non-empty text", "stop")
        if self.stop_strings and not self.detokenize:
            raise RequestError("stop strings need detokenize=True", "stop")

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list, empty if none."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken rather than one drawn."""
        return self.temperature == 0.0


class _Checker:
    def __init__(self, params: SamplingParams) -> None:
        self.params = params

    def __call__(
        self,
        name: str,
        value: object,
        low: float,
        high: float,
        *,
        integer: bool = False,
        open_low: bool = False,
    ) -> None:
        kind = int if integer else (int, float)
        ok = isinstance(value, kind) and not isinstance(value, bool)
        # NaN fails both comparisons, so it is refused here too.
        if not ok or not (low < value <= high if open_low else low <= value <= high):  # type: ignore[operator]
            what = "an integer" if integer else "a number"
            bracket = "(" if open_low else "["
            raise RequestError(f"{name}={value!r}: must be {what} in {bracket}{low}, {high}]", name)


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Logprobs of one generated token, from the unmodified distribution (temperature 1, no penalties)."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    top: list[tuple[int, float]]
    """(token id, logprob), most likely first; ties by lower id."""


class SequenceStatus(enum.Enum):
    """Where the scheduler has it; a preempted sequence waits again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One completion being computed on its owning rank. Only the scheduler and the block manager change it."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end the sequence unless `ignore_eos`; not returned as text."""
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    """Leading tokens whose KV is in the cache (computed or reused)."""
    num_cached_tokens: int = 0
    """Prompt tokens reused from the prefix cache when the sequence was first admitted."""
    block_table: list[int] = field(default_factory=list)
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: str | None = None
    """`stop`, `length` or `abort` once finished."""
    stop_reason: int | None = None
    """The stop token id that ended it, if one of `stop_token_ids` did."""
    num_preemptions: int = 0
    max_total_tokens: int = 0
    """Prompt plus output at which it ends with `length`; set when the scheduler accepts it."""

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output joined: a copy of both, so not for use in every step (see `tokens`)."""
        return self.prompt_token_ids + self.output_token_ids

    def tokens(self, start: int, stop: int) -> list[int]:
        """`token_ids[start:stop]` at the cost of the slice only."""
        num_prompt = len(self.prompt_token_ids)
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        part = self.prompt_token_ids[start:stop]
        return part if stop <= num_prompt else part + self.output_token_ids[: stop - num_prompt]

    @property
    def num_tokens(self) -> int:
        """Of prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)


@dataclass(frozen=True)
class ScheduledSequence:
    """`num_new_tokens` tokens of `sequence`, from position `start`, computed in this step."""

    sequence: Sequence
    start: int
    num_new_tokens: int

    @property
    def samples(self) -> bool:
        """Whether this step reaches the last known token, so that the next one is sampled."""
        return self.start + self.num_new_tokens == self.sequence.num_tokens

    @property
    def is_decode(self) -> bool:
        """Whether it is one token behind the prompt, as in every step once the prompt is computed."""
        return self.num_new_tokens == 1 and self.start >= len(self.sequence.prompt_token_ids)


@dataclass(frozen=True)
class StepPlan:
    """What one rank computes in one step."""

    scheduled: tuple[ScheduledSequence, ...]
    block_copies: tuple[tuple[int, int], ...] = ()
    """(source block, destination block): whole-block KV copies done before the forward pass."""
    num_preempted: int = 0

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences: T."""
        return sum(s.num_new_tokens for s in self.scheduled)


@dataclass(frozen=True)
class ForwardBatch:
    """Model inputs of one step. Tensors are on the model's device; lists stay on the host."""

    input_ids_T: torch.Tensor
    """int64."""
    positions_T: torch.Tensor
    """int64, position of each token in its sequence."""
    slot_mapping_T: torch.Tensor
    """int64, block * block_size + offset where each token's KV goes."""
    block_tables_BM: torch.Tensor
    """int32, padded with 0."""
    query_starts_B1: torch.Tensor
    """int32 of B + 1: first row of each sequence in T, and T."""
    seq_lens_B: torch.Tensor
    """int32: tokens of each sequence in the cache after this step."""
    query_lens: list[int]
    """Host copy: new tokens per sequence."""
    seq_lens: list[int]
    """Host copy of seq_lens_B."""
    logit_rows: torch.Tensor
    """int64: rows of T whose logits are wanted."""
    max_num_tokens: int
    """Largest T on any rank this step, from the lockstep header."""
    padding_T: torch.Tensor | None = None
    """bool: rows that no expert computes and whose output means nothing. None: there are none."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.input_ids_T.shape[0])


@dataclass(frozen=True)
class Routing:
    """The router's choice. Equal scores choose the lower expert index."""

    topk_ids_TK: torch.Tensor
    """int64 logical expert ids; -1 marks padding."""
    topk_weights_TK: torch.Tensor
    """float32."""


@dataclass(frozen=True, eq=False)
class LayerPlacement:
    """Where the experts of one MoE layer live, as one source rank sees it."""

    slot_to_expert_Np: torch.Tensor
    """int64 [N, p] on the host: the expert in each slot of each rank, -1 for an empty slot."""
    expert_to_slot_E: torch.Tensor
    """int64 [E] on the device: the global slot (rank * p + slot) nearest to this rank for each expert."""
    copies_EX: torch.Tensor
    """int64 [E, X] on the device: global slots of all copies of each expert, in ascending order, -1 for none."""

    @property
    def num_ranks(self) -> int:
        """N."""
        return int(self.slot_to_expert_Np.shape[0])

    @property
    def slots_per_rank(self) -> int:
        """p."""
        return int(self.slot_to_expert_Np.shape[1])


@dataclass(frozen=True)
class DispatchPlan:
    """Where every (token, k) pair goes. Made by `dispatch.base.plan_dispatch`."""

    global_slot_TK: torch.Tensor
    """int64: rank * slots_per_rank + slot; -1 computes nothing and costs no traffic."""
    topk_weights_TK: torch.Tensor
    """float32: what each pair's result is multiplied by."""
    slots_per_rank: int
    num_ranks: int
    rank: int
    max_num_tokens: int
    """Largest T on any rank this step, so that all ranks decide alike how to exchange."""


@dataclass(frozen=True)
class RowScales:
    """What FP8 token rows come with."""

    scale_RG: torch.Tensor
    """float32: a value is payload * the scale of its group of 128 (`quantization.GROUP`) along the row. Rows may lie apart."""
    dtype: torch.dtype
    """The model's, from which the rows were rounded and in which results return."""


@dataclass(frozen=True)
class ExpertBatch:
    """What a rank received: token rows once each, and which of them every local slot computes."""

    tokens_RD: torch.Tensor
    """In the model's dtype; FP8 if `scales` is there, and then rows may lie apart."""
    row_index_S: torch.Tensor
    """int64: expert row -> row of tokens_RD. Rows of a slot are contiguous, by (source rank, token)."""
    num_rows_p: torch.Tensor
    """int64 on the tokens' device: expert rows of each local slot; sums to S, or to less where num_rows is None."""
    handle: Any = None
    """The dispatcher's own state, needed by its combine."""
    scales: RowScales | None = None
    num_rows: int | None = None
    """The sum of num_rows_p, where the host knows it without asking a device."""

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        return self.tokens_RD.dtype if self.scales is None else self.scales.dtype


@dataclass(frozen=True)
class ExpertPlacement:
    """For every MoE layer, which expert each slot of each rank holds. Global, versioned, the same on all ranks."""

    slots: tuple[tuple[tuple[int, ...], ...], ...]
    """[layer][rank][slot] -> expert, -1 for an empty slot; every expert at least once, at most once per rank."""
    num_experts: int
    version: int = 0
