"""Logs what requests hold without effect: once for each client and name, because a client sends it in every turn."""

import logging

MAX_REMEMBERED = 4096  # pairs of client and name; later ones are not logged

log = logging.getLogger(__name__)


class LossLog:
    """A log of fields, tools and parts of a history that were left out. One per app, on its event loop."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, str]] = set()

    def note(self, client: str, names: list[str]) -> None:
        """Log the names that are new for this client. All are words that a log can hold."""
        new = []
        for name in names:
            if (client, name) not in self._logged and len(self._logged) < MAX_REMEMBERED:
                self._logged.add((client, name))
                new.append(name)
        if new:
            log.warning("%s sends what has no effect here: %s", client or "a client", ", ".join(new))
