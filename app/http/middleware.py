"""Wraps every request: assigns an id, counts its status, checks keys, and answers every exception with the error
envelope."""

import logging
import re
import secrets
import time
from collections.abc import Callable, Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reprise.app.errors import ApiError, ClientGone, internal_error
from reprise.app.http.host_names import is_ours
from reprise.app.http.paths import make_plain
from reprise.app.observe import logs, tracing
from reprise.app.tenancy.keyring import Keyring

OPEN_PATHS = frozenset({"/health", "/v1/health", "/ready", "/", "/docs"})
OPEN_BELOW = "/page/"  # the page's files, which hold no data; the requests that the page makes need a key
KEY_HEADERS = ("x-api-key", "api-key")  # headers in which clients of Anthropic's and Azure's APIs send a key
CLIENT_CLOSED_REQUEST = 499
_REQUEST_ID = re.compile(r"[A-Za-z0-9._\-]{1,128}")

log = logging.getLogger(__name__)
access_log = logging.getLogger("reprise.access")


class RequestContext:
    """The outermost layer. It gives each request an id and the plain path of its endpoint (`paths.make_plain`), answers
    exceptions with an error, and calls `on_done(scope, status)` once for each."""

    def __init__(self, app: ASGIApp, *, on_done: Callable[[Scope, int], None], log_access: bool) -> None:
        self._app = app
        self._on_done = on_done
        self._log_access = log_access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrived_s = time.monotonic()
        make_plain(scope)
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        scope.setdefault("state", {}).update(arrived_s=arrived_s, request_id=request_id)
        logs.request_id.set(request_id)
        tracing.traceparent.set(headers.get("traceparent", ""))
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers["openai-processing-ms"] = str(round((time.monotonic() - arrived_s) * 1e3))
            await send(message)

        try:
            if "content-length" in headers and "transfer-encoding" in headers:
                await _two_lengths().response(scope["path"])(scope, receive, send_with_id)
            else:
                await self._app(scope, receive, send_with_id)
        except ClientGone:
            status = CLIENT_CLOSED_REQUEST
        except Exception:
            log.exception("request %s failed", request_id)
            if status == 0:
                await internal_error().response(scope["path"])(scope, receive, send_with_id)
            status = 500
        finally:
            self._on_done(scope, status)
            if self._log_access:
                took_ms = (time.monotonic() - arrived_s) * 1e3
                path = scope["path"].encode("unicode_escape").decode()[:200]
                fields = {"method": scope["method"], "path": path, "status": status, "took_ms": round(took_ms, 1)}
                access_log.info("request", extra={"fields": fields})


def _two_lengths() -> ApiError:
    """Return the error for a request with both Content-Length and Transfer-Encoding. A proxy may obey the one that this
    server does not, and would then take part of the body for another client's next request."""
    message = "A request has either Content-Length or Transfer-Encoding."
    return ApiError(400, message, code="invalid_request", headers={"connection": "close"})


class Authentication:
    """A layer that requires a key for every path, also unknown ones, except health and the page. It stores the key's
    tenant in the request's state."""

    def __init__(self, app: ASGIApp, *, keyring: Keyring, hostnames: Collection[str]) -> None:
        """Set up. hostnames: further host names by which a server without keys may be addressed."""
        self._app = app
        self._keyring = keyring
        self._hostnames = {name.lower() for name in hostnames}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_open(scope["path"]):
            headers = Headers(scope=scope)
            if not self._keyring.wants_keys and not is_ours(headers.get("host", ""), self._hostnames):
                await _unknown_host().response(scope["path"])(scope, receive, send)
                return
            authorization = headers.get("authorization")
            if authorization is None:
                key = next((value for name in KEY_HEADERS if (value := headers.get(name)) is not None), None)
                authorization = None if key is None else f"Bearer {key}"
            tenant = self._keyring.tenant(authorization)
            if tenant is None:
                error = ApiError(
                    401,
                    "Incorrect or missing API key: send 'Authorization: Bearer KEY'.",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
                await error.response(scope["path"])(scope, receive, send)
                return
            scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)


def _unknown_host() -> ApiError:
    message = "Without API keys, this server does not accept this host name: set server.hostnames or server.api_keys."
    return ApiError(403, message, code="unknown_host")


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_BELOW)
