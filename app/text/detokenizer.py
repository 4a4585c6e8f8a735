"""Turns token ids into text that is safe to show, piece by piece."""

import codecs
import functools
import re
from typing import Protocol

from tokenizers import Tokenizer

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a single byte in a sentencepiece vocabulary


class Detokenizer(Protocol):
    """A converter of token ids to text, one by one. It never splits a character; the results of all `push` calls and
    `flush` together equal the result of decoding all ids at once."""

    text_ends: list[int]  # for each pushed token, the number of characters of text complete after it

    def push(self, token_id: int) -> str: ...

    def settle(self) -> str:
        """Return the text that was held back, as far as it is whole characters. To be called before a mark that is not
        text."""
        ...

    def flush(self) -> str:
        """Return the text that was held back, at the end of the answer."""
        ...


class ByteDetokenizer:
    """A detokenizer for byte-level vocabularies: tokens are bytes, and UTF-8 shows where a character ends."""

    def __init__(self, token_bytes: "functools._lru_cache_wrapper[bytes]", special_ids: frozenset[int]) -> None:
        self.text_ends: list[int] = []
        self._token_bytes = token_bytes
        self._special_ids = special_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def push(self, token_id: int) -> str:
        text = "" if token_id in self._special_ids else self._decoder.decode(self._token_bytes(token_id))
        self._length += len(text)
        self.text_ends.append(self._length)
        return text

    def settle(self) -> str:
        return ""  # only incomplete characters are held back

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """A detokenizer for all other decoders: decodes a short window with and without the new tokens, and emits the
    difference.

    Holds back text that ends in U+FFFD, and any run of byte tokens: byte-fallback decoders judge a run as a whole, and
    one bad byte at its end turns all of it into U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[int]) -> None:
        self.text_ends: list[int] = []
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        # tokens already emitted, before the window: decoders treat the start of a text differently
        self._context: list[int] = []
        self._held: list[int] = []
        self._length = 0

    def push(self, token_id: int) -> str:
        token = self._tokenizer.id_to_token(token_id)
        text = ""
        # Skipped tokens must not become the context: after a context without text, a word looks like the first of a
        # text.
        if token is not None and token_id not in self._special_ids:
            self._held.append(token_id)
            if not BYTE_TOKEN.fullmatch(token):
                text = self._emit(final=False)
        self.text_ends.append(self._length)
        return text

    def settle(self) -> str:
        text = self._emit(final=False)
        if self.text_ends:
            self.text_ends[-1] = self._length
        return text

    def flush(self) -> str:
        return self._emit(final=True)

    def _emit(self, *, final: bool) -> str:
        skip = bool(self._special_ids)
        before = self._tokenizer.decode(self._context, skip_special_tokens=skip)
        window = self._tokenizer.decode(self._context + self._held, skip_special_tokens=skip)
        if window.endswith("\ufffd") and not final:
            return ""
        text = window[len(before) :]
        if text:
            self._context, self._held = self._held, []
        self._length += len(text)
        return text


class StopFinder:
    """A finder of stop strings in text that comes in pieces. It finds the one that ends first; if several end at the
    same character, the longest. Text that may be the beginning of a stop string is held back."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.hit = False
        self.found = ""  # the stop string found
        self.end: int | None = None  # character index in the whole text where the stop string began
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self._emitted = 0

    def push(self, text: str) -> str:
        """Add a piece of text. Returns the text that can be shown now; empty once a stop string was found."""
        if self.hit:
            return ""
        if not self._stops:
            self._emitted += len(text)
            return text
        self._held += text
        found = [(start + len(stop), start) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if found:
            end, start = min(found)
            self.hit, self.end, self.found = True, self._emitted + start, self._held[start:end]
            return self._release(start)
        return self._release(len(self._held) - self._possible_start())

    @property
    def held_chars(self) -> int:
        return len(self._held)

    def flush(self) -> str:
        """Return what was held back, at the end of an answer without a stop string."""
        return "" if self.hit else self._release(len(self._held))

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        self._emitted += count
        return text

    def _possible_start(self) -> int:
        """Return the length of the longest suffix of the held text that a stop string begins with."""
        longest = min(len(self._held), max(map(len, self._stops)) - 1)
        for count in range(longest, 0, -1):
            if any(stop.startswith(self._held[-count:]) for stop in self._stops):
                return count
        return 0
