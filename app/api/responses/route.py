"""/v1/responses: OpenAI's newer API."""

from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reprise.app.api.calls import body_of, caller_of, note_losses, stream
from reprise.app.api.operation import described
from reprise.app.api.responses.response_service import Responses, not_found
from reprise.app.conversations.response_store import NotStored
from reprise.app.errors import from_validation
from reprise.app.http.event_stream import until_disconnect
from reprise.app.schemas.answers.responses import ItemList, ResponseEvent, ResponseObject
from reprise.app.schemas.answers.shared import DeletedObject, InputTokens
from reprise.app.schemas.past.parts import Losses
from reprise.app.schemas.responses import ResponseRequest

router = APIRouter()


class ItemPage(BaseModel):
    """Query parameters of a list. (They arrive as strings, so validation is not strict.)"""

    model_config = ConfigDict(frozen=True, extra="ignore")

    limit: int = Field(20, ge=1, le=100)
    after: Annotated[str, Field(max_length=128)] = ""
    order: Literal["asc", "desc"] = "desc"


def responses_of(request: Request) -> Responses:
    responses: Responses = request.app.state.responses
    return responses


@router.post(
    "/v1/responses",
    **described("Create a response", ResponseObject, body=ResponseRequest, events=ResponseEvent),
)
async def create_response(request: Request) -> Response:
    """OpenAI's Responses, with typed events. Goes on from `previous_response_id` or `conversation`; `background`
    answers at once."""
    body, headers = await body_of(request, ResponseRequest)
    responses, losses = responses_of(request), Losses()
    turn = await responses.begin(body, caller_of(request), losses)
    headers |= {
        **note_losses(request, losses.names),
        **turn.generation.limit_headers,
        "x-session-id": turn.generation.session_id,
    }
    if body.stream:
        return stream(request, turn, turn, headers)
    if body.background:
        answer = await responses.run_in_background(turn)
    else:
        answer = await until_disconnect(request.receive, turn.finish())
    return Response(msgspec.json.encode(answer), headers=headers, media_type="application/json")


@router.post(
    "/v1/responses/input_tokens",
    **described("Count a response's prompt tokens", InputTokens, body=ResponseRequest),
)
async def input_tokens(request: Request) -> Response:
    body, headers = await body_of(request, ResponseRequest)
    losses = Losses()
    count = await responses_of(request).tokens(body, caller_of(request), losses)
    headers |= note_losses(request, losses.names)
    answer = {"object": "response.input_tokens", "input_tokens": count}
    return Response(msgspec.json.encode(answer), headers=headers, media_type="application/json")


@router.get("/v1/responses/{response_id}", **described("Get a stored response", ResponseObject))
async def get_response(request: Request, response_id: str) -> dict[str, Any]:
    return await responses_of(request).get(request.state.tenant, response_id)


@router.delete("/v1/responses/{response_id}", **described("Delete a response", DeletedObject))
async def delete_response(request: Request, response_id: str) -> dict[str, Any]:
    await responses_of(request).delete(request.state.tenant, response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/v1/responses/{response_id}/cancel", **described("Cancel a response in the background", ResponseObject))
async def cancel_response(request: Request, response_id: str) -> dict[str, Any]:
    return await responses_of(request).cancel(request.state.tenant, response_id)


@router.get(
    "/v1/responses/{response_id}/input_items",
    **described("List a response's input items", ItemList, query=ItemPage),
)
async def list_input_items(request: Request, response_id: str) -> dict[str, Any]:
    page, responses, tenant = page_of(request), responses_of(request), request.state.tenant
    try:
        items = await responses.records.input_items(tenant, response_id)
    except NotStored:
        raise not_found("response", await responses.lost_of(tenant, response_id)) from None
    return listed(items, page)


def page_of(request: Request) -> ItemPage:
    """Return the validated query parameters of a list. Raises ApiError 400."""
    try:
        return ItemPage.model_validate(dict(request.query_params))
    except ValidationError as error:
        raise from_validation(error) from None


def listed(items: list[dict[str, Any]], page: ItemPage) -> dict[str, Any]:
    """Return one page of `items`. Raises ApiError 404 if `page.after` names no item."""
    if page.order == "desc":
        items = items[::-1]
    if page.after:
        place = next((n for n, item in enumerate(items) if item["id"] == page.after), None)
        if place is None:
            raise not_found("item", page.after)
        items = items[place + 1 :]
    data = items[: page.limit]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    more = len(items) > len(data)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": more}
