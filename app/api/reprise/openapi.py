"""GET /openapi.json."""

import functools

import msgspec
from fastapi import APIRouter, Response

from app.api.openapi import describe
from app.version import version

router = APIRouter()


@router.get("/openapi.json")
async def openapi() -> Response:
    return Response(_document(), media_type="application/json")


@functools.cache
def _document() -> bytes:
    return msgspec.json.encode(describe(version()))
