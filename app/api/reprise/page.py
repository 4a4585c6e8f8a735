"""GET /, /docs and /page/...: the chat page and the API documentation for people. Files are read once, at start; those
below `vendor` are other people's, see its manifest. The headers forbid the browser to load anything from another
origin."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

from reprise.app.http.compression import accepts_gzip, compressed

DIRECTORY = Path(__file__).resolve().parent.parent.parent / "page"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",  # licences
}
HEADERS = {
    # No inline script or style, no markup from strings, no frames, nothing from elsewhere.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-cache",  # the browser revalidates each time and gets 304 unless the file has changed
}

router = APIRouter()


@dataclass(frozen=True, slots=True)
class File:
    body: bytes
    small: bytes  # the body as gzip
    media_type: str
    digest: str

    def etag(self, *, is_small: bool) -> str:
        """Return the name of this version, which differs with its encoding."""
        return f'"{self.digest}-gzip"' if is_small else f'"{self.digest}"'


def _read(path: Path) -> File:
    body = path.read_bytes()
    return File(body, compressed(body), TYPES[path.suffix], hashlib.sha256(body).hexdigest()[:32])


FILES = {
    path.relative_to(DIRECTORY).as_posix(): _read(path) for path in sorted(DIRECTORY.rglob("*")) if path.suffix in TYPES
}


# A path -> its file. No path from a request reaches the file system.
PATHS = {
    "/": FILES["index.html"],
    "/docs": FILES["docs.html"],
    **{f"/page/{name}": file for name, file in FILES.items()},
}


@router.api_route("/", methods=["GET", "HEAD"])
@router.api_route("/docs", methods=["GET", "HEAD"])
@router.api_route("/page/{name:path}", methods=["GET", "HEAD"])
async def file(request: Request) -> Response:
    """Answers with a file of the page. A gateway of a fleet serves these files too."""
    found = PATHS.get(request.scope["path"])
    if found is None:
        raise HTTPException(404)
    is_small = accepts_gzip(request.headers.get("accept-encoding", "")) and len(found.small) < len(found.body)
    etag = found.etag(is_small=is_small)
    headers = {**HEADERS, "etag": etag, "vary": "accept-encoding"}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    if is_small:
        headers["content-encoding"] = "gzip"
    return Response(found.small if is_small else found.body, headers=headers, media_type=found.media_type)
