"""What is known of the served model, and prompts made from requests. Nothing here knows about HTTP."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from moe_runtime.core import SamplingParams
from moe_runtime.engine.tokenizer import Tokenizer
from moe_runtime.errors import PromptTooLongError
from moe_runtime.server.chat_messages import ChatMessage
from moe_runtime.server.errors import ApiError, invalid
from moe_runtime.server.protocol import DetokenizeRequest, TokenizeRequest
from moe_runtime.server.responses import ModelCard, Text, Tokens
from moe_runtime.server.token_text import TokenTexts

_RESERVED = (
    *("conversation", "messages", "tools", "documents", "chat_template", "tokenize", "tokenizer_kwargs"),
    *(
        "add_generation_prompt",
        "continue_final_message",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
    ),
    *("return_dict", "return_assistant_tokens_mask"),
)
"""Arguments of the rendering function itself; in chat_template_kwargs they would not reach the template."""

_COUNTED_TOKENS = 500_000
"""/tokenize takes longer texts than the context holds, but not much longer than this."""


@dataclass(frozen=True)
class ModelContext:
    """The served model as requests meet it."""

    name: str
    root: str
    """The checkpoint's folder."""
    tokenizer: Tokenizer | None
    max_model_len: int
    vocab_size: int
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def texts(self) -> TokenTexts:
        """What single tokens look like, for logprobs."""
        return TokenTexts(self.tokenizer)

    @property
    def card(self) -> ModelCard:
        """The model's entry in /v1/models."""
        return ModelCard(self.name, self.created, self.root, self.max_model_len)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 if a request names another model."""
        if name is not None and name != self.name:
            raise ApiError(
                404,
                f"the model `{name}` does not exist here; served is `{self.name}`",
                param="model",
                code="model_not_found",
            )

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a prompt. Raises ApiError without a tokenizer, PromptTooLongError if it can never fit."""
        return self._need_tokenizer().encode(text, add_special_tokens, self.max_model_len)

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """Token ids as text. Raises ApiError without a tokenizer."""
        return self._need_tokenizer().decode(ids, skip_special_tokens=skip_special_tokens)

    def render(
        self,
        messages: list[ChatMessage],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any] | None,
        at_most: int,
    ) -> list[int]:
        """Token ids of a conversation, through the chat template. The template writes special tokens itself.

        Raises PromptTooLongError if there are far more than `at_most`.
        """
        variables = dict(variables or {})
        taken = [name for name in _RESERVED if name in variables]
        if taken:
            raise invalid(f"chat_template_kwargs: `{taken[0]}` cannot be set there", "chat_template_kwargs")
        tokenizer = self._need_tokenizer()
        text = tokenizer.render_chat(
            [message.for_template() for message in messages],
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=variables,
        )
        try:
            return tokenizer.encode(text, add_special_tokens=False, at_most=at_most)
        except PromptTooLongError as exc:
            raise PromptTooLongError(str(exc), "messages") from None

    def check_prompt(self, ids: list[int], params: SamplingParams, param: str) -> None:
        """Raises ApiError if a prompt is empty, has unknown ids, or leaves no room for the tokens asked for."""
        if not ids:
            raise invalid("the prompt has no tokens", param)
        wrong = next((t for t in ids if not 0 <= t < self.vocab_size), None)
        if wrong is not None:
            raise invalid(f"token id {wrong} is not in the vocabulary of {self.vocab_size} tokens", param)
        wanted = max(params.min_tokens, 1) if params.max_tokens is None else params.max_tokens
        if len(ids) + wanted > self.max_model_len:
            raise invalid(
                # OpenAI's first words: clients that cut their prompts look for them.
                f"This model's maximum context length is {self.max_model_len} tokens, but the prompt has {len(ids)} and"
                f" at least {wanted} are to be generated",
                param,
                "context_length_exceeded",
            )

    def tokenize(self, request: TokenizeRequest) -> Tokens:
        """Answer of /tokenize."""
        self.check_model(request.model)
        if request.messages is not None:
            ids = self.render(
                request.messages,
                add_generation_prompt=request.opens_turn,
                continue_final_message=bool(request.continue_final_message),
                variables=request.chat_template_kwargs,
                at_most=_COUNTED_TOKENS,
            )
        else:
            ids = self._need_tokenizer().encode(
                request.prompt or "", request.add_special_tokens, _COUNTED_TOKENS
            )
        pieces = self._need_tokenizer().hf.convert_ids_to_tokens(ids) if request.return_token_strs else None
        return Tokens(len(ids), self.max_model_len, ids, pieces)

    def detokenize(self, request: DetokenizeRequest) -> Text:
        """Answer of /detokenize."""
        self.check_model(request.model)
        wrong = next((t for t in request.tokens if not 0 <= t < self.vocab_size), None)
        if wrong is not None:
            raise invalid(f"token id {wrong} is not in the vocabulary of {self.vocab_size} tokens", "tokens")
        return Text(self.decode(request.tokens, skip_special_tokens=request.skip_special_tokens))

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise invalid(
                "the server was started with --skip-tokenizer-init: send token ids to /v1/completions"
            )
        return self.tokenizer


def new_id(prefix: str) -> str:
    """A fresh id as OpenAI writes them, such as chatcmpl-6f1e..."""
    return f"{prefix}-{uuid.uuid4().hex}"
