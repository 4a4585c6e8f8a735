"""Keeps the contexts of waiting and running requests, by request and by session."""

from reprise.cache.blocks.table import SessionName
from reprise.cache.requests.context import RequestContext


class Requests(dict[str, RequestContext]):
    """A dict from request id to context, for all parts of the CacheManager, on the engine's thread. Only `begin` and
    `end` change it."""

    def __init__(self) -> None:
        super().__init__()
        self.changes = 0  # number of times a request came, ended or gave its pages back
        self._of_session: dict[SessionName, dict[str, RequestContext]] = {}

    def begin(self, context: RequestContext) -> None:
        self.changes += 1
        self[context.request_id] = context
        self._of_session.setdefault(context.session, {})[context.request_id] = context

    def end(self, request_id: str) -> RequestContext:
        """Remove and return the context of a request. Raises KeyError on an unknown one."""
        context = self.pop(request_id)
        self.changes += 1
        others = self._of_session[context.session]
        del others[request_id]
        if not others:
            del self._of_session[context.session]
        return context

    def gave_way(self) -> None:
        """Count in `changes` that a request has given its pages back but has not ended."""
        self.changes += 1

    def has_pages(self, session: SessionName) -> bool:
        """Return whether a request of the session has pages, so that it runs or soon will. Called often in every
        step."""
        contexts = self._of_session.get(session)
        if contexts is not None:
            for context in contexts.values():  # a third of the time of `any`
                if context.rows.pages:
                    return True
        return False

    def of(self, session: SessionName) -> list[RequestContext]:
        """Return a session's contexts, the oldest first."""
        return list(self._of_session.get(session, {}).values())
