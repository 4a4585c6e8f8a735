"""Reads the paths that clients make of a base URL and an endpoint: with a slash too many, or with `/v1` missing or
twice."""

import re

from starlette.types import Scope

_WITHOUT_VERSION = re.compile(r"/(?:chat|completions|responses|conversations|messages|models)(?:/|$)")
_SLASHES = re.compile(r"/{2,}")
_NAMED = "/v1/models/"  # before a model's name, which may be a path


def plain_path(path: str) -> str:
    """Return the path of the endpoint that a client means: without superfluous slashes, and with `/v1` exactly once."""
    head, named, name = path.partition(_NAMED)
    plain = _SLASHES.sub("/", head + named)
    if not name:
        plain = plain.rstrip("/") or "/"
    while plain.startswith("/v1/v1/"):
        plain = plain[len("/v1") :]
    return f"/v1{plain}{name}" if _WITHOUT_VERSION.match(plain) else plain + name


def make_plain(scope: Scope) -> None:
    """Replace the path of a request by that of the endpoint that its client means (`plain_path`)."""
    path = scope["path"]
    if (plain := plain_path(path)) != path:
        scope["path"] = plain
        if raw := scope.get("raw_path"):
            scope["raw_path"] = plain_path(raw.decode("latin-1")).encode("latin-1")
