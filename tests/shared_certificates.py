"""Has all clients of httpx in a process share what they know of the machine's certificates.

Every client, even one for a single request to 127.0.0.1, reads all of them: 29 ms of processor time, 7 s in a test that
waits for four servers.
"""

import functools
import os
import ssl
from typing import Any

import certifi

_create = ssl.create_default_context
_shared = functools.cache(_create)


def create(*purpose: Any, **options: Any) -> ssl.SSLContext:
    """Return a context as `ssl.create_default_context` does; always the same one for what httpx asks it."""
    is_asked_by_httpx = options == {"cafile": os.environ.get("SSL_CERT_FILE") or certifi.where()}
    return (_shared if is_asked_by_httpx and not purpose else _create)(*purpose, **options)


def share_certificates() -> None:
    """Have the certificates read once in the whole process."""
    ssl.create_default_context = create
