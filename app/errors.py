"""Defines the API's errors and turns exceptions into one envelope: {"error": {"message", "type", "param", "code"}}."""

import re
from collections.abc import Mapping, Sequence

import msgspec
from fastapi import FastAPI, Request
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Match

from reprise.engine.process.client import EngineUnavailable

OVERLOADED_HEADER = "x-reprise-overloaded"  # marks a refusal by a server with too many turns, not by one that drains

MAX_NAMES, MAX_NAME_CHARS = 8, 200  # names of models in a message, and how much of each

_TYPES = {401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 429: "rate_limit_error"}

_UNION_TAG = re.compile(r"(?:list|dict|literal|function-[a-z]+|nullable)\[")
ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_THEY = {"prompt": "prompts"}  # parameters whose names are no plural


class ApiError(Exception):
    """An error that is reported to the client. `message` never contains internals."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        anthropic_message: str = "",
    ) -> None:
        """Set up. anthropic_message: the message for clients of Anthropic's API, if they look for other words in it;
        empty: it is `message`."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.anthropic_message = anthropic_message
        self.type = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def anthropic_body(self) -> bytes:
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        message = self.anthropic_message or self.message
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})

    def response(self, path: str = "") -> Response:
        """Return the error as a response, in the form of the API that `path` belongs to."""
        body = self.anthropic_body() if path.startswith(ANTHROPIC_PATH) else self.body()
        return Response(body, self.status, headers=self.headers, media_type="application/json")


class ClientGone(Exception):
    """The client has closed the connection, or has not read its answer for too long. No answer can be sent."""


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, code=code, param=param)


def invalid_grammar(problem: str, param: str) -> ApiError:
    """Return the error for a grammar that passed the checks here but that the engine cannot follow. param: the request
    field that asks for it."""
    if "limits." in problem:  # the library's own limit, which is no setting
        problem = "it would be too costly to follow"
    return invalid(f"Invalid '{param}': {problem[:300]}.", param, "invalid_schema")


def model_not_found(name: str, known: Sequence[str]) -> ApiError:
    """Return the error for a model name that is not served. known: the names of the served model."""
    shown = ", ".join(f"'{one[:MAX_NAME_CHARS]}'" for one in known[:MAX_NAMES])
    more = f" and {len(known) - MAX_NAMES} more" if len(known) > MAX_NAMES else ""
    message = f"The model '{name[:MAX_NAME_CHARS]}' does not exist; this server has {shown}{more}."
    return ApiError(404, message, code="model_not_found", param="model")


# The errors of prompts that are too long say so in the words of OpenAI and Anthropic. Agents look for these words in
# the text of an error, and shorten the conversation when they find them.


def context_length_exceeded(window: int, prompt_tokens: int | None, *, param: str = "messages") -> ApiError:
    """Return the error for a prompt that exceeds the window. prompt_tokens: None if too many to be counted. param: the
    request field that holds the prompt."""
    given = f"your {_THEY.get(param, param)} have {prompt_tokens or 'many more'} tokens"
    return _too_long(window, given, "Please shorten them.", prompt_tokens, param)


def cannot_be_shortened(window: int, what: str) -> ApiError:
    """Return the error for a request that does not fit the window even if its earliest history is dropped. what: the
    part that may not be dropped, with its verb ("... is")."""
    given = f"the earliest history would be dropped to make room, but {what} too long for it"
    return _too_long(window, given, "Please shorten that.", None, "messages")


def _too_long(window: int, given: str, advice: str, prompt_tokens: int | None, param: str) -> ApiError:
    code = "context_length_exceeded"
    return ApiError(
        400,
        f"This model's maximum context length is {window} tokens; {given} ({code}). {advice}",
        code=code,
        param=param,
        anthropic_message=_prompt_is_too_long(window, prompt_tokens),
    )


def _prompt_is_too_long(limit: int, prompt_tokens: int | None) -> str:
    return f"prompt is too long: {prompt_tokens or f'more than {limit}'} tokens > {limit} maximum"


def too_many_requests(limit: int, *, retry_after_s: float, headers: Mapping[str, str]) -> ApiError:
    """Return the error for a request with which its tenant would have more than `limit` answers running or waiting."""
    message = f"You would have more answers under way than you may ({limit}); try again when one of them is done."
    return ApiError(429, message, code="rate_limit_exceeded", headers={**headers, **_retry_after(retry_after_s)})


def too_fast(what: str, limit: int, *, retry_after_s: float, headers: Mapping[str, str]) -> ApiError:
    """Return the error for a key that has used up what it may have a minute. what: "requests" or "tokens". limit: how
    many."""
    message = (
        f"Your key may have {limit} {what} a minute, and has had them; try again in {max(1, round(retry_after_s))} s."
    )
    return ApiError(429, message, code="rate_limit_exceeded", headers={**headers, **_retry_after(retry_after_s)})


def too_many_watchers(*, retry_after_s: float) -> ApiError:
    message = "Too many pages watch the server, or too many with your key."
    return ApiError(429, message, code="rate_limit_exceeded", headers=_retry_after(retry_after_s))


def quota_exceeded(excess: str, *, retry_after_s: float) -> ApiError:
    message = f"Your key keeps {excess}, and none of them can leave; delete or unpin some."
    return ApiError(429, message, code="quota_exceeded", headers=_retry_after(retry_after_s))


def overloaded(
    retry_after_s: float,
    *,
    message: str = "The server is overloaded: its queue is full; try again shortly.",
    headers: Mapping[str, str] | None = None,
) -> ApiError:
    told = {**(headers or {}), **_retry_after(retry_after_s), OVERLOADED_HEADER: "1"}
    return ApiError(503, message, code="overloaded", headers=told)


def with_target(error: ApiError, ttft_ms: float | None) -> ApiError:
    """Return an error that refuses a request for lack of room. If the wait in its `Retry-After` exceeds the request's
    target for the first token (`ttft_ms`), its message says so."""
    wait_s = int(error.headers.get("retry-after", 0))
    if ttft_ms is not None and wait_s * 1e3 > ttft_ms:
        error.message += f" The wait is about {wait_s} s; the request's first token is wanted within {ttft_ms:g} ms."
    return error


def request_timeout(timeout_s: float) -> ApiError:
    message = f"The answer was not complete within the {timeout_s:g} s that the request asked for."
    return ApiError(408, message, code="request_timeout", param="timeout")


def prompt_too_long(limit: int, prompt_tokens: int | None, *, param: str = "messages") -> ApiError:
    """Return the error for a prompt that has too many tokens although its earliest history could be dropped to fit the
    window. limit: a prompt must have fewer tokens than this. prompt_tokens: None if too many to be counted. param: the
    request field that holds the prompt."""
    code = "context_length_exceeded"
    return ApiError(
        400,
        f"This server's maximum context length is {limit} tokens; your {_THEY.get(param, param)} have "
        f"{prompt_tokens or 'many more'} tokens ({code}). Please shorten them.",
        code=code,
        param=param,
        anthropic_message=_prompt_is_too_long(limit, prompt_tokens),
    )


def session_not_found(session_id: str) -> ApiError:
    return ApiError(404, f"No session '{session_id[:200]}' found.", code="session_not_found", param="session_id")


def no_transcript(session_id: str) -> ApiError:
    message = (
        f"No messages of session '{session_id[:200]}' are kept: it is unknown or over, or its turns came from another"
        " server or before messages were kept."
    )
    return ApiError(404, message, code="no_transcript", param="session_id")


def session_error(code: str, session_id: str) -> ApiError:
    """Return the error for the client when the engine refuses a command on a session. code: the engine's error code."""
    match code:
        case "not_found":
            return session_not_found(session_id)
        case "busy":
            return ApiError(
                409, "A request of this session is running; try again when it is done.", code="session_busy"
            )
        case "pin_quota":
            return ApiError(409, "Pinned sessions may hold no more; unpin another one.", code="pin_quota_exceeded")
        case "undeleted":
            message = (
                "The disk would not delete all of it; the server goes on trying. Ask again to hear when it is gone."
            )
            return unavailable(message, code="not_deleted", retry_after_s=5)
        case _:
            return unavailable("The engine cannot do this right now.", code="unavailable", retry_after_s=1)


def engine_timeout() -> ApiError:
    return ApiError(504, "The engine did not reply in time; what was asked for may still be done.", code="timeout")


def unavailable(message: str, *, code: str, retry_after_s: float) -> ApiError:
    return ApiError(503, message, code=code, headers=_retry_after(retry_after_s))


def _retry_after(seconds: float) -> dict[str, str]:
    return {"retry-after": str(max(1, round(seconds)))}


def engine_unavailable(error: EngineUnavailable, state: str) -> ApiError:
    code = state if state in ("loading", "restarting") else "unavailable"
    return unavailable(f"The engine is not available ({state}).", code=code, retry_after_s=error.retry_after_s)


def engine_lost() -> ApiError:
    message = "The engine stopped while this answer was being generated; send the request again."
    return unavailable(message, code="engine_lost", retry_after_s=1)


def stopping() -> ApiError:
    return unavailable("The server is stopping.", code="draining", retry_after_s=1)


def internal_error() -> ApiError:
    return ApiError(500, "The server had an error while answering.", code="internal_error")


def too_deep_call(levels: int) -> ApiError:
    """Return the error for an answer whose call has arguments nested more than `levels` deep, which its client could
    not send back."""
    message = f"The model nested the arguments of a call more than {levels} levels deep; ask again."
    return ApiError(500, message, code="invalid_call")


def from_validation(error: ValidationError) -> ApiError:
    """Return the error for a body that its schema refuses. It names the first invalid field in OpenAI's way:
    messages[0].content."""
    first = _telling(error.errors(include_url=False, include_input=False))
    # A union says which of its types it tried; no client knows those.
    path = [part for part in first["loc"] if not (isinstance(part, str) and _UNION_TAG.match(part))]
    if named := first.get("ctx", {}).get("param"):
        path.append(named)
    param = ""
    for part in path:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else str(part)
    param, problem = param[:200], first["msg"][:500]
    if first["type"] == "unsupported":
        return invalid(f"{problem}.", param, "unsupported_parameter")
    if first["type"] == "missing":
        return invalid(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    if first["type"] == "model_type":  # pydantic names a class of ours
        problem = "Input should be an object"
    return invalid(f"Invalid '{param}': {problem}." if param else f"{problem}.", param or None)


def _telling(errors: Sequence[ErrorDetails]) -> ErrorDetails:
    """Return the error to report. That is the first one; where a union has tried several types, the one of the type
    that matched furthest: [5, -1] is not a text, but a list of numbers with a wrong one."""
    where = errors[0]["loc"]
    place = next((n for n, part in enumerate(where) if isinstance(part, str) and _UNION_TAG.match(part)), None)
    if place is None:
        return errors[0]
    tried: dict[int | str, list[ErrorDetails]] = {}
    for error in errors:
        if error["loc"][:place] == where[:place] and len(error["loc"]) > place:
            tried.setdefault(error["loc"][place], []).append(error)
    return min(tried.values(), key=lambda found: (-len(found[0]["loc"]), len(found)))[0]


def install_handlers(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Have the app answer ApiError, and the HTTPException of routing, in the error envelope. routes: all routes of the
    app."""

    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response(request.url.path)

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        headers = dict(error.headers or {})
        if error.status_code == 404:
            api_error = ApiError(404, f"Unknown URL: {request.method} {request.url.path[:200]}", code="unknown_url")
        elif error.status_code == 405:
            found = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
            methods = {method for route in found for method in getattr(route, "methods", ())}
            # Routing names those of the first route alone, and HEAD is answered wherever GET is.
            is_of_browser = "access-control-request-method" in request.headers  # it asks for another site's page
            methods |= {"HEAD"} if "GET" in methods else set()
            methods |= set() if request.method == "OPTIONS" and is_of_browser else {"OPTIONS"}
            headers = {"allow": ", ".join(sorted(methods))}
            if request.method == "OPTIONS" and not is_of_browser:  # HAProxy asks so whether a server is there
                return Response(status_code=204, headers=headers)
            message = f"Method {request.method[:20]} is not allowed for {request.url.path[:200]}."
            api_error = ApiError(405, message, code="method_not_allowed", headers=headers)
        else:
            api_error = ApiError(error.status_code, str(error.detail)[:500], headers=headers)
        return api_error.response(request.url.path)

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_exception)
