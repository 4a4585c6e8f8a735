"""Turns the tokens of one answer into text and logprobs."""

from bisect import bisect_left, bisect_right
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec

from reprise.app.text.answer_parts import AnswerParts, AnswerWriter, Call, TextPiece
from reprise.app.text.tokenizer import ChatTokenizer
from reprise.engine.messages import (
    Output,
    Progress,
    Timings,
    TokenLogprob,
    TokensBySource,
)


@dataclass(frozen=True, slots=True)
class Delta:
    """The next piece of one choice's answer: the parts that the client is shown next, and the tokens taken in since the
    piece before."""

    choice: int
    parts: AnswerParts
    logprobs: list[dict[str, Any]] | None  # None: the request did not ask for them
    finish_reason: str | None
    token_ids: list[int]  # taken in since the choice's delta before; their text may still be held back
    token_logprobs: list[TokenLogprob] | None  # logprobs of these ids
    text_logprobs: list[list[dict[str, Any]]]  # those of each text of the content in `parts`, in order
    progress: Progress | None = None  # how far the prompt is read; then all else is empty

    @classmethod
    def of_progress(cls, choice: int, progress: Progress) -> "Delta":
        return cls(choice, AnswerParts(), None, None, [], None, [], progress)


class Answer:
    """The answer of one choice. It takes tokens and returns the text and log probabilities that can be shown; text that
    might still change is held back."""

    def __init__(
        self,
        *,
        index: int,
        tokenizer: ChatTokenizer,
        min_tokens: int,
        parser: AnswerWriter,
        skip_special_tokens: bool = True,
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.text = ""  # all of it: content, reasoning and calls
        self.finish_reason: str | None = None
        self.report: TokensBySource | None = None
        self.timings: Timings | None = None
        self.prompt_logprobs: list[dict[str, Any]] | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.accepted_predictions = self.rejected_predictions = 0  # tokens, known at its end
        self.is_resumed = False  # another server began it: report, timings and first token are that one's
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
        self._marks = tokenizer.form.marks if skip_special_tokens else {}
        # of each mark: its end among all that was pushed to the parser, the length of the marks so far, tokens so far
        self._marked: list[tuple[int, int, int]] = []
        self._min_tokens = min_tokens
        self._parser = parser
        self._logprobs: deque[dict[str, Any]] = deque()  # logprobs of tokens whose text is not shown yet
        self._shown_logprobs = 0
        self._unplaced: deque[tuple[int, dict[str, Any]]] = deque()
        """(index of a token, its logprob) of tokens of which it is not clear yet whether their text is content."""
        self._placed_chars = 0  # characters of content whose tokens are placed
        self._new_ids: list[int] = []  # since the last delta
        self._new_logprobs: list[TokenLogprob] = []

    @property
    def content(self) -> str:
        """The text for the user, without reasoning and calls."""
        return self._parser.content

    @property
    def reasoning(self) -> str:
        return self._parser.reasoning

    @property
    def reasoning_tokens(self) -> int:
        """Number of tokens of the answer's reasoning, including the tags around it. Right only once the answer is
        complete."""
        position = self._parser.thought_chars
        if not position:
            return 0
        at_mark = next((tokens for end, _, tokens in self._marked if end == position), None)
        if at_mark is not None:
            return at_mark
        return min(len(self.token_ids), bisect_right(self.text_ends, self._text_chars(position)))

    @property
    def calls(self) -> list[Call]:
        return self._parser.calls

    @property
    def said(self) -> list[TextPiece | Call]:
        """The texts, thoughts (reasoning) and calls so far, in the order in which the model wrote them."""
        return self._parser.said

    @property
    def text_ends(self) -> list[int]:
        """The number of characters of text that are complete once a token is decoded, for each token. The last numbers
        may exceed the length of `text` if a stop string cut it."""
        return self._detokenizer.text_ends

    @property
    def stopped_by_string(self) -> bool:
        return self._parser.is_stopped

    @property
    def stop_string(self) -> str:
        return self._parser.stop_string

    @property
    def kept_tokens(self) -> int:
        """Number of leading tokens whose text is all in the answer: every token, or those before a stop string."""
        return tokens_within(self.text_ends, len(self.text)) if self.stopped_by_string else len(self.token_ids)

    def push(self, output: Output) -> Delta | None:
        """Add the tokens of an output of the engine. Returns what can be shown of them, None if nothing. Tokens after a
        stop string are dropped."""
        parts = AnswerParts()
        for position, token_id in enumerate(output.token_ids):
            self.token_ids.append(token_id)
            self._new_ids.append(token_id)
            if output.logprobs is not None:
                self._new_logprobs.append(output.logprobs[position])
                self._logprobs.append(self._logprob(token_id, output.logprobs[position]))
                self._unplaced.append((len(self.token_ids) - 1, self._logprobs[-1]))
            self._read(token_id, parts)
            if self.stopped_by_string:
                break
        if self.stopped_by_string:
            self.finish_reason = "stop"
        elif output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self._flush_text(parts)
        logprobs = self._shown() if output.logprobs is not None else None
        if self.calls and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"
        if not parts and not logprobs and self.finish_reason is None:
            return None
        token_ids, token_logprobs = self.take_new()
        if output.logprobs is None:
            token_logprobs = None
        texts = self._placed(parts) if output.logprobs is not None else []
        return Delta(self.index, parts, logprobs, self.finish_reason, token_ids, token_logprobs, texts)

    def _read(self, token_id: int, parts: AnswerParts) -> None:
        """Have the parser read one token's text. Special tokens have no text, but the parser needs some of them."""
        text, mark = self._detokenizer.push(token_id), self._marks.get(token_id)
        if mark is not None:
            text += self._detokenizer.settle()
        if text:
            self._push(text, parts)
        if mark is not None and not self.stopped_by_string:
            parts.add(self._parser.push(mark, is_mark=True))
            marks = self._marked[-1][1] if self._marked else 0
            self._marked.append((len(self.text) + marks + len(mark), marks + len(mark), len(self.token_ids)))

    def _push(self, text: str, parts: AnswerParts) -> None:
        self.text += text
        parts.add(self._parser.push(text, is_searched=len(self.token_ids) > self._min_tokens))
        self._cut()

    def _cut(self) -> None:
        if self.stopped_by_string:
            self.text = self.text[: self._text_chars(self._parser.stopped_at)]

    def _text_chars(self, position: int) -> int:
        """Return the place in the text of a position among all that was pushed to the parser."""
        before = [marks for end, marks, _ in self._marked if end <= position]
        return position - (before[-1] if before else 0)

    def take_new(self) -> tuple[list[int], list[TokenLogprob] | None]:
        """Return the tokens that were added since the last call, with their log probabilities."""
        taken = self._new_ids, self._new_logprobs
        self._new_ids, self._new_logprobs = [], []
        return taken

    def note(self, output: Output) -> None:
        """Record what the engine reports with an output: where the prompt's KV came from, and timings. For an answer
        that another server began, that server's report and timings are kept if it made a report; only the report's
        count of truncated tokens is updated."""
        self.accepted_predictions += output.accepted_predictions
        self.rejected_predictions += output.rejected_predictions
        if not self.is_resumed or self.report is None:
            self.report = output.report or self.report
            self.timings = output.timings or self.timings
        elif output.report is not None and output.report.truncated_tokens != self.report.truncated_tokens:
            self.report = msgspec.structs.replace(self.report, truncated_tokens=output.report.truncated_tokens)

    def flush(self) -> None:
        """Add the text that was held back to the answer, because no more tokens will come."""
        self._flush_text(AnswerParts())

    def note_prompt(self, values: list[TokenLogprob], token_ids: list[int]) -> None:
        """Record the log probabilities of the prompt's tokens. token_ids: the whole prompt. values: one for each of its
        tokens but the first, which has none."""
        self.prompt_logprobs = [
            self._logprob(token_id, value) for token_id, value in zip(token_ids[1:], values, strict=True)
        ]

    def _flush_text(self, parts: AnswerParts) -> None:
        """Have the parser read what was held back, at the end of the answer."""
        if not self.stopped_by_string:
            self._push(self._detokenizer.flush(), parts)
            parts.add(self._parser.flush())
            self._cut()

    def token_entry(self, token_id: int, logprob: float | None = None) -> dict[str, Any]:
        """Return a token with its text, its bytes and its log probability, as an answer's `logprobs` show it. logprob:
        None for the first token of a prompt, which has none."""
        text, raw = self._tokenizer.token_text(token_id)
        # JSON has no infinity; OpenAI reports a token outside the distribution as -9999.
        value = None if logprob is None else max(logprob, -9999.0)
        return {"token": text, "logprob": value, "bytes": list(raw)}

    def _logprob(self, token_id: int, value: TokenLogprob) -> dict[str, Any]:
        top = [self.token_entry(*pair) for pair in value.top]
        return {**self.token_entry(token_id, value.logprob), "top_logprobs": top}

    def _shown(self) -> list[dict[str, Any]]:
        """Return the logprobs that can be shown now: those of tokens whose text has been given out."""
        shown = self._text_chars(self._parser.shown_up_to)
        due = self.kept_tokens if self.finish_reason else bisect_right(self.text_ends, shown)
        count = max(0, due - self._shown_logprobs)
        self._shown_logprobs += count
        return [self._logprobs.popleft() for _ in range(count)]

    def _placed(self, parts: AnswerParts) -> list[list[dict[str, Any]]]:
        """Return the logprobs of the tokens of each text of the content in `parts`. A token belongs to the text that
        has its first character of content; tokens of thoughts, calls and marks belong to none."""
        found: list[list[dict[str, Any]]] = []
        for piece in parts.pieces:
            if not isinstance(piece, TextPiece) or piece.is_thought:
                continue
            self._placed_chars += len(piece.text)
            end, of_piece = self._parser.content_before(self._placed_chars), []
            while self._unplaced:
                index, entry = self._unplaced[0]
                start = self._start(index)
                offset = self._parser.content_from(start, max(start + 1, self._start(index + 1)))
                if start >= end or (offset is not None and offset >= self._placed_chars):
                    break
                self._unplaced.popleft()
                if offset is not None:
                    of_piece.append(entry)
            found.append(of_piece)
        return found

    def _start(self, index: int) -> int:
        """Return the position of a token's text among all that was pushed to the parser."""
        text_ends = self.text_ends
        before = bisect_right(self._marked, index, key=lambda mark: mark[2])
        marks = self._marked[before - 1][1] if before else 0
        return (text_ends[index - 1] if index else 0) + marks


def tokens_within(text_ends: list[int], end: int) -> int:
    """Return how many leading tokens lie wholly in the first `end` characters.

    A token that added no text may hold the first bytes of a character that is cut off: at the end it does not count.
    """
    complete = text_ends[bisect_right(text_ends, end) - 1] if text_ends and text_ends[0] <= end else 0
    return bisect_left(text_ends, complete) + 1 if complete else 0
