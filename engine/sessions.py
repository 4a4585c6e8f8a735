"""Answers requests about sessions, and reports the sessions that other servers may take over."""

import heapq
from collections.abc import Iterator

from reprise.cache.blocks.context import SessionContext
from reprise.cache.blocks.head import BadHead
from reprise.cache.blocks.table import SessionName
from reprise.cache.sessions import SessionStore
from reprise.engine.messages import Adopt, Head, SessionInfo, SessionReply, SessionRequest


class SessionDirectory:
    """A handler of the app's requests to list, show, pin, expire, delete and prefetch sessions of this engine, and to
    take over a session from another replica. It also returns the records (heads) by which other replicas can take over
    sessions from here. Not the fleet's directory. Called by the Engine, on its thread."""

    def __init__(
        self,
        *,
        sessions: SessionStore,
        has_redis: bool,
        max_pinned_bytes: int,
        session_ttl_s: float,
        unix_offset_s: float,
    ) -> None:
        """Set up. has_redis: whether this server stores KV in Redis, where other servers can find it."""
        self._sessions = sessions
        self.has_heads = has_redis
        """Whether `take_heads` may return something."""
        self.unanswered: set[str] = set()
        """The ids of the requests that `take_replies` will answer."""
        self._max_pinned_bytes = max_pinned_bytes  # per tenant
        self._session_ttl_s = session_ttl_s
        self._unix_offset_s = unix_offset_s

    def apply(self, request: SessionRequest, now: float) -> list[SessionReply]:
        """Carry out a request. Returns its answer, or nothing if the answer comes later."""
        return self._now_or_later(request.request_id, self._answer(request, now))

    def adopt(self, request: Adopt, now: float) -> list[SessionReply]:
        """Begin to take over a session from another replica. Returns a refusal at once, or nothing if the take-over has
        begun, whose result `take_replies` will return."""
        return self._now_or_later(request.request_id, self._adopt(request, now))

    def take_replies(self) -> list[SessionReply]:
        """Return the answers that could not be given at once: to deletions whose bytes are gone, and to take-overs."""
        ended = list(self._sessions.deletions.take_ended()) if self._sessions.deletions.waits else []
        if self.has_heads:
            ended += self._sessions.take_adopted()
        self.unanswered.difference_update(asked for asked, _ in ended)
        return [SessionReply(request_id=asked, sessions=[], error_code=problem) for asked, problem in ended]

    def take_heads(self) -> list[Head]:
        """Return the heads that have changed since `take_heads` was last called. (A head is the record by which another
        replica can take over a session.)"""
        if not self.has_heads:
            return []
        return [
            Head(
                tenant=told.name[0],
                salt=told.name[1],
                session_id=told.name[2],
                turn=told.turns,
                redis_tokens=told.redis_tokens,
                head=told.signed,
            )
            for told in self._sessions.take_heads()
        ]

    def _now_or_later(self, request_id: str, reply: SessionReply | None) -> list[SessionReply]:
        if reply is None:
            self.unanswered.add(request_id)
            return []
        return [reply]

    def _answer(self, request: SessionRequest, now: float) -> SessionReply | None:
        if request.action == "list":
            return self._list(request)
        if request.action == "list_all":
            return self._list_all(request)
        if request.action == "recent":
            return self._recent(request)
        if request.action == "delete":
            return self._delete(request)
        found = [name for name, _ in self._of(request.tenant) if name[2] == request.session_id]
        if not found:
            return _refused(request, "not_found", f"there is no session {request.session_id!r}")
        match request.action:
            case "get":
                pass
            case "patch":
                return self._patch(request, found)
            case "prefetch":
                for name in found:
                    self._sessions.prefetch(name, now)
            case _:
                return _refused(request, "unavailable", f"unknown action {request.action!r}")
        return SessionReply(request_id=request.request_id, sessions=[self._info(name) for name in found])

    def _adopt(self, request: Adopt, now: float) -> SessionReply | None:
        if not self.has_heads:
            return _refused(request, "unavailable", "this engine keeps no KV in Redis")
        name = (request.tenant, request.salt, request.session_id)
        try:
            self._sessions.adopt(request.request_id, name, request.head, now)
        except BadHead as error:
            return _refused(request, "bad_head", str(error))
        return None

    def _of(self, tenant: str) -> Iterator[tuple[SessionName, SessionContext]]:
        return ((name, session) for name, session in self._sessions.contexts.items() if name[0] == tenant)

    def _list(self, request: SessionRequest) -> SessionReply:
        names = sorted((name for name, _ in self._of(request.tenant)), key=lambda name: (name[2], name[1]))
        # The session that a page ended with may be gone by the next one: its place in the order is not.
        return self._page(request, [name for name in names if name[2] > request.after])

    def _list_all(self, request: SessionRequest) -> SessionReply:
        """List sessions of all tenants; the app lets only admins ask. The next page begins after the session with which
        the last one ended, even if that session was deleted in between."""
        tenant, _, session_id = request.after.partition("/")
        names = sorted(self._sessions.contexts, key=lambda name: (name[0], name[2], name[1]))
        return self._page(request, [name for name in names if (name[0], name[2]) > (tenant, session_id)])

    def _page(self, request: SessionRequest, names: list[SessionName]) -> SessionReply:
        """Return the first page of some sessions. Sessions of one id, which differ in their salt, are on the same
        page."""
        end = request.limit
        while 0 < end < len(names) and (names[end][0], names[end][2]) == (names[end - 1][0], names[end - 1][2]):
            end += 1
        return SessionReply(
            request_id=request.request_id,
            sessions=[self._info(name) for name in names[:end]],
            more=len(names) > end,
        )

    def _recent(self, request: SessionRequest) -> SessionReply:
        """Return the sessions that were used last. A session with a running turn counts as in use now."""
        found = heapq.nlargest(
            request.limit,
            self._of(request.tenant),
            key=lambda pair: (self._sessions.is_running(pair[0]), pair[1].last_used_s),
        )
        return SessionReply(request_id=request.request_id, sessions=[self._info(name) for name, _ in found])

    def _patch(self, request: SessionRequest, found: list[SessionName]) -> SessionReply:
        if request.pinned:
            held = {name for name, session in self._of(request.tenant) if session.pinned} | set(found)
            size = sum(sum(self._sessions.bytes_of(name).values()) for name in held)
            if size > self._max_pinned_bytes:
                return _refused(
                    request,
                    "pin_quota",
                    f"pinned sessions would hold {size} bytes, the limit is {self._max_pinned_bytes}",
                )
        for name in found:
            self._sessions.configure(name, pinned=request.pinned, ttl_s=request.ttl_s)
        return SessionReply(request_id=request.request_id, sessions=[self._info(name) for name in found])

    def _delete(self, request: SessionRequest) -> SessionReply | None:
        problem = self._sessions.deletions.delete(request.tenant, request.session_id, request.request_id)
        if problem == "busy":
            return _refused(request, problem, "a request of this session is running, or it is being deleted")
        return None if problem is None else _refused(request, problem, f"there is no session {request.session_id!r}")

    def _info(self, name: SessionName) -> SessionInfo:
        session = self._sessions.contexts[name]
        ttl_s = self._session_ttl_s if session.ttl_s is None else session.ttl_s
        last_used_s = session.last_used_s + self._unix_offset_s
        return SessionInfo(
            session_id=name[2],
            cache_salt=name[1],
            tokens=session.num_tokens,
            truncated_tokens=session.truncated_tokens,
            blocks=self._sessions.blocks_of(name),
            bytes=self._sessions.bytes_of(name),
            last_used_s=last_used_s,
            expires_s=None if session.pinned else last_used_s + ttl_s,
            pinned=session.pinned,
            running=self._sessions.is_running(name),
            tenant=name[0],
        )


def _refused(request: SessionRequest | Adopt, code: str, message: str) -> SessionReply:
    return SessionReply(request_id=request.request_id, sessions=[], error_code=code, error=message)
