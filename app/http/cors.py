"""Lets scripts of the pages that the settings name call this server and read its answers."""

from collections.abc import Sequence
from typing import Any

# What a script may read of an answer, besides its body.
EXPOSED_HEADERS = (
    *("x-request-id", "openai-processing-ms", "x-session-id", "x-cache", "x-route", "warning", "retry-after"),
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
)


def cors_options(origins: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of Starlette's CORSMiddleware. origins: those of the pages whose scripts may call this
    server; `*`: any."""
    return {
        "allow_origins": origins,
        "allow_methods": ["GET", "POST", "PATCH", "DELETE"],
        "allow_headers": ["*"],
        # Browsers ask for a public page's requests to a private address; the settings have named the page.
        "allow_private_network": True,
        "expose_headers": EXPOSED_HEADERS,
    }
