"""/v1/conversations: stored items that later responses continue. Each conversation is a session too."""

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from reprise.app.api.calls import body_of, note_losses
from reprise.app.api.operation import described
from reprise.app.api.responses.as_chat import new_id, with_ids
from reprise.app.api.responses.response_service import not_found
from reprise.app.api.responses.route import ItemPage, listed, page_of, responses_of
from reprise.app.conversations.response_store import NotStored, StoredConversation, TooLong
from reprise.app.errors import ApiError, invalid
from reprise.app.schemas.answers.responses import ConversationObject, ItemList, OutputItem
from reprise.app.schemas.answers.shared import DeletedObject
from reprise.app.schemas.past.parts import Losses
from reprise.app.schemas.responses import ConversationRequest, Item, ItemsRequest

router = APIRouter()


@router.post("/v1/conversations", **described("Create a conversation", ConversationObject, body=ConversationRequest))
async def create_conversation(request: Request) -> Response:
    """A conversation is also a session of the same name."""
    body, headers = await body_of(request, ConversationRequest)
    items = await _new_items(request, body.items or [], headers)
    store = responses_of(request).store
    try:
        made = await store.create(request.state.tenant, new_id("conv"), body.metadata or {}, items)
    except TooLong:
        raise _too_many() from None
    except NotStored:
        raise ApiError(503, "Conversations cannot be stored right now.", code="unavailable") from None
    return Response(msgspec.json.encode(_describe(made)), headers=headers, media_type="application/json")


@router.get("/v1/conversations/{conversation_id}", **described("Get a conversation", ConversationObject))
async def get_conversation(request: Request, conversation_id: str) -> dict[str, Any]:
    try:
        return _describe(await responses_of(request).store.conversation(request.state.tenant, conversation_id))
    except NotStored:
        raise not_found("conversation", conversation_id) from None


@router.post(
    "/v1/conversations/{conversation_id}",
    **described("Change a conversation's metadata", ConversationObject, body=ConversationRequest),
)
async def update_conversation(request: Request, conversation_id: str) -> Response:
    body, headers = await body_of(request, ConversationRequest)
    try:
        made = await responses_of(request).store.update(request.state.tenant, conversation_id, body.metadata or {})
    except NotStored:
        raise not_found("conversation", conversation_id) from None
    return Response(msgspec.json.encode(_describe(made)), headers=headers, media_type="application/json")


@router.delete("/v1/conversations/{conversation_id}", **described("Delete a conversation", DeletedObject))
async def delete_conversation(request: Request, conversation_id: str) -> dict[str, Any]:
    try:
        await responses_of(request).items.forget(request.state.tenant, conversation_id)
    except NotStored:
        raise not_found("conversation", conversation_id) from None
    return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}


@router.get(
    "/v1/conversations/{conversation_id}/items",
    **described("List a conversation's items", ItemList, query=ItemPage),
)
async def list_items(request: Request, conversation_id: str) -> dict[str, Any]:
    page = page_of(request)
    return listed(await _items(request, conversation_id), page)


@router.post(
    "/v1/conversations/{conversation_id}/items",
    **described("Add items to a conversation", ItemList, body=ItemsRequest),
)
async def add_items(request: Request, conversation_id: str) -> Response:
    body, headers = await body_of(request, ItemsRequest)
    items = await _new_items(request, body.items, headers)
    try:
        await responses_of(request).items.append(request.state.tenant, conversation_id, items)
    except NotStored:
        raise not_found("conversation", conversation_id) from None
    except TooLong:
        raise _too_many() from None
    first, last = items[0]["id"], items[-1]["id"]
    answer = {"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": False}
    return Response(msgspec.json.encode(answer), headers=headers, media_type="application/json")


@router.get("/v1/conversations/{conversation_id}/items/{item_id}", **described("Get an item", OutputItem))
async def get_item(request: Request, conversation_id: str, item_id: str) -> dict[str, Any]:
    found = next((item for item in await _items(request, conversation_id) if item["id"] == item_id), None)
    if found is None:
        raise not_found("item", item_id)
    return found


@router.delete("/v1/conversations/{conversation_id}/items/{item_id}", **described("Delete an item", ConversationObject))
async def delete_item(request: Request, conversation_id: str, item_id: str) -> dict[str, Any]:
    await _items(request, conversation_id)  # raises 404 if there is no such conversation
    try:
        return _describe(await responses_of(request).items.delete_item(request.state.tenant, conversation_id, item_id))
    except NotStored:
        raise not_found("item", item_id) from None


async def _new_items(request: Request, items: Sequence[Item], headers: dict[str, str]) -> list[dict[str, Any]]:
    """Return items in the form in which they are stored. headers: of the answer, gets the names of what cannot be read.
    Raises ApiError 404."""
    losses = Losses()
    stored = await responses_of(request).stored(request.state.tenant, items, [], losses)
    headers |= note_losses(request, losses.names)
    return with_ids(stored, lambda kind, _: new_id(kind))


async def _items(request: Request, conversation_id: str) -> list[dict[str, Any]]:
    try:
        return await responses_of(request).items.items(request.state.tenant, conversation_id)
    except NotStored:
        raise not_found("conversation", conversation_id) from None


def _describe(conversation: StoredConversation) -> dict[str, Any]:
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": conversation.created,
        "metadata": conversation.metadata,
    }


def _too_many() -> ApiError:
    return invalid("A conversation has at most 4096 items, and no more than this server can store.", "items")
