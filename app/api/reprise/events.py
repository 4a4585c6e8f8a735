"""GET /v1/events: what the page's live view shows, as server-sent events."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.types import Receive, Scope, Send

from app.api.calls import service_of
from app.http.event_stream import HEADERS, event, send_within, until_disconnect
from app.observe.live import Live, Watcher, events
from app.tenancy.keyring import Keyring
from app.turn.service import Service, Status

router = APIRouter()


@router.get("/v1/events")
async def watch(request: Request) -> Response:
    """`state` once a second while anything changes, else four times a minute; `turns` when answers begin. Where there
    are keys, `server.admin_keys` see everybody's requests and the tiers as a whole; others their own."""
    service, keyring = service_of(request), request.app.state.keyring
    sees_all = keyring.is_admin(request.state.tenant)
    return LiveStream(service, keyring, service.live.watch(request.state.tenant, sees_all=sees_all))


class LiveStream(Response):
    """Ends when the client leaves or reads nothing, when its key is no more what it was, and when the server drains: it
    must not hold up the end."""

    def __init__(self, service: Service, keyring: Keyring, watcher: Watcher) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._live: Live = service.live
        self._watcher = watcher
        self._service = service
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._run(send))
        finally:
            self._watcher.close()

    async def _run(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        timeout_s = self._service.settings.limits.send_timeout_s
        source: AsyncIterator[tuple[str, Any]] = events(self._live, self._watcher, is_open=self._is_open)
        async with aclosing(source) as named:  # type: ignore[type-var]
            async for name, data in named:
                await send_within(send, b"event: " + name.encode() + b"\n" + event(data), timeout_s)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _is_open(self) -> bool:
        if self._service.status in (Status.DRAINING, Status.FAILED, Status.STOPPED):
            return False
        tenant = self._watcher.tenant
        return self._keyring.knows(tenant) and self._keyring.is_admin(tenant) == self._watcher.sees_all
