"""What a single token says: its bytes, and logprobs written in OpenAI's two formats."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping
from typing import Any

from moe_runtime.engine.outputs import Logprob
from moe_runtime.engine.tokenizer import Tokenizer
from moe_runtime.server.responses import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: printable Latin-1 is itself, the rest follows from U+0100."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(itself)]
    pairs = {chr(byte): byte for byte in itself}
    return pairs | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


class TokenTexts:
    """Bytes of tokens, exact for byte-level and byte-fallback vocabularies; ids as text without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        hf = None if tokenizer is None else tokenizer.hf
        self._cache: dict[int, bytes] = {}
        self._alphabet = _byte_alphabet() if _is_byte_level(hf) else None
        self._added = frozenset(() if hf is None else hf.get_added_vocab().values())

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves it out of the text."""
        return self._tokenizer is not None and self._tokenizer.is_special(token_id)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes a token adds to the text; `token_id:N` without a tokenizer or for an id it does not know."""
        found = self._cache.get(token_id)
        if found is None:
            found = self._cache[token_id] = self._find(token_id)
        return found

    def text_of(self, token_id: int) -> str:
        """The same as text; bytes that are not valid UTF-8 alone show as U+FFFD."""
        return self.bytes_of(token_id).decode("utf-8", errors="replace")

    def _find(self, token_id: int) -> bytes:
        piece = None if self._tokenizer is None else self._tokenizer.hf.convert_ids_to_tokens(token_id)
        if piece is None:
            return f"token_id:{token_id}".encode()
        if token_id in self._added:
            return piece.encode()
        if self._alphabet is not None:
            return b"".join(
                bytes([self._alphabet[char]]) if char in self._alphabet else char.encode() for char in piece
            )
        byte = _BYTE_TOKEN.fullmatch(piece)
        if byte:
            return bytes([int(byte[1], 16)])
        return piece.replace("\u2581", " ").encode()

    def chat_logprobs(
        self, ids: list[int], rows: list[dict[int, Logprob]] | None, num_top: int
    ) -> ChatLogprobs | None:
        """`rows` is parallel to `ids`; the first entry of each is the chosen token."""
        if rows is None:
            return None
        content = []
        for token_id, row in zip(ids, rows, strict=True):
            chosen = self._entry(token_id, row[token_id])
            top = [self._entry(i, entry) for i, entry in most_likely(row, num_top)]
            content.append(ChatTokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top))
        return ChatLogprobs(content)

    def _entry(self, token_id: int, entry: Logprob) -> TopLogprob:
        known = self._tokenizer is not None
        raw = list(self.bytes_of(token_id)) if known else None
        return TopLogprob(self.text_of(token_id), entry.logprob, raw)


def _is_byte_level(hf: Any | None) -> bool:
    backend = getattr(hf, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return False
    # The decoder's state alone: the whole tokenizer as JSON takes a second to write.
    decoder = json.loads(backend.decoder.__getstate__())
    kinds = [decoder.get("type"), *(d.get("type") for d in decoder.get("decoders", []))]
    return "ByteLevel" in kinds


def most_likely(row: Mapping[int, Logprob], num_top: int) -> list[tuple[int, Logprob]]:
    """The `num_top` most likely tokens of a row, best first; the chosen one counts only if it is among them."""
    ranked = [(i, e) for i, e in row.items() if e.rank is not None and e.rank <= num_top]
    return sorted(ranked, key=lambda pair: pair[1].rank or 0)


class CompletionLogprobsWriter:
    """Writes the older format piece by piece; `text_offset` counts characters from the start of the choice's text."""

    def __init__(self, texts: TokenTexts, num_top: int, *, skip_special_tokens: bool) -> None:
        self._texts = texts
        self._num_top = num_top
        self._skip_special = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def write(self, ids: list[int], rows: list[dict[int, Logprob]] | None) -> CompletionLogprobs | None:
        """The logprobs of the next tokens, or None if there are none."""
        if rows is None:
            return None
        out = CompletionLogprobs([], [], [] if self._num_top else None, [])
        for token_id, row in zip(ids, rows, strict=True):
            out.tokens.append(self._texts.text_of(token_id))
            out.token_logprobs.append(row[token_id].logprob)
            out.text_offset.append(self._offset)
            if out.top_logprobs is not None:
                # Unlike in chats the chosen token is always there, so there may be one more than was asked for.
                top = [*most_likely(row, self._num_top), (token_id, row[token_id])]
                # Different ids can have one text; the likelier one is kept, hence reversed.
                out.top_logprobs.append({self._texts.text_of(i): e.logprob for i, e in reversed(top)})
            if not (self._skip_special and self._texts.is_special(token_id)):
                self._offset += len(self._decoder.decode(self._texts.bytes_of(token_id)))
        return out
