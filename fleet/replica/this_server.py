"""Holds the parts of this server that its membership of a fleet uses."""

from dataclasses import dataclass

from reprise.app.conversations.text_thread import TextThread
from reprise.app.turn.ports import EnginePort
from reprise.app.turn.readiness import Readiness
from reprise.fleet.replica.identity import Identity


@dataclass(frozen=True, slots=True)
class ThisServer:
    """The server that is a replica. One per app; used on its event loop."""

    identity: Identity
    engine: EnginePort
    readiness: Readiness
    shared_transcripts: TextThread | None  # None: the directory holds no transcripts

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the server's model; empty until the model has been loaded once."""
        return self.readiness.fingerprint
