"""Token ids to text as they arrive, and the search for stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from moe_runtime.engine.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_CHARACTER_BYTES = 4
_CONTEXT_TOKENS = 8
"""Of the prompt: enough for a character that it ends in the middle of, and a token before."""
_LONG_RUN = 2 * _MAX_CHARACTER_BYTES


class IncrementalDecoder:
    """Gives text as soon as later tokens cannot change it; prompt and pieces joined equal `decode` of all ids.

    Decoders look at neighbours (a character may span tokens; a space at the very start may be dropped), so the
    text of a token is the difference between decoding a short window with and without it. The window starts at
    the last but one place where text was given out, which keeps the cost per token constant.

    One difference is meant: byte-fallback decoders turn a whole run of byte pieces into U+FFFD if it ends within a
    character. Waiting for the end of the run would hold back every line end of some models, so here only the
    unfinished character becomes U+FFFD.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        """The prompt's end is where the text continues: some tokenizers drop a space at the very start of a text only."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = [t for t in prompt_token_ids[-_CONTEXT_TOKENS:] if self._shows(t)]
        self._num_given = len(self._window)
        """Leading ids of the window whose text has been given out."""
        self._given_text = self._decode(0, self._num_given)
        """Their text, decoded alone."""

    def push(self, token_id: int) -> str:
        """The text that `token_id` makes certain; often empty within a character."""
        if not self._shows(token_id):
            return ""
        self._window.append(token_id)
        text = self._text_behind_given(len(self._window))
        if text.endswith(_REPLACEMENT):
            return self._give_old(text)
        return self._give(len(self._window), text)

    def _shows(self, token_id: int) -> bool:
        hidden = self._skip_special_tokens and self._tokenizer.is_special(token_id)
        return self._tokenizer.is_known(token_id) and not hidden

    def flush(self) -> str:
        """The rest, at the end of the sequence; an unfinished character shows as U+FFFD."""
        return self._give(len(self._window), self._text_behind_given(len(self._window)))

    def _give(self, num_ids: int, text: str) -> str:
        """Count the window's first `num_ids` ids as given, and let the window start where that was so far."""
        if text:
            self._window = self._window[self._num_given :]
            self._num_given = num_ids - self._num_given
            self._given_text = self._decode(0, self._num_given)
        return text

    def _give_old(self, text: str) -> str:
        """Of a long run of broken bytes, give out what no later byte can complete."""
        newest = len(self._window) - _MAX_CHARACTER_BYTES
        if newest - self._num_given < _LONG_RUN:
            return ""
        for num_ids in range(newest, newest - _MAX_CHARACTER_BYTES, -1):
            old_text = self._text_behind_given(num_ids)
            if text.startswith(old_text):
                return self._give(num_ids, old_text)
        return ""

    def _text_behind_given(self, num_ids: int) -> str:
        text = self._decode(0, num_ids)
        if text.startswith(self._given_text):
            return text[len(self._given_text) :]
        # The run of byte pieces that began before has turned out broken.
        return self._decode(self._num_given, num_ids)

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._window[start:end], skip_special_tokens=False)


class StopStrings:
    """Finds the first stop string to be complete, however the text is cut into pieces.

    Text that may be the beginning of a stop string is held back until it is known not to be.
    """

    def __init__(self, stops: list[str], include_in_output: bool = False) -> None:
        self._stops = stops
        self._include = include_in_output
        self._held = ""
        self.matched: str | None = None
        """The stop string found; no text may be pushed after that."""

    def push(self, text: str, may_stop: bool = True) -> str:
        """Add text and return what may be shown. Stop strings that end within a text that may not stop are ignored."""
        assert self.matched is None
        if not self._stops:
            return text
        num_old = len(self._held)
        self._held += text
        if may_stop and (found := self._find(num_old)):
            start, end = found
            self.matched = self._held[start:end]
            return self._release(end if self._include else start, drop_rest=True)
        return self._release(len(self._held) - self._num_uncertain())

    def flush(self) -> str:
        """What was held back, at the end of the sequence."""
        return self._release(len(self._held))

    def _release(self, num_chars: int, drop_rest: bool = False) -> str:
        shown = self._held[:num_chars]
        self._held = "" if drop_rest else self._held[num_chars:]
        return shown

    def _find(self, num_old: int) -> tuple[int, int] | None:
        """(start, end) of the match that ends first behind the old text; of several, the one that starts first."""
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = self._held.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < (best[1], best[0])):
                best = (start, start + len(stop))
        return best

    def _num_uncertain(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = min(len(self._held), max(map(len, self._stops)) - 1)
        for length in range(longest, 0, -1):
            tail = self._held[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0
