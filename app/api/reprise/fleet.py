"""GET /v1/fleet: the other servers of this one's fleet."""

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException

from reprise.app.api.calls import hooks_of, require_admin
from reprise.app.api.operation import described
from reprise.app.errors import from_validation
from reprise.app.schemas.answers.server import Fleet

router = APIRouter()


class FleetPage(BaseModel):
    """Query parameters: how many replicas to show."""

    model_config = ConfigDict(extra="ignore")
    limit: int = Field(1000, ge=1, le=1000)


@router.get("/v1/fleet", **described("Show the replicas of this server's fleet", Fleet, query=FleetPage))
async def fleet(request: Request) -> dict[str, Any]:
    """Return what each replica last said of itself, and the KV in Redis; at a gateway also the turns that it routed,
    the sessions that it moved to another replica, and the answers that it resumed there. 404 on a server that is in no
    fleet. For `server.admin_keys` where there are keys."""
    show = hooks_of(request).overview
    if show is None:
        raise HTTPException(404)
    require_admin(request)
    try:
        page = FleetPage.model_validate(dict(request.query_params))
    except ValidationError as error:
        raise from_validation(error) from None
    return await show(limit=page.limit)
