"""Defines the protocols that a turn uses: the engine, and the hooks that accompany a turn beside it."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from reprise.app.errors import ApiError
from reprise.app.turn.answer import Answer, Delta
from reprise.engine.messages import (
    Adopt,
    ModelInfo,
    Output,
    SamplingParams,
    SessionReply,
    SessionRequest,
    Stats,
    Submit,
)


class OutputSource(Protocol):
    """An iterator over the outputs of all choices of a request, interleaved.
    `reprise.engine.process.client.OutputStream` is one."""

    def __aiter__(self) -> AsyncIterator[Output]: ...

    async def __anext__(self) -> Output: ...

    async def aclose(self) -> None: ...


class EnginePort(Protocol):
    """The part of `reprise.engine.process.client.EngineClient` that the app uses; the tests have a scripted one."""

    @property
    def state(self) -> str: ...
    @property
    def failure(self) -> str | None: ...
    @property
    def model(self) -> ModelInfo | None: ...
    @property
    def stats(self) -> Stats | None: ...
    @property
    def restarts(self) -> int: ...

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    async def wait_ready(self) -> None: ...
    async def submit(self, request: Submit) -> OutputSource: ...
    async def sessions(self, request: SessionRequest | Adopt, *, timeout_s: float) -> SessionReply: ...
    def finish(self, request_id: str, choice: int, keep_tokens: int) -> None: ...
    def finish_all(self) -> None: ...


def codec_in_use(model: ModelInfo, stats: Stats | None) -> str:
    """Return the name of the codec that may change KV, by the engine's last report; `raw`, which leaves KV as it is, if
    there is none or the engine has condemned it (found that it must not be used)."""
    return "raw" if stats is not None and stats.codec_condemned else model.codec


@dataclass(frozen=True, slots=True)
class Begun:
    """The id and the time of a turn's beginning, which the answer shows to the client, and the number of tokens that
    were already counted against the key on the server where the turn began."""

    request_id: str
    created: int  # unix time
    paid_tokens: int = 0  # tokens of the answer that its tenant has paid for where it was begun


class RunningTurn(Protocol):
    """The part of a `Generation` that hooks use."""

    @property
    def request_id(self) -> str: ...
    @property
    def session_id(self) -> str: ...
    @property
    def created(self) -> int: ...
    @property
    def arrived_s(self) -> float: ...
    @property
    def model(self) -> ModelInfo: ...
    @property
    def sampling(self) -> SamplingParams: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def choices(self) -> Sequence[Answer]: ...
    @property
    def response_ids(self) -> Sequence[str]: ...
    @property
    def is_handed_over(self) -> bool: ...

    def replayed(self) -> None:
        """Note that all tokens that another server generated for this turn have been replayed, so that its choices are
        in the same state as there."""
        ...


class Deltas(Protocol):
    """The deltas of a streamed answer: a `Generation`, or several joined into one."""

    @property
    def generations(self) -> Sequence[RunningTurn]: ...

    async def wait_first(self, timeout_s: float) -> None: ...

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    async def __anext__(self) -> Delta: ...

    async def aclose(self) -> None: ...


class Frames(Protocol):
    """An encoder of an answer's stream as complete events of one API, such as chat completions or responses. Any of its
    methods may return no bytes."""

    @property
    def ping(self) -> bytes: ...

    def opening(self) -> bytes: ...

    def delta(self, delta: Delta) -> bytes: ...

    def closing(self) -> bytes: ...

    def failed(self, error: ApiError) -> bytes:
        """Encode the last events of a stream that ends with an error."""
        ...


class TurnHooks(Protocol):
    """The hooks that accompany one turn beside the engine, from its admission to its end:
    `reprise.app.turn.alone.LoneTurn` on a server alone, `reprise.fleet.replica.replica_turn.ReplicaTurn` in a fleet.
    `ArrivedRequest.turn` makes them. The turn calls their methods on the app's event loop, in the order in which this
    class lists them."""

    @property
    def is_new(self) -> bool:
        """Whether this server begins the turn. If not, another server has."""
        ...

    @property
    def is_counted(self) -> bool:
        """Whether another server counts the turn against the limits of its key."""
        ...

    @property
    def can_move(self) -> bool:
        """Whether another server of the fleet would continue this turn if this server stopped it, as it does while it
        drains."""
        ...

    def admit(self, session_id: str | None, model: ModelInfo) -> str | None:
        """Return the turn's session id, which is the client's unless the hooks know another. Raises ApiError for a turn
        that this server cannot continue."""
        ...

    async def claim(self, session_id: str, salt: str) -> bool:
        """Make this server the session's home, the only server that may record its turns in the fleet. Returns whether
        transcripts of the session were fetched from other servers. The prompt is then to be prepared again, because
        more of its exact token ids may be known."""
        ...

    def resume(self, submit: Submit) -> Submit:
        """Return the message for the engine: `submit` itself, or for a turn that another server began, one that
        continues its answer."""
        ...

    def begin(self, submit: Submit, *, keep_s: float | None) -> Begun:
        """Note that the turn was submitted to the engine. keep_s: the session's time to live in seconds, if the client
        gave one."""
        ...

    def spend(self, tokens: int) -> None:
        """Count tokens that the tenant has used."""
        ...

    async def end(self, turn: RunningTurn) -> None:
        """Note that the turn has ended, before its client learns of that. May be called again."""
        ...


class ArrivedRequest(Protocol):
    """A request that has arrived, from its client or from a server that relays it."""

    @property
    def is_counted(self) -> bool:
        """Whether another server counts the request against its key's requests a minute."""
        ...

    @property
    def elapsed_s(self) -> float:
        """The seconds from the arrival of the client's request at a gateway until it was sent here, if it resumes an
        answer that another server began; 0 for other requests. Known when the body has been opened."""
        ...

    @property
    def session_headers(self) -> Sequence[str]:
        """The values of headers that may name the request's session, the strongest first."""
        ...

    @property
    def added_bytes(self) -> int:
        """The bytes by which the body may exceed the limit for clients, because a server that relays it has added
        data."""
        ...

    @property
    def stream_headers(self) -> Mapping[str, str]:
        """The headers that a streamed answer to this request gets in addition to those of the endpoint, for the server
        that relays it; none for a client."""
        ...

    def open_body(self, data: bytes) -> bytes:
        """Return the client's body from `data`, in which a server that relays it may have wrapped it. Raises
        ApiError."""
        ...

    def turn(self, place: int) -> TurnHooks:
        """Return the hooks of one turn of this request. place: index of the turn's prompt, if the request has several.
        Raises ApiError."""
        ...

    def stream(self, deltas: Deltas, frames: Frames) -> tuple[Deltas, Frames]:
        """Return the (deltas, frames) to stream in place of the given ones. To a gateway, frames also carry token ids,
        so that another server can continue the answer."""
        ...


class Overview(Protocol):
    async def __call__(self, *, limit: int) -> dict[str, Any]: ...


class ServerHooks(Protocol):
    """The hooks that connect this server with others: `reprise.app.turn.alone.LoneServer`, or
    `reprise.fleet.replica.replica.Replica`. One per app, on its event loop."""

    @property
    def name(self) -> str:
        """The server's name within its fleet; "" if it is in none."""
        ...

    @property
    def overview(self) -> Overview | None:
        """A function that is called with `limit` and describes at most that many servers of the fleet. None if there is
        no fleet."""
        ...

    def arrive(self, *, tenant: str, path: str, request_id: str, headers: Mapping[str, str]) -> ArrivedRequest:
        """Take in a request before its body is read. Raises ApiError."""
        ...

    def background_id(self, response_id: str) -> str:
        """Return the id of a response that runs in the background here. response_id: the id that it would have on a
        server alone."""
        ...

    async def keep(self, session_id: str, *, tenant: str, ttl_s: float | None) -> None:
        """Set how many seconds a session lives after its last use; None: it is pinned."""
        ...

    async def delete(self, session_id: str, *, tenant: str) -> None:
        """Delete a session on every server. Raises ApiError."""
        ...

    async def run(self) -> None:
        """Do the work that connects this server with the fleet, such as sending reports, until cancelled or done."""
        ...

    async def leave(self) -> None:
        """Announce that this server ends. Called when its turns have ended."""
        ...
