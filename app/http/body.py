"""Reads a request body and validates it, within limits of size, time and depth."""

import asyncio
import re
from typing import Protocol, Self, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from app.errors import ApiError, ClientGone, from_validation, invalid
from app.http.body_limits import check_body
from app.settings.settings import LimitSettings

MAX_NAMED_FIELDS = 10
_JSON_TYPE = re.compile(r"application/(?:[a-z0-9.+-]+\+)?json\s*(?:;|$)", re.IGNORECASE)


class RequestModel(Protocol):
    @classmethod
    def model_validate(cls, obj: object) -> Self: ...

    @classmethod
    def ignored(cls, body: dict[str, object]) -> list[str]: ...


T = TypeVar("T", bound=RequestModel)


async def parse_body(request: Request, model: type[T], limits: LimitSettings) -> tuple[T, dict[str, str]]:
    """Return the parsed request and the headers that its answer must carry. Raises ApiError or ClientGone."""
    body = parse_json(await read_body(request, max_bytes=limits.body_bytes, timeout_s=limits.body_timeout_s))
    check_body(body, limits)
    try:
        parsed = model.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from None
    ignored = model.ignored(body)
    return parsed, {"warning": _warning(ignored)} if ignored else {}


async def read_body(request: Request, *, max_bytes: int, timeout_s: float) -> bytes:
    """Read a body that says it is JSON. Raises ApiError or ClientGone."""
    # Web pages may send other content types to a loopback port without permission, but not JSON.
    if not _JSON_TYPE.match(request.headers.get("content-type", "")):
        raise ApiError(415, "The content type must be application/json.", code="unsupported_media_type")
    return await read_bytes(request, max_bytes=max_bytes, timeout_s=timeout_s)


async def read_bytes(request: Request, *, max_bytes: int, timeout_s: float) -> bytes:
    """Read a body of any type. Raises ApiError or ClientGone."""
    message = f"The request body is larger than {max_bytes} bytes (limits.body_bytes)."
    too_large = ApiError(413, message, code="request_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 15 or int(declared) > max_bytes):
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:  # counted while reading, because a chunked body declares no length
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"No complete request body within {timeout_s:g} s.", code="request_timeout") from None
    except ClientDisconnect:
        raise ClientGone from None
    return bytes(body)


def parse_json(data: bytes) -> dict[str, object]:
    """Raises ApiError for anything but a JSON object: bad UTF-8, lone surrogates, NaN, or more than 200 levels."""
    try:
        body = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise invalid(f"The body is not valid JSON: {str(error)[:200]}.", code="invalid_json") from None
    if not isinstance(body, dict):
        raise invalid("The body must be a JSON object.", code="invalid_json")
    return body


def _warning(names: list[str]) -> str:
    shown = ", ".join(re.sub(r"[^A-Za-z0-9_.\-]", "?", name[:40]) for name in names[:MAX_NAMED_FIELDS])
    more = f", and {len(names) - MAX_NAMED_FIELDS} more" if len(names) > MAX_NAMED_FIELDS else ""
    return f'299 - "ignored request fields: {shown}{more}"'
