"""/v1/messages: Anthropic's API, for the clients that speak it."""

from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from reprise.app.api.calls import body_of, caller_of, note_losses, seal_of, service_of, stream
from reprise.app.api.chat.answers import cache_header
from reprise.app.api.messages.answers import MessageFrames, message
from reprise.app.api.messages.as_chat import chat_request
from reprise.app.api.operation import described
from reprise.app.api.thought_seal import ThoughtSeal
from reprise.app.http.event_stream import until_disconnect
from reprise.app.schemas.answers.messages import AnthropicMessage, MessageEvent
from reprise.app.schemas.answers.shared import InputTokens
from reprise.app.schemas.messages import CountTokensRequest, MessagesRequest
from reprise.app.schemas.past.parts import Losses
from reprise.app.turn.generation import Generation

router = APIRouter()


@router.post(
    "/v1/messages",
    **described("Answer a chat in Anthropic's form", AnthropicMessage, body=MessagesRequest, events=MessageEvent),
)
async def create_message(request: Request) -> Response:
    """`usage` counts cached tokens apart, as Anthropic does. The key may come as `x-api-key` or `api-key`."""
    body, headers = await body_of(request, MessagesRequest)
    seal, losses = seal_of(request), Losses()
    generation = await service_of(request).generate(chat_request(body, seal, losses), caller_of(request))
    headers |= {**note_losses(request, losses.names), **generation.limit_headers, "x-session-id": generation.session_id}
    if body.stream:
        return stream(request, generation, MessageFrames(generation, seal), headers)
    answer = await until_disconnect(request.receive, _complete(generation, seal))
    headers |= cache_header([generation])
    return Response(msgspec.json.encode(answer), headers=headers, media_type="application/json")


@router.post(
    "/v1/messages/count_tokens",
    **described("Count a message's prompt tokens", InputTokens, body=CountTokensRequest),
)
async def count_tokens(request: Request) -> Response:
    body, headers = await body_of(request, CountTokensRequest)
    losses = Losses()
    ids = await service_of(request).chat_tokens(chat_request(body, seal_of(request), losses), caller_of(request))
    headers |= note_losses(request, losses.names)
    return Response(msgspec.json.encode({"input_tokens": len(ids)}), headers=headers, media_type="application/json")


async def _complete(generation: Generation, seal: ThoughtSeal) -> dict[str, Any]:
    async with aclosing(generation):
        async for _ in generation:
            pass
        return message(generation, seal)
