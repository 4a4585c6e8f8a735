"""Compresses what a browser loads and lists: the page's files, and answers to GET that are JSON.

Not compressed are streams, answers to anything but GET, and errors. The length of a compressed body tells what in it
repeats. That is an attack (BREACH) where one body has a secret beside text that an attacker chooses, anew for each of
thousands of requests, which the victim's browser sends with the victim's rights. Here a request's text is repeated only
in answers to POST and in errors. And browsers send no key of this server's by themselves: there are no cookies.
"""

import asyncio
import gzip

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LEAST_BYTES = 1024  # a shorter body is one packet either way
LONG_BYTES = 1 << 18  # a longer one is compressed on a thread: it would hold up others' streams for milliseconds
_LEVEL = 5
_JSON = "application/json"


def accepts_gzip(header: str) -> bool:
    """Return whether a client takes gzip. header: its `Accept-Encoding`, words separated by commas; one with `q=0` is
    refused, and `*` stands for those that are not named."""
    wanted: dict[str, bool] = {}
    for word in header.lower().split(","):
        name, _, options = word.partition(";")
        key, _, weight = options.partition("=")
        wanted[name.strip()] = key.strip() != "q" or _is_positive(weight.strip())
    return wanted.get("gzip", wanted.get("*", False))


def compressed(body: bytes) -> bytes:
    """Return the body as gzip. The same body always gives the same bytes."""
    return gzip.compress(body, _LEVEL, mtime=0)


class Compression:
    """A layer that compresses answers with gzip, for clients that take it: those to GET and HEAD with status 200 that
    are JSON and come in one piece."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):  # HEAD has the headers of GET
            await self._app(scope, receive, send)
            return
        takes_gzip = accepts_gzip(Headers(scope=scope).get("accept-encoding", ""))
        held: Message | None = None  # the beginning of an answer that may be compressed, until its body comes

        async def send_smaller(message: Message) -> None:
            nonlocal held
            if message["type"] == "http.response.start" and _may_be_compressed(message):
                MutableHeaders(scope=message).add_vary_header("accept-encoding")
                if takes_gzip:
                    held = message
                    return
            elif message["type"] == "http.response.body" and held is not None:
                start, held = held, None
                message = await _smaller(start, message)
                await send(start)
            await send(message)

        await self._app(scope, receive, send_smaller)


def _may_be_compressed(start: Message) -> bool:
    headers = Headers(scope=start)
    return (
        start["status"] == 200
        and headers.get("content-type", "").partition(";")[0].strip() == _JSON
        and "content-encoding" not in headers
    )


async def _smaller(start: Message, message: Message) -> Message:
    """Return the message with its body compressed, and change the headers in `start`; the message as it is if its body
    is short or only a part."""
    body = message.get("body", b"")
    if message.get("more_body", False) or len(body) < LEAST_BYTES:
        return message
    small = compressed(body) if len(body) <= LONG_BYTES else await asyncio.to_thread(compressed, body)
    headers = MutableHeaders(scope=start)
    headers["content-encoding"] = "gzip"
    headers["content-length"] = str(len(small))
    return {**message, "body": small}


def _is_positive(weight: str) -> bool:
    try:
        return float(weight) > 0
    except ValueError:
        return False
