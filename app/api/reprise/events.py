"""GET /v1/events: server-sent events for the live view of the page."""

from contextlib import aclosing

from fastapi import APIRouter, Request, Response
from starlette.types import Receive, Scope, Send

from reprise.app.api.calls import readiness_of
from reprise.app.http.event_stream import HEADERS, event, send_within, until_disconnect
from reprise.app.observe.live import Live, Watcher, events
from reprise.app.tenancy.keyring import Keyring
from reprise.app.turn.readiness import Readiness, Status

router = APIRouter()


@router.get("/v1/events")
async def watch(request: Request) -> Response:
    """Sends `state` once a second while something changes, else every 15 s, and `turns` when answers begin. Where keys
    are configured, `server.admin_keys` see all requests and the tiers; other keys see their own requests."""
    keyring: Keyring = request.app.state.keyring
    live: Live = request.app.state.live
    return LiveStream(
        readiness_of(request),
        keyring,
        live,
        live.watch(request.state.tenant, sees_all=keyring.is_admin(request.state.tenant)),
    )


class LiveStream(Response):
    """A stream that ends when the client disconnects or stops reading, when its key's rights change, or when the server
    drains: it must not delay the shutdown."""

    def __init__(self, readiness: Readiness, keyring: Keyring, live: Live, watcher: Watcher) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._live = live
        self._watcher = watcher
        self._readiness = readiness
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._run(send))
        finally:
            self._watcher.close()

    async def _run(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(events(self._live, self._watcher, is_open=self._is_open)) as named:
            async for name, data in named:
                await send_within(send, b"event: " + name.encode() + b"\n" + event(data))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _is_open(self) -> bool:
        if self._readiness.status in (Status.DRAINING, Status.FAILED, Status.STOPPED):
            return False
        tenant = self._watcher.tenant
        return self._keyring.knows(tenant) and self._keyring.is_admin(tenant) == self._watcher.sees_all
