"""POST /v1/chat/completions."""

from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from app.answers import completion
from app.deadline import HEADER as TIMEOUT_HEADER
from app.generation import Generation
from app.requests import parse_body
from app.routes import service_of
from app.schemas import ChatCompletionRequest
from app.streaming import EventStream, until_disconnect

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    service = service_of(request)
    service.require_ready()  # before the body: who is told to come back later should not have to upload first
    server = service.settings.server
    body, headers = await parse_body(
        request, ChatCompletionRequest, max_bytes=server.max_body_bytes, timeout_s=server.body_timeout_s
    )
    generation = await service.generate(
        body,
        tenant=request.state.tenant,
        session_header=request.headers.get("x-session-id"),
        timeout_header=request.headers.get(TIMEOUT_HEADER),
        arrived_s=request.state.arrived_s,
    )
    headers |= {**generation.limit_headers, "x-session-id": generation.prompt.session_id}
    if body.stream:
        return EventStream(
            generation,
            include_usage=body.include_usage,
            headers=headers,
            ping_s=server.ping_s,
            send_timeout_s=server.send_timeout_s,
        )
    answer = await until_disconnect(request.receive, _complete(generation))
    return Response(msgspec.json.encode(answer), headers=headers, media_type="application/json")


async def _complete(generation: Generation) -> dict[str, Any]:
    logprobs: dict[int, list[dict[str, Any]]] = {}
    async with aclosing(generation):
        async for delta in generation:
            if delta.logprobs is not None:
                logprobs.setdefault(delta.choice, []).extend(delta.logprobs)
        return completion(generation, logprobs)
