"""Streams an answer to a gateway: in the frames of `reprise.fleet.protocol`, with notes (tokens and ids, in JSON) by
which another replica can continue it."""

from collections.abc import AsyncIterator, Sequence

from reprise.app.errors import ApiError
from reprise.app.turn.answer import Delta
from reprise.app.turn.ports import Deltas, Frames, RunningTurn
from reprise.fleet.protocol import Frame, Kind, encode_frame
from reprise.fleet.replica.resume import Resumption, StreamNotes

_OF_THIS_SERVER = ("draining", "engine_lost", "internal_error")  # errors that another server need not have


class RelayedFrames:
    """The frames of one stream to a gateway. Each has events that the endpoint's own frames made for the client, and a
    note from which another replica can continue the answer. A stream that resumes an answer has no opening, because the
    client has received it."""

    def __init__(self, events: Frames, turns: Sequence[RunningTurn], *, is_resumed: bool) -> None:
        self._events = events
        self._notes = StreamNotes(turns)
        self._is_resumed = is_resumed

    @property
    def ping(self) -> bytes:
        return encode_frame(Frame(Kind.PING, self._events.ping))

    def opening(self) -> bytes:
        if self._is_resumed:
            return b""
        return encode_frame(Frame(Kind.OPENING, self._events.opening(), self._notes.opening()))

    def delta(self, delta: Delta) -> bytes:
        if delta.progress is not None:  # a sign of life like a ping: nothing from which another replica could go on
            return encode_frame(Frame(Kind.PING, self._events.delta(delta)))
        return encode_frame(Frame(Kind.DELTA, self._events.delta(delta), self._notes.delta(delta)))

    def closing(self) -> bytes:
        return encode_frame(Frame(Kind.CLOSING, self._events.closing()))

    def failed(self, error: ApiError) -> bytes:
        kind = Kind.BROKEN if error.code in _OF_THIS_SERVER else Kind.FAILED
        return encode_frame(Frame(kind, self._events.failed(error)))


class ResumedDeltas(AsyncIterator[Delta]):
    """The remaining deltas of an answer that another replica began. First the deltas of that replica are encoded as
    events again and thrown away, so that the encoder continues, for example its counters, where the client's stream
    broke off."""

    def __init__(self, rest: Deltas, events: Frames, resumption: Resumption) -> None:
        self._rest, self._events, self._resumption = rest, events, resumption

    @property
    def generations(self) -> Sequence[RunningTurn]:
        return self._rest.generations

    async def wait_first(self, timeout_s: float) -> None:
        """Replay the notes of the other replica, then wait as `Generation.wait_first` does. Raises ApiError, 409 for a
        choice that the request does not ask for."""
        self._events.opening()
        async for delta in self._resumption.replay(self.generations):
            self._events.delta(delta)
        await self._rest.wait_first(timeout_s)

    async def __anext__(self) -> Delta:
        return await anext(self._rest)

    async def aclose(self) -> None:
        await self._rest.aclose()
