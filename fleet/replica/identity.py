"""Finds the name and the address of this replica."""

import contextlib
import ipaddress
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from reprise.app.settings.settings import Settings

NAME_BYTES = 8


@dataclass(slots=True)
class Identity:
    """The facts that a replica reports about itself and that do not change while it runs."""

    name: str
    boot: str  # another one after every start
    url: str  # under which gateways reach it
    aliases: tuple[str, ...]  # other names of its model

    @classmethod
    def of(cls, settings: Settings) -> "Identity":
        """Return the identity that the settings describe. Raises OSError if a new name cannot be stored."""
        fleet = settings.fleet
        return cls(
            name=fleet.replica or replica_name(settings.state_dir),
            boot=secrets.token_hex(8),
            url=fleet.advertise or own_address(settings),
            aliases=tuple(settings.model.aliases),
        )


def own_address(settings: Settings) -> str:
    """Return the address at which others reach this server: its host and port by the settings. If it listens on every
    address, the host is the name of its machine or container."""
    host = settings.server.host
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:
            host = socket.gethostname()
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.server.port}"


def replica_name(state_dir: Path) -> str:
    """Return the replica's name that is stored in this state directory. If none is, make one up and store it. Raises
    OSError."""
    path = state_dir / "replica"
    with contextlib.suppress(OSError):
        name = path.read_text(encoding="ascii", errors="replace").strip()
        if name and len(name) <= 64 and all(character.isalnum() or character in "._-" for character in name):
            return name
    name = secrets.token_hex(NAME_BYTES)
    path.write_text(name, encoding="ascii")
    return name
