"""Requests: the contexts of those who wait and run, by request and by session."""

from cache.blocks.context import RunningContext
from cache.blocks.table import SessionName


class Requests(dict[str, RunningContext]):
    """request id -> context. Changed by `begin` and `end` alone. Single-threaded, part of the CacheManager."""

    def __init__(self) -> None:
        super().__init__()
        self.changes = 0  # how many have come, gone, and given their pages back
        self._of_session: dict[SessionName, dict[str, RunningContext]] = {}

    def begin(self, context: RunningContext) -> None:
        self.changes += 1
        self[context.request_id] = context
        self._of_session.setdefault(context.session, {})[context.request_id] = context

    def end(self, request_id: str) -> RunningContext:
        """Raises KeyError on an unknown request."""
        context = self.pop(request_id)
        self.changes += 1
        others = self._of_session[context.session]
        del others[request_id]
        if not others:
            del self._of_session[context.session]
        return context

    def gave_way(self) -> None:
        """A request has given its pages back, and goes on."""
        self.changes += 1

    def has_pages(self, session: SessionName) -> bool:
        """Whether a request of the session runs, or has its pages already. Asked for many sessions in every step."""
        contexts = self._of_session.get(session)
        if contexts is not None:
            for context in contexts.values():  # a third of the time of `any`
                if context.pages:
                    return True
        return False

    def of(self, session: SessionName) -> list[RunningContext]:
        """The oldest first."""
        return list(self._of_session.get(session, {}).values())
