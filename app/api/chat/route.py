"""POST /v1/chat/completions."""

from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from reprise.app.api.calls import body_of, caller_of, service_of, stream
from reprise.app.api.chat.answers import Chunks, cache_header, completion
from reprise.app.api.operation import described
from reprise.app.http.event_stream import until_disconnect
from reprise.app.schemas.answers.chat import ChatCompletion, ChatCompletionChunk
from reprise.app.schemas.chat import ChatCompletionRequest
from reprise.app.turn.generation import Generation

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    **described("Answer a chat", ChatCompletion, body=ChatCompletionRequest, events=ChatCompletionChunk),
)
async def chat_completions(request: Request) -> Response:
    body, headers = await body_of(request, ChatCompletionRequest)
    generation = await service_of(request).generate(body, caller_of(request))
    headers |= {**generation.limit_headers, "x-session-id": generation.session_id}
    if body.stream:
        chunks = Chunks(generation, include_usage=body.include_usage, custom=body.custom_names)
        return stream(request, generation, chunks, headers)
    answer = await until_disconnect(request.receive, _complete(generation, body.custom_names))
    headers |= cache_header([generation])
    return Response(msgspec.json.encode(answer), headers=headers, media_type="application/json")


async def _complete(generation: Generation, custom: frozenset[str]) -> dict[str, Any]:
    logprobs: dict[int, list[dict[str, Any]]] = {}
    async with aclosing(generation):
        async for delta in generation:
            if delta.logprobs is not None:
                logprobs.setdefault(delta.choice, []).extend(delta.logprobs)
        return completion(generation, logprobs, custom=custom)
