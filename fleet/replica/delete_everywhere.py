"""Carries out a client's DELETE of a session on every replica."""

import asyncio

from reprise.app.errors import ApiError, unavailable
from reprise.fleet.directory import Directory
from reprise.fleet.directory_redis import DirectoryUnavailable
from reprise.fleet.replica.copies import Copies

POLL_S = 0.1  # between two looks whether the others have deleted a session


async def delete_everywhere(
    tenant: str, session_id: str, *, copies: Copies, directory: Directory, timeout_s: float
) -> None:
    """Delete the sessions of an id, with any salt: here, in Redis, and on the other replicas, which learn of it from
    the answers to their beats. timeout_s: how long that may take. Raises ApiError: 404 if no replica has it, 409 while
    a request of it runs here, 503 if not all are known to have deleted it."""
    missing: ApiError | None = None
    try:
        await copies.delete(tenant, session_id)
    except ApiError as error:
        if error.status != 404:
            raise
        missing = error
    try:
        forgetting = await directory.forget(tenant, session_id)
        await copies.let_go(tenant, session_id, forgetting.epoch)
        async with asyncio.timeout(timeout_s):
            waiting = forgetting.waiting
            while waiting:
                await asyncio.sleep(POLL_S)
                waiting = await directory.unacknowledged(forgetting.epoch)
    except (DirectoryUnavailable, TimeoutError):
        message = "The session is deleted here; other servers have not said so yet. Ask again."
        raise unavailable(message, code="not_deleted", retry_after_s=1.0) from None
    if missing is not None and not forgetting.found:
        raise missing
