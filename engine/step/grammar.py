"""Restricts answers to grammars, token by token. llguidance parses them lazily, so compiling takes milliseconds, and
every step has a budget of its own."""

import json
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from reprise.engine.messages import Submit

COMPILE_S = 10.0  # a grammar that is not ready by then is refused; the limits below end nearly all of them in 0.1 s
_OPTIONS = "%llguidance"  # begins the line of a Lark grammar that sets options of the library
_MAX_FORCED_TOKENS = 1024  # followed before a request begins
# Above what schemas in use need, below what holds up a step: about 20 ms to begin, 10 ms a token, 30 MB of states.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=150_000,
    step_max_items=50_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


class BadGrammar(Exception):
    """The grammar cannot be compiled, or only at too high a cost. The message may be shown to the client."""


class Constraint:
    """A grammar's state for one choice: which tokens may come next. Belongs to the engine's loop; a preempted choice
    keeps it."""

    def __init__(self, matcher: LLMatcher, num_tokens: int) -> None:
        self._matcher = matcher
        self._bits = np.zeros(-(-num_tokens // 32), dtype=np.int32)

    def allowed(self, vocab: int) -> NDArray[np.bool_]:
        """Return a mask, bool [vocab], of the token ids that may come next. All are False once the grammar has
        failed."""
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if self._matcher.is_error():
            return np.zeros(vocab, dtype=np.bool_)
        allowed = np.zeros(vocab, dtype=np.bool_)
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[:vocab]
        allowed[: len(bits)] = bits
        return allowed

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)

    @property
    def is_stopped(self) -> bool:
        """Whether no further token may follow, or the end of text was accepted."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def is_failed(self) -> bool:
        """Whether the grammar can constrain no further token. Either it has become too costly to continue, or the text
        has left it: where only the text of a special token is possible, the special token itself may be drawn, whose
        text is not the one that the grammar wants."""
        return bool(self._matcher.is_error())

    def after(self, token_ids: Iterable[int]) -> "Constraint":
        """Return a copy of this constraint, advanced by tokens that the choice has already generated. This one does not
        change."""
        constraint = Constraint(self._matcher.deep_copy(), 32 * len(self._bits))
        for token_id in token_ids:
            constraint.accept(token_id)
        return constraint


@dataclass(frozen=True, slots=True)
class _Pending:
    request: Submit
    future: "Future[list[Constraint]]"
    deadline_s: float


class GrammarCompiler:
    """A compiler of grammars. It works on a thread of its own, so that no step waits for it, and holds each request
    back until its grammar is compiled. The engine's loop calls all public methods but `compile`."""

    def __init__(self, *, tokenizer: Path, vocab_size: int, end_ids: tuple[int, ...]) -> None:
        """Set up. tokenizer: path of a tokenizer.json, read when the first grammar comes; a model without one takes no
        grammars."""
        self._path = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self._tokenizer: LLTokenizer | None = None  # used by the thread
        self._specials: tuple[str, ...] = ()  # texts of special tokens, and those as JSON escapes them; without "\\"
        self._special_ids: frozenset[int] = frozenset()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self.held: dict[str, _Pending] = {}
        """The requests whose grammars are not compiled yet, by their ids. Read only."""

    def start(self, request: Submit) -> None:
        future = self._thread.submit(self._constraints, request)
        self.held[request.request_id] = _Pending(request, future, time.monotonic() + COMPILE_S)

    def cancel(self, request_id: str) -> None:
        """Forget a request. Unknown ids are ignored."""
        pending = self.held.pop(request_id, None)
        if pending is not None:
            pending.future.cancel()

    def take(self) -> list[tuple[Submit, list[Constraint] | BadGrammar]]:
        """Remove and return the requests whose compilation has ended or has taken too long, in the order in which they
        came, each with a constraint for each choice or with the error."""
        now = time.monotonic()
        done = []
        for request_id, pending in list(self.held.items()):
            if pending.future.done():
                done.append((pending.request, _result(pending.future)))
            elif now >= pending.deadline_s:
                done.append((pending.request, BadGrammar("it takes too long to compile")))
            else:
                continue
            self.cancel(request_id)
        return done

    def take_all(self) -> list[Submit]:
        """Remove and return all requests that wait for their grammars."""
        requests = [pending.request for pending in self.held.values()]
        for request in requests:
            self.cancel(request.request_id)
        return requests

    def _constraints(self, request: Submit) -> list[Constraint]:
        """Return a constraint for each choice of a request; a resumed choice has generated some tokens already. Raises
        BadGrammar. Called on the compiler's thread."""
        compiled = self.compile(request.grammar)
        said = request.resume or [None] * request.num_choices
        return [compiled.after(token_ids or ()) for token_ids in said]

    def compile(self, grammar: str) -> Constraint:
        """Compile a grammar. Raises BadGrammar. Called on the compiler's thread."""
        if self._tokenizer is None:
            self._tokenizer, self._specials, self._special_ids = self._load()
        plain = grammar.replace("\\", "")
        if any(one in plain for one in self._specials):
            grammar = _spelt(grammar)
        matcher = _matcher(self._tokenizer, grammar)
        if _refused_token(follower := matcher.deep_copy()) in self._special_ids:
            matcher = _matcher(self._tokenizer, _spelt(grammar))  # it hides such a text, as "[<]|im_end[|]>" does
            _refused_token(follower := matcher.deep_copy())
        if not follower.is_stopped():
            follower.compute_logit_bias()
        if follower.is_error():  # an early end: the answer would begin all the same, and then fail
            raise BadGrammar("it would be too costly to follow")
        return Constraint(matcher, self._tokenizer.vocab_size)

    def _load(self) -> tuple[LLTokenizer, tuple[str, ...], frozenset[int]]:
        try:
            text = self._path.read_text(encoding="utf-8")
            specials = {one["content"]: one["id"] for one in json.loads(text).get("added_tokens", ()) if one["special"]}
            written = {form.replace("\\", "") for one in specials for form in (one, json.dumps(one)[1:-1])}
            tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=list(self._end_ids) or None)
            texts = tuple(sorted(one for one in written if len(one) > 1))
            return tokenizer, texts, frozenset(specials.values())
        except (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError) as error:
            raise BadGrammar("this model's tokenizer cannot be used with grammars") from error

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise BadGrammar(first_line(matcher.get_error()))
    return matcher


def _refused_token(matcher: LLMatcher) -> int | None:
    """Return the first token that a grammar does not take of those that it forces at its beginning, such as those of a
    call up to its arguments; None if it takes them all. Advances the matcher."""
    forced = matcher.compute_ff_tokens()[:_MAX_FORCED_TOKENS]
    return next((token_id for token_id in forced if not matcher.consume_token(token_id)), None)


def _spelt(grammar: str) -> str:
    """Return a Lark grammar that mentions a special token's text, with an option by which plain tokens spell it. Where
    only one text is possible, the library takes the tokens that its tokenizer makes of the text, and so the special
    one, which may end the answer. With the option it takes each token by its text, and special ones have none."""
    is_lark = not grammar.lstrip().startswith("{")
    return f'{_OPTIONS} {{"no_forcing": true}}\n{grammar}' if is_lark and _OPTIONS not in grammar else grammar


def first_line(message: str) -> str:
    """Return the first line of an error message of the library; the rest is for the library's developers."""
    return message.strip().partition("\n")[0][:300] or "it is not understood"


def _result(future: "Future[list[Constraint]]") -> list[Constraint] | BadGrammar:
    error = future.exception()
    if error is None:
        return future.result()
    return error if isinstance(error, BadGrammar) else BadGrammar("it cannot be compiled")
