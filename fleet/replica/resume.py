"""Lets another server continue a streamed answer: writes down everything it needs, and reads such notes.

An answer's state is a function of the request, of its tokens and of the pieces (deltas) in which the client was shown
these. The notes hold the tokens of every piece, and the few things that were drawn or measured: ids, the seed,
logprobs, the report of the prompt and times. The next server replays them through the code that showed them first, so
detokenizer, stop strings, parser of calls, usage and numbers of events reach the state that they had.
`reprise.fleet.protocol` says how notes travel.
"""

import asyncio
import hashlib
import logging
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from reprise.app.errors import ApiError
from reprise.app.turn.answer import Answer, Delta
from reprise.app.turn.ports import RunningTurn
from reprise.engine.messages import ModelInfo, Output, Submit, Timings, TokenLogprob, TokensBySource
from reprise.fleet.protocol import Resume

_LEAST_LOGPROB = -9999.0  # as clients are shown what is outside the distribution; JSON has no infinity
_REPLAYED_AT_ONCE = 64  # notes between two looks at what else the event loop has to do

log = logging.getLogger(__name__)


class TurnNote(msgspec.Struct, frozen=True, kw_only=True):
    """The note of one generation of a stream: an answer to one prompt, with all of its choices."""

    request_id: str
    session_id: str
    seed: int
    prompt: str  # digest of its token ids


class OpeningNote(msgspec.Struct, frozen=True, kw_only=True):
    """The note of everything that is known of a stream when it begins."""

    created: int  # unix time
    fingerprint: str  # the model's fingerprint
    exact: bool  # whether it computes a text's tokens alike in every company (`model.exact`)
    turns: list[TurnNote]


class DeltaNote(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The note of one piece of a choice's answer that was sent to the client: what another server needs in order to
    continue after this piece."""

    choice: int  # counted through all generations
    ids: list[int] = []  # tokens taken in since the choice's piece before
    logprobs: list[TokenLogprob] | None = None  # logprobs of `ids`
    end: str | None = None  # finish reason of the engine or of a stop string: stop | length
    calls: list[str] = []  # ids of the calls that begin here
    report: TokensBySource | None = None  # with the choice's first piece after it has changed
    timings: Timings | None = None  # with the choice's first piece
    ttft_s: float | None = None  # arrival to first token; with the choice's first piece


_encode = msgspec.json.Encoder().encode
_decode_opening = msgspec.json.Decoder(OpeningNote).decode
_decode_delta = msgspec.json.Decoder(DeltaNote).decode


class StreamNotes:
    """A writer of the notes of one stream, by which another server can continue it. Its generations (one for each
    prompt) have the same number of choices each."""

    def __init__(self, turns: Sequence[RunningTurn]) -> None:
        self._turns = turns
        self._reports: dict[int, TokensBySource] = {}  # choice -> its report as noted last

    def opening(self) -> bytes:
        first = self._turns[0]
        turns = [
            TurnNote(
                request_id=turn.request_id,
                session_id=turn.session_id,
                seed=turn.sampling.seed,
                prompt=digest_of(turn.token_ids),
            )
            for turn in self._turns
        ]
        model = first.model
        opening = OpeningNote(created=first.created, fingerprint=model.fingerprint, exact=model.exact, turns=turns)
        return _encode(opening)

    def delta(self, delta: Delta) -> bytes:
        place, index = divmod(delta.choice, len(self._turns[0].choices))
        turn = self._turns[place]
        choice = turn.choices[index]
        fields: dict[str, Any] = {}
        if choice.report is not None and self._reports.get(delta.choice) is not choice.report:
            self._reports[delta.choice] = choice.report
            ttft_s = None if choice.first_token_s is None else choice.first_token_s - turn.arrived_s
            fields = {"report": choice.report, "timings": choice.timings, "ttft_s": ttft_s}
        return _encode(
            DeltaNote(
                choice=delta.choice,
                ids=delta.token_ids,
                logprobs=None if delta.token_logprobs is None else [_finite(value) for value in delta.token_logprobs],
                end="stop" if delta.finish_reason == "tool_calls" else delta.finish_reason,
                calls=[call.id for _, call, _ in delta.parts.calls if call is not None],
                **fields,
            )
        )


def digest_of(token_ids: list[int]) -> str:
    return hashlib.blake2b(array("I", token_ids).tobytes(), digest_size=16).hexdigest()


def _finite(value: TokenLogprob) -> TokenLogprob:
    return value if value.logprob >= _LEAST_LOGPROB else msgspec.structs.replace(value, logprob=_LEAST_LOGPROB)


@dataclass(frozen=True, slots=True)
class ResumedTurn:
    """The notes of one generation (an answer to one prompt) that another server began."""

    note: TurnNote
    created: int
    fingerprint: str
    exact: bool
    place: int  # among the stream's generations
    deltas: Sequence[DeltaNote]  # every choice has one

    def check(self, model: ModelInfo) -> None:
        """Raise ApiError 409 if this server's model has another fingerprint or another `model.exact` than the one that
        began the answer."""
        if self.fingerprint != model.fingerprint:
            raise cannot_resume("This answer was begun by another model.")
        if self.exact != model.exact:
            raise cannot_resume("This answer was begun by a server with another 'model.exact'.")

    def submit(self, begun: Submit) -> Submit:
        """Return the message by which the engine continues the answer of the other server: `begun` plus the tokens
        generated there. begun: the message with which the engine would begin the turn."""
        if self.note.prompt != digest_of(begun.token_ids):
            # The text is the same, so the answer goes on validly, though not as it would have where it began.
            log.warning(
                "the prompt of a resumed answer has other token ids here: its transcript is missing or incomplete"
            )
        return msgspec.structs.replace(
            begun,
            resume=self.said(begun.num_choices),
            over=self.over(begun.num_choices),
            sampling=msgspec.structs.replace(begun.sampling, seed=self.note.seed),
            prompt_logprobs=None,  # a stream shows none
        )

    def num_tokens(self, num_choices: int) -> int:
        """Return the number of tokens that the other server generated for this prompt, over all choices. num_choices:
        how many choices each prompt of the stream has; the notes number choices through all prompts."""
        return sum(len(delta.ids) for delta in self.deltas if delta.choice // num_choices == self.place)

    def said(self, num_choices: int) -> list[list[int] | None]:
        """Return for each choice of this prompt the tokens that the other server generated; None for a choice that has
        ended and is not continued. num_choices: how many choices each prompt of the stream has; the notes number
        choices through all prompts."""
        said: list[list[int] | None] = [[] for _ in range(num_choices)]
        for delta in self.deltas:
            place, index = divmod(delta.choice, num_choices)
            ids = said[index] if place == self.place else None
            if ids is not None:
                ids += delta.ids
                if delta.end is not None:
                    said[index] = None
        return said

    def over(self, num_choices: int) -> list[int] | None:
        """Return all tokens of this prompt's first choice if that choice has ended on the other server; None if it is
        continued here. The engine computes the KV of these tokens without sending them again, so that the session
        contains the ended answer. num_choices: how many choices each prompt of the stream has; the notes number choices
        through all prompts."""
        mine = [delta for delta in self.deltas if delta.choice == self.place * num_choices]
        if not any(delta.end is not None for delta in mine):
            return None
        return [token_id for delta in mine for token_id in delta.ids]


@dataclass(frozen=True, slots=True)
class Resumption:
    """A stream that another server began, as its notes describe it."""

    elapsed_s: float  # since the client's request arrived
    opening: OpeningNote
    deltas: list[DeltaNote]

    @classmethod
    def read(cls, resume: Resume) -> "Resumption":
        """Return the stream that an envelope describes. Raises ApiError 409 if the notes are of another version."""
        try:
            opening, deltas = _decode_opening(resume.opening), [_decode_delta(note) for note in resume.deltas]
        except msgspec.DecodeError:
            raise cannot_resume("The notes of this answer cannot be read.") from None
        return cls(resume.elapsed_s, opening, deltas)

    def turn(self, place: int) -> ResumedTurn:
        """Return the notes of one generation. place: its index among the stream's prompts. Raises ApiError 409 if the
        stream had fewer."""
        opening = self.opening
        if place >= len(opening.turns):
            raise cannot_resume("This answer had fewer prompts.")
        return ResumedTurn(
            note=opening.turns[place],
            created=opening.created,
            fingerprint=opening.fingerprint,
            exact=opening.exact,
            place=place,
            deltas=self.deltas,
        )

    async def replay(self, turns: Sequence[RunningTurn]) -> AsyncIterator[Delta]:
        """Yield again the pieces that the client has received, and bring the generations' choices into the state that
        they had on the other server. Raises ApiError 409 for a choice that the request does not ask for."""
        num_choices = len(turns[0].choices)
        for count, note in enumerate(self.deltas, 1):
            place, index = divmod(note.choice, num_choices)
            if place >= len(turns):
                raise cannot_resume("This answer had more choices.")
            if (delta := _replayed(note, turns[place].choices[index], turns[place])) is not None:
                yield replace(delta, choice=note.choice)
            if count % _REPLAYED_AT_ONCE == 0:
                await asyncio.sleep(0)
        for turn in turns:
            turn.replayed()


def _replayed(note: DeltaNote, choice: Answer, turn: RunningTurn) -> Delta | None:
    choice.is_resumed = True
    choice.report = note.report or choice.report
    choice.timings = note.timings or choice.timings
    choice.last_token_s = time.monotonic()
    if choice.first_token_s is None:
        choice.first_token_s = choice.last_token_s if note.ttft_s is None else turn.arrived_s + note.ttft_s
    output = Output(
        request_id=turn.request_id,
        choice=choice.index,
        token_ids=note.ids,
        logprobs=note.logprobs,
        finish_reason=note.end,
        report=None,
        timings=None,
        error=None,
        error_code=None,
    )
    delta = choice.push(output)
    choice.take_new()
    begun = [call for _, call, _ in delta.parts.calls if call is not None] if delta is not None else []
    for call, call_id in zip(begun, note.calls, strict=False):
        call.id = call_id
    return delta


def cannot_resume(message: str) -> ApiError:
    return ApiError(409, message, code="cannot_resume")
