"""The endpoints that a gateway answers itself: its health, its metrics, the fleet, and lists of all replicas."""

from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from reprise.app.api.reprise import page
from reprise.app.errors import ApiError, session_not_found, unavailable
from reprise.app.http.body import parse_json, read_body
from reprise.app.schemas.fields import SESSION_ID
from reprise.app.tenancy.keyring import Keyring
from reprise.engine.messages import salt_of
from reprise.fleet.directory import Directory
from reprise.fleet.directory_redis import DirectoryUnavailable
from reprise.fleet.gateway.metrics import Metrics
from reprise.fleet.gateway.passing import Passing, no_replica
from reprise.fleet.gateway.replicas import Replicas
from reprise.fleet.keys import SessionName
from reprise.fleet.members import Members
from reprise.fleet.overview import MAX_SHOWN, overview

_READING = ("GET", "HEAD")  # methods of what load balancers and browsers look at
MAX_BODY_BYTES = 1 << 14  # longest body of an operator's request
MAX_LISTED, LISTED = 1000, 100  # sessions of a page, as on a replica

Handler = Callable[[Request], Awaitable[Response]]


class Endpoints:
    """The handlers of a gateway's own endpoints. One per gateway, on its event loop. Handlers raise ApiError."""

    def __init__(
        self,
        *,
        keyring: Keyring,
        directory: Directory,
        members: Members,
        replicas: Replicas,
        passing: Passing,
        metrics: Metrics,
        is_draining: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._keyring = keyring
        self._directory = directory
        self._members = members
        self._replicas = replicas
        self._passing = passing
        self._metrics = metrics
        self._is_draining = is_draining
        self._clock = clock
        self._handlers: dict[tuple[str, str], Handler] = {
            **{(method, path): self.health for path in ("/health", "/v1/health") for method in _READING},
            **{(method, "/ready"): self.ready for method in _READING},
            **{(method, "/v1/models"): self.models for method in _READING},
            ("GET", "/metrics"): self.metrics,
            ("GET", "/v1/sessions"): self.sessions,
            ("GET", "/v1/fleet"): self.fleet,
            ("GET", "/v1/fleet/targets"): self.targets,
            ("POST", "/v1/fleet/drain"): self.drain,
            ("POST", "/v1/fleet/move"): self.move,
        }

    def find(self, method: str, path: str) -> Handler | None:
        """Return the handler of a request; None if a replica answers it."""
        if method in _READING and page.find(path) is not None:
            return page.file
        return self._handlers.get((method, path))

    @property
    def _redis(self) -> str:
        return "ok" if self._directory.state == "closed" else "away"

    async def health(self, request: Request) -> Response:
        """Answer 200: this process lives. The answer does not depend on Redis."""
        return _json({"status": "ok", "replicas": len(self._open()), "redis": self._redis})

    async def ready(self, request: Request) -> Response:
        """Answer 200 while at least one replica takes turns and this gateway does not drain. Otherwise raises ApiError
        503."""
        if self._is_draining():
            raise unavailable("This gateway is draining.", code="draining", retry_after_s=30.0)
        if not (names := self._open()):
            raise no_replica()
        return _json({"status": "ready", "replicas": len(names)})

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.render(), media_type=CONTENT_TYPE_LATEST)

    async def models(self, request: Request) -> Response:
        """Answer with all models of the fleet. One replica of each fingerprint is asked, and their lists are joined."""
        of_model: dict[str, list[str]] = {}
        for name in self._open():
            of_model.setdefault(self._members.beats[name].fingerprint, []).append(name)
        answers = await self._passing.ask_all(request, of_model.values())
        models = {model["id"]: model for answer in answers for model in answer["data"]}
        others = {name: value for answer in answers for name, value in answer.items() if name not in ("object", "data")}
        return _json({"object": "list", "data": list(models.values()), **others})

    async def sessions(self, request: Request) -> Response:
        """List this key's sessions in all caches of the fleet. A session that several replicas have is shown as the
        replica that used it last has it."""
        given = request.query_params.get("limit", "")
        limit = min(int(given), MAX_LISTED) if given.isdecimal() and len(given) < 9 else LISTED
        answers = await self._passing.ask_all(request, [[name] for name in self._members.view.names])
        newest: dict[tuple[Any, ...], dict[str, Any]] = {}
        for session in sorted(
            (one for answer in answers for one in answer["data"]), key=lambda one: one["last_used_at"]
        ):
            newest[session["id"], session.get("kv_quality"), session["cache_salt"] or ""] = session
        found = [newest[key] for key in sorted(newest)]
        page = found[:limit]
        return _json(
            {
                "object": "list",
                "data": page,
                "first_id": page[0]["id"] if page else None,
                "last_id": page[-1]["id"] if page else None,
                "has_more": len(found) > limit or any(answer["has_more"] for answer in answers),
            }
        )

    async def fleet(self, request: Request) -> Response:
        """Return what is known of every replica, and what this gateway has counted. With keys, for admins."""
        self._require_admin(request)
        given = request.query_params.get("limit", "")
        return _json(
            overview(
                self._members,
                self._directory,
                self._clock(),
                limit=min(int(given), MAX_SHOWN) if given.isdecimal() and len(given) < 9 else MAX_SHOWN,
                under_way=self._replicas.under_way,
                gateway=self._metrics.counts(),
            )
        )

    async def targets(self, request: Request) -> Response:
        """List the replicas in the form of Prometheus' `http_sd_configs`, so that Prometheus scrapes all of them."""
        self._require_admin(request)
        return _json(
            [
                {
                    "targets": [urlsplit(beat.url).netloc],
                    "labels": {"replica": name, "model": beat.model, "__scheme__": urlsplit(beat.url).scheme},
                }
                for name, beat in sorted(self._members.beats.items())
            ]
        )

    async def drain(self, request: Request) -> Response:
        """Send no new turns to a replica (`on` true), or allow them again (false). Body: {"replica": NAME, "on":
        true}."""
        body = await self._operator(request)
        name, on = body.get("replica"), body.get("on", True)
        if not isinstance(name, str) or not isinstance(on, bool):
            raise ApiError(400, "Send 'replica', a name, and perhaps 'on', true or false.", code="invalid_request")
        if on and name not in self._members.beats:
            raise _unknown_replica(name)
        await _asked(self._directory.drain(name, on=on))
        return _json({"replica": name, "draining": on})

    async def move(self, request: Request) -> Response:
        """Send the next turn of one of the caller's sessions to a replica. Body: {"session_id": ID, "replica": NAME,
        "cache_salt": "", "kv_quality": "default"}."""
        body = await self._operator(request)
        session_id, name, salt = body.get("session_id"), body.get("replica"), body.get("cache_salt") or ""
        if not (isinstance(session_id, str) and isinstance(name, str) and isinstance(salt, str)):
            raise ApiError(400, "Send 'session_id' and 'replica', both names.", code="invalid_request")
        if not SESSION_ID.fullmatch(session_id):
            raise session_not_found(session_id)
        beat = self._members.beats.get(name)
        if beat is None:
            raise _unknown_replica(name)
        tenant = request.scope["state"]["tenant"]
        exact = body.get("kv_quality") == "exact" or self._keyring.is_exact(tenant)
        session = SessionName(tenant, session_id, salt_of(salt, is_exact=exact))
        if not await _asked(self._directory.move(session, fingerprint=beat.fingerprint, replica=name)):
            raise session_not_found(session_id)
        return _json({"session_id": session_id, "replica": name})

    async def _operator(self, request: Request) -> dict[str, object]:
        self._require_admin(request)
        return parse_json(await read_body(request, max_bytes=MAX_BODY_BYTES))

    def _require_admin(self, request: Request) -> None:
        if not self._keyring.is_admin(request.scope["state"]["tenant"]):
            raise ApiError(403, "Only a key of server.admin_keys may do this.", code="forbidden")

    def _open(self) -> list[str]:
        view, now = self._members.view, self._clock()
        return [name for name in view.names if view.is_open(name, now)]


async def _asked(answer: Awaitable[Any]) -> Any:
    """Await the directory. Raises ApiError 503."""
    try:
        return await answer
    except DirectoryUnavailable:
        raise unavailable("The fleet's Redis does not answer.", code="redis_unavailable", retry_after_s=1.0) from None


def _unknown_replica(name: str) -> ApiError:
    return ApiError(404, f"No replica '{name[:64]}' is in the fleet.", code="replica_not_found", param="replica")


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
