"""Defines a prompt with its exact token ids, and the data needed to record its answers."""

from dataclasses import dataclass

from reprise.app.conversations.divergence import Divergence
from reprise.app.conversations.rendered_chat import RenderedChat


@dataclass(frozen=True, slots=True)
class Base:
    """The recorded answer with whose token ids a prompt begins. The prompt's first `tokens` ids are the first ids of
    that answer's own prompt followed by the answer."""

    answer_id: int
    digest: bytes  # the answer's digest, because a database that is begun anew reuses ids
    tokens: int


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A request's exact token ids, and the data needed to record its answers."""

    token_ids: list[int]
    session_id: str
    spliced_tokens: int  # leading ids taken from the transcript
    tenant: str
    chain: bytes  # digest of the scope and all messages
    chars: int  # length of the rendered text
    text_digest: bytes
    base: Base | None
    # Token offsets at which the messages begin, in order, and then the answer. Ends early where the template does not
    # show the rest.
    starts: tuple[int, ...]
    tail: bytes  # digest of the scope and the last message
    shift: "Shifted | None" = None
    answered: bytes = b""  # `chain` of the prompt whose answer is the request's last one; empty: there is none
    chat: RenderedChat | None = None  # the request
    diverged: Divergence | None = None  # where and why it left a recorded conversation

    @classmethod
    def unrecorded(cls, token_ids: list[int], session_id: str) -> "PreparedPrompt":
        """Make a prompt that belongs to no recorded conversation."""
        return cls(
            token_ids=token_ids,
            session_id=session_id,
            spliced_tokens=0,
            tenant="",
            chain=b"",
            chars=0,
            text_digest=b"",
            base=None,
            starts=(),
            tail=b"",
        )

    @property
    def recorded(self) -> tuple[list[int], tuple[int, ...]]:
        """Return (all token ids before the answer, indices in them at which messages begin), as they are recorded: with
        the messages that the client has dropped from its request."""
        return (self.token_ids, self.starts) if self.shift is None else (self.shift.stream, self.shift.starts)


@dataclass(frozen=True, slots=True)
class Shifted:
    """The ids of a conversation from which the client has dropped messages. `stream` is the whole conversation, which
    is recorded. The prompt is stream[:keep] + stream[resume:]."""

    stream: list[int]
    starts: tuple[int, ...]  # starts of the messages in the stream
    keep: int
    resume: int
