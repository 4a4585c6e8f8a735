"""GET /, /docs and /page/...: the chat page and the API documentation for people. Files are read once, at start; those
below `vendor` are other people's, see its manifest. The headers forbid the browser to load anything from another
origin.

The HTML names files by `/page/VERSION/name`, and they name each other by relative addresses. What lies there never
changes, so a browser asks for it once; VERSION changes with any of them."""

import hashlib
import re
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
FOREVER = "public, max-age=31536000, immutable"
ANY_VERSION = re.compile(r"^/page/[0-9a-f]{12}/")

router = APIRouter()


@dataclass(frozen=True, slots=True)
class File:
    body: bytes
    small: bytes  # the body as gzip
    media_type: str
    digest: str

    def etag(self, *, is_small: bool) -> str:
        """Return the ETag, which differs between the file as it is and its gzip form. is_small: whether the gzip form
        is sent."""
        return f'"{self.digest}-gzip"' if is_small else f'"{self.digest}"'


def _file(body: bytes, media_type: str) -> File:
    return File(body, compressed(body), media_type, hashlib.sha256(body).hexdigest()[:32])


def _read() -> tuple[str, dict[str, File]]:
    """Return the version of the page and its files by their names; the HTML names those of this version."""
    files = {
        path.relative_to(DIRECTORY).as_posix(): _file(path.read_bytes(), TYPES[path.suffix])
        for path in sorted(DIRECTORY.rglob("*"))
        if path.suffix in TYPES
    }
    digests = "".join(f"{name} {file.digest}\n" for name, file in files.items())
    version = hashlib.sha256(digests.encode()).hexdigest()[:12]
    for name, file in files.items():
        if name.endswith(".html"):
            files[name] = _file(file.body.replace(b'"/page/', b'"/page/%s/' % version.encode()), file.media_type)
    return version, files


VERSION, FILES = _read()
CURRENT = f"/page/{VERSION}/"
# A path -> its file. No path from a request reaches the file system.
PATHS = {
    "/": FILES["index.html"],
    "/docs": FILES["docs.html"],
    **{f"/page/{name}": file for name, file in FILES.items()},
}


def find(path: str) -> File | None:
    """Return the file at a path; None if there is none. A path of an older version, as in a page that was opened before
    the server was updated, gives the present file."""
    return PATHS.get(ANY_VERSION.sub("/page/", path))


@router.api_route("/", methods=["GET", "HEAD"])
@router.api_route("/docs", methods=["GET", "HEAD"])
@router.api_route("/page/{name:path}", methods=["GET", "HEAD"])
async def file(request: Request) -> Response:
    """Answers with a file of the page. A gateway of a fleet serves these files too."""
    path = request.scope["path"]
    found = find(path)
    if found is None:
        raise HTTPException(404)
    is_small = accepts_gzip(request.headers.get("accept-encoding", "")) and len(found.small) < len(found.body)
    etag = found.etag(is_small=is_small)
    headers = {**HEADERS, "etag": etag, "vary": "accept-encoding"}
    if path.startswith(CURRENT):
        headers["cache-control"] = FOREVER
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    if is_small:
        headers["content-encoding"] = "gzip"
    return Response(found.small if is_small else found.body, headers=headers, media_type=found.media_type)
