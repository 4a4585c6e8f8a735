"""Reads a request body and validates it, within limits of size, time and depth."""

import asyncio
import re
from collections.abc import Iterator
from typing import Any, Protocol, Self, TypeVar

import msgspec
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from reprise.app.errors import ApiError, ClientGone, from_validation, invalid
from reprise.app.http.content_encoding import decoder_of
from reprise.app.schemas.fields import is_deeper
from reprise.app.schemas.unknown import unknown_within
from reprise.app.settings.sections import LimitSettings

MAX_NAMED_FIELDS = 10
MAX_NAME_CHARS = 80  # shown of a name in the warning header
_JSON_TYPE = re.compile(r"application/(?:[a-z0-9.+-]+\+)?json\s*(?:;|$)", re.IGNORECASE)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_HIGH, _LOW = rb"u[dD][89abAB][0-9a-fA-F]{2}", rb"u[dD][c-fC-F][0-9a-fA-F]{2}"
_PAIR, _HALF = rb"(?:" + _HIGH + rb"\\" + _LOW + rb")", rb"(?:" + _HIGH + rb"(?!\\" + _LOW + rb")|" + _LOW + rb")"
# Begins with the first backslash of several; the last of an odd number begins an escape. Takes whole runs at once: a
# body may consist of them.
_HALVES = re.compile(
    rb"\\(?<!\\\\)(?P<backslashes>(?:\\\\)*+)"
    rb"(?:" + _PAIR + rb"(?:\\" + _PAIR + rb")*+|(?P<halves>" + _HALF + rb"(?:\\" + _HALF + rb")*+))"
)
_ESCAPE_CHARS = 6
BODY_TIMEOUT_S = 30.0  # for a client to send its body
MAX_LEVELS = 64  # deepest nesting of a body, apart from arguments of calls
MAX_CALL_LEVELS = 128  # deepest nesting of a call's arguments, which a model chooses and a client cannot shorten
MAX_SCHEMA_LEVELS, MAX_SCHEMA_BYTES = 32, 65_536  # deepest and longest JSON schema of an answer
MAX_CHOICES, _MAX_LOGPROBS, _MAX_MESSAGES, _MAX_STOPS, _MAX_TOOLS = 128, 20, 4096, 16, 1024
MAX_NUMBERS = {"n": MAX_CHOICES, "logprobs": _MAX_LOGPROBS, "top_logprobs": _MAX_LOGPROBS}
"""Maps a field to the largest number allowed in it."""
MAX_ITEMS = {
    **dict.fromkeys(("messages", "input", "items"), _MAX_MESSAGES),
    **dict.fromkeys(("stop", "stop_sequences"), _MAX_STOPS),
    "tools": _MAX_TOOLS,
}
"""Maps a field to the largest number of items allowed in it."""


class RequestModel(Protocol):
    @classmethod
    def model_validate(cls, obj: object) -> Self: ...

    @classmethod
    def settled(cls, body: dict[str, Any]) -> tuple[dict[str, Any], list[str]]: ...


T = TypeVar("T", bound=RequestModel)


async def parse_body(request: Request, model: type[T], limits: LimitSettings) -> tuple[T, list[str]]:
    """Return (parsed request, names of its fields and parts that have no effect). Raises ApiError or ClientGone."""
    return parse_data(await read_body(request, max_bytes=limits.body_bytes), model)


def parse_data(data: bytes, model: type[T]) -> tuple[T, list[str]]:
    """Return (parsed request, names of its fields and parts that have no effect) from the bytes of a body. Raises
    ApiError."""
    body = parse_json(data)
    check_body(body)
    body, lost = model.settled(body)
    try:
        parsed = model.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from None
    # After validation, so that an object has the fields that its type says.
    return parsed, list(dict.fromkeys([*lost, *unknown_within(model, body)]))


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """Read a body whose content type is JSON. Raises ApiError or ClientGone."""
    # Web pages may send other content types to a loopback port without permission, but not JSON.
    if not _JSON_TYPE.match(request.headers.get("content-type", "")):
        raise ApiError(415, "The content type must be application/json.", code="unsupported_media_type")
    return await read_bytes(request, max_bytes=max_bytes)


async def read_bytes(request: Request, *, max_bytes: int) -> bytes:
    """Read a body of any type, and decompress it. max_bytes: the most that it may have, as sent and also once
    decompressed. Raises ApiError, or ClientGone."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 15 or int(declared) > max_bytes):
        raise _too_large(max_bytes)
    decoder = decoder_of(request.headers.get("content-encoding", ""))
    body, num_read = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                num_read += len(chunk)
                body += chunk if decoder is None else decoder.push(chunk, max_bytes + 1 - len(body))
                # Counted while reading, because a chunked body declares no length, nor a compressed one its own.
                if max(num_read, len(body)) > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError:
        raise ApiError(408, f"No complete request body within {BODY_TIMEOUT_S:g} s.", code="request_timeout") from None
    except ClientDisconnect:
        raise ClientGone from None
    if decoder is not None:
        decoder.finish()
    return bytes(body)


def _too_large(max_bytes: int) -> ApiError:
    message = f"The request body is larger than {max_bytes} bytes (limits.body_bytes)."
    return ApiError(413, message, code="request_too_large")


def parse_json(data: bytes) -> dict[str, object]:
    """Return the JSON object in `data`. Lone surrogates, which clients send that have cut a text inside an emoji,
    become U+FFFD. Raises ApiError for anything else: bad UTF-8, NaN, or more than 200 levels."""
    try:
        try:
            body = from_json(data.removeprefix(_BYTE_ORDER_MARK), allow_inf_nan=False)
        except ValueError:
            body = from_json(mended(data), allow_inf_nan=False)
    except ValueError as error:
        raise invalid(f"The body is not valid JSON: {str(error)[:200]}.", code="invalid_json") from None
    if not isinstance(body, dict):
        raise invalid("The body must be a JSON object.", code="invalid_json")
    return body


def mended(data: bytes) -> bytes:
    """Return JSON without a byte order mark, and with U+FFFD for each lone surrogate. Gateways read bodies in this way
    too, because a conversation must have the same name everywhere."""
    return _HALVES.sub(_whole, data.removeprefix(_BYTE_ORDER_MARK))


def _whole(escapes: re.Match[bytes]) -> bytes:
    """Return escapes of whole characters as they are, and U+FFFD for each half of one."""
    if escapes["halves"] is None:
        return escapes[0]
    return escapes["backslashes"] + rb"\ufffd" * ((len(escapes["halves"]) + 1) // _ESCAPE_CHARS)


def check_body(body: dict[str, object]) -> None:
    """Check the limits of a body that types and ranges in a schema cannot express, before anything is built from it.
    Wrong types are left to the schema. Raises ApiError 400."""
    arguments = list(_arguments(body))
    if is_deeper(arguments, MAX_CALL_LEVELS + 1):
        raise invalid(f"The arguments of a call have more than {MAX_CALL_LEVELS} levels.", code="invalid_json")
    if is_deeper(body, MAX_LEVELS, but=arguments):
        raise invalid(f"The body has more than {MAX_LEVELS} levels.", code="invalid_json")
    for name, most in MAX_NUMBERS.items():
        value = body.get(name)
        if type(value) is int and value > most:
            raise _too_much(name, f"at most {most}")
    for name, most in MAX_ITEMS.items():
        value = body.get(name)
        if isinstance(value, list) and len(value) > most:
            raise _too_much(name, f"at most {most} items")
    for name, schema in _schemas(body):
        if is_deeper(schema, MAX_SCHEMA_LEVELS):
            raise _too_much(name, f"schemas of at most {MAX_SCHEMA_LEVELS} levels")
        if len(msgspec.json.encode(schema)) > MAX_SCHEMA_BYTES:
            raise _too_much(name, f"schemas of at most {MAX_SCHEMA_BYTES} bytes")


def _too_much(param: str, allowed: str) -> ApiError:
    return invalid(f"Invalid '{param}': this server takes {allowed}.", param)


def _schemas(body: dict[str, object]) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the JSON schemas of answers in a body, each with the name of the field that holds it. Those of tools are
    bounded by the body alone, because agents bring long ones."""
    found: list[tuple[str, object]] = [
        ("response_format", _at(body, "response_format", "json_schema", "schema")),
        ("structured_outputs", _at(body, "structured_outputs", "json")),
        ("guided_json", body.get("guided_json")),
        ("text", _at(body, "text", "format", "schema")),
        ("output_config", _at(body, "output_config", "format", "schema")),
    ]
    yield from ((name, schema) for name, schema in found if isinstance(schema, dict))


def _arguments(body: dict[str, object]) -> Iterator[dict[str, object]]:
    """Yield the arguments of a history's calls that are objects, in all dialects."""
    for field in ("messages", "input", "items"):
        entries = body.get(field)
        for entry in entries if isinstance(entries, list) else ():
            content, calls = _at(entry, "content"), _at(entry, "tool_calls")
            found = [
                _at(entry, "arguments"),
                *(_at(block, "input") for block in (content if isinstance(content, list) else ())),
                *(_at(call, "function", "arguments") for call in (calls if isinstance(calls, list) else ())),
            ]
            yield from (value for value in found if isinstance(value, dict))


def _at(value: object, *path: str) -> object:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def warning_header(names: list[str]) -> dict[str, str]:
    """Return the `Warning` header that names what had no effect; {} if `names` is empty."""
    if not names:
        return {}
    shown = ", ".join(plain_name(name) for name in names[:MAX_NAMED_FIELDS])
    more = f", and {len(names) - MAX_NAMED_FIELDS} more" if len(names) > MAX_NAMED_FIELDS else ""
    return {"warning": f'299 - "ignored request fields: {shown}{more}"'}


def plain_name(name: str) -> str:
    """Return a name that a client has sent, shortened and with "?" for characters that headers and logs cannot hold."""
    return re.sub(r"[^A-Za-z0-9_.\-]", "?", name[:MAX_NAME_CHARS])
