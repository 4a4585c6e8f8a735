"""Logs what requests hold without effect: once for each client and name, because a client sends it in every turn."""

import logging
from collections import OrderedDict

MAX_CLIENTS = 256  # the one that sent something new longest ago is forgotten
MAX_NAMES = 64  # a client; later names are not logged
MAX_NAMES_PER_LINE = 10

log = logging.getLogger(__name__)


class LossLog:
    """A log of fields, tools and parts of a history that had no effect. One per app, on its event loop. Each client has
    a bounded number of entries of its own, so that none can silence the log for the others."""

    def __init__(self) -> None:
        self._logged: OrderedDict[str, set[str]] = OrderedDict()  # names by client

    def note(self, client: str, names: list[str]) -> None:
        """Log the names that this client has not sent before. They consist of characters that a log can hold."""
        known = self._logged.get(client, set())
        new = [name for name in dict.fromkeys(names) if name not in known][: MAX_NAMES - len(known)]
        if not new:
            return
        self._logged[client] = known | set(new)
        self._logged.move_to_end(client)
        if len(self._logged) > MAX_CLIENTS:
            self._logged.popitem(last=False)
        shown = ", ".join(new[:MAX_NAMES_PER_LINE])
        more = f" and {len(new) - MAX_NAMES_PER_LINE} more" if len(new) > MAX_NAMES_PER_LINE else ""
        log.warning("%s sends what has no effect here: %s%s", client or "a client", shown, more)
