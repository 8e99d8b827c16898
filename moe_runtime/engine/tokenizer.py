"""The model's tokenizer and chat template, without importing torch where that can be avoided."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_runtime.config import EngineConfig
from moe_runtime.errors import CheckpointError, ConfigError, PromptTooLongError, RequestError

_LONG_TEXT = 4096
"""Characters from which encoding takes long enough to matter to others."""
_CUT_TOKENS = 256


class Tokenizer:
    """Text to token ids and back. Wraps a transformers tokenizer, which is at `.hf`.

    Safe to use from several threads: neither encoding nor decoding changes the tokenizer.
    """

    def __init__(self, hf: Any, chat_template: str | None = None) -> None:
        self.hf = hf
        self.chat_template = chat_template
        """Replaces the model's own template if given."""
        self._fast = getattr(hf, "backend_tokenizer", None)
        if self._fast is not None:
            # tokenizer.json may ask for cutting and padding, meant for training batches.
            self._fast.no_truncation()
            self._fast.no_padding()
        self._special_ids = frozenset(i for i, t in hf.added_tokens_decoder.items() if t.special)
        self.token_text = functools.lru_cache(maxsize=65536)(self._token_text)
        """Text of one token id alone; parts of a character show as U+FFFD."""

    def encode(self, text: str, add_special_tokens: bool = True, at_most: int | None = None) -> list[int]:
        """Token ids of `text`. Special tokens such as BOS are added as the tokenizer defines.

        Raises PromptTooLongError if there are far more than `at_most`, at the cost of about that many: a request body may
        have millions. A text that has a few too many is encoded like any other.
        """
        if at_most is not None:
            self._refuse_far_too_long(text, at_most)
        if self._fast is None:
            return self.hf.encode(text, add_special_tokens=add_special_tokens)
        if len(text) < _LONG_TEXT:
            return self._fast.encode(text, add_special_tokens=add_special_tokens).ids
        # Unlike `encode`, this lets other threads run.
        return self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def _refuse_far_too_long(self, text: str, at_most: int) -> None:
        length = 2 * at_most + _CUT_TOKENS
        while length < len(text):
            # The cut can only change the tokens next to it.
            if len(self.encode(text[:length], add_special_tokens=False)) > at_most + _CUT_TOKENS:
                raise PromptTooLongError(
                    f"the text has far more than {at_most} tokens: {len(text)} characters", "prompt"
                )
            length *= 4

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`. Spaces are never cleaned up: that would corrupt code, and cannot be streamed."""
        if self._fast is not None:
            return self._fast.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return self.hf.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves this id out of the text."""
        return token_id in self._special_ids

    def is_known(self, token_id: int) -> bool:
        """Whether the id has a token. Models often have more rows in their head than the vocabulary has words."""
        if self._fast is not None:
            return self._fast.id_to_token(token_id) is not None
        return token_id < len(self.hf)

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The conversation as prompt text, special tokens included: encode it with add_special_tokens=False.

        `chat_template` is the template's text and goes before the one given at construction and the model's.
        Raises RequestError if there is no template, or if it refuses the messages.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other",
                "continue_final_message",
            )
        template = chat_template or self.chat_template
        if template is None and self.hf.chat_template is None:
            raise RequestError(
                "the model has no chat template; give one (--chat-template) or send a plain prompt",
                "messages",
            )
        try:
            return self.hf.apply_chat_template(
                [_with_plain_content(message) for message in messages],
                tools=tools,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **(template_kwargs or {}),
            )
        # Templates are programs; whatever one raises says that it cannot render these messages.
        except RequestError:
            raise
        except Exception as exc:
            raise RequestError(f"the chat template refused the messages: {exc}", "messages") from exc

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
        """Token ids of the conversation. Takes the options of `render_chat`."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    def _token_text(self, token_id: int) -> str:
        return self.decode([token_id], skip_special_tokens=False)


def join_content(parts: Sequence[Any]) -> str:
    """A message's content given as parts, `{"type": "text", "text": ...}` each: their texts, a line each.

    Raises RequestError if one is something else.
    """
    texts = []
    for index, part in enumerate(parts):
        known = isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        if not known or part.keys() - {"type", "text"}:
            raise RequestError(
                f"content part {index} must be {{'type': 'text', 'text': '...'}} and nothing else", "messages"
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _with_plain_content(message: Any) -> Any:
    """The message as templates of text models expect it: content as text."""
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
        return message
    return {**message, "content": join_content(message["content"])}


def load_tokenizer(config: EngineConfig, chat_template_file: str | None = None) -> Tokenizer | None:
    """The tokenizer of `config.model` or `config.tokenizer`; None with `skip_tokenizer_init`.

    Only local files are read and no code from the checkpoint is run.
    Raises CheckpointError if there is none, ConfigError if the chat template file cannot be read.
    """
    template = _read_template(chat_template_file) if chat_template_file else None
    if config.skip_tokenizer_init:
        return None
    folder = Path(config.tokenizer or config.model)
    if not folder.is_dir():
        raise CheckpointError(f"no such folder: {folder}")
    try:
        if (folder / "tokenizer.json").is_file():
            # The same class AutoTokenizer ends at for a serialised tokenizer, but its import does without torch.
            from transformers import PreTrainedTokenizerFast

            hf = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        else:
            from transformers import AutoTokenizer

            hf = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    # transformers raises many types here: OSError, ValueError, KeyError, and bare Exception from Rust.
    except Exception as exc:
        raise CheckpointError(
            f"{folder}: no usable tokenizer ({_first_line(exc)}); give its folder with tokenizer=..., "
            "or work with token ids only: skip_tokenizer_init=True (--skip-tokenizer-init)"
        ) from exc
    return Tokenizer(hf, template)


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"chat_template={path!r}: {exc}") from exc


def _first_line(exc: BaseException) -> str:
    return (str(exc).strip().splitlines() or [type(exc).__name__])[0]
