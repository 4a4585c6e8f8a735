"""POST /v1/completions."""

from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from reprise.app.api.calls import body_of, caller_of, readiness_of, service_of, stream
from reprise.app.api.chat.answers import cache_header
from reprise.app.api.completions.answers import CompletionFrames
from reprise.app.api.operation import described
from reprise.app.errors import invalid
from reprise.app.http.event_stream import until_disconnect
from reprise.app.schemas.answers.completions import Completion
from reprise.app.schemas.completions import CompletionRequest
from reprise.app.turn.generation import Generation
from reprise.app.turn.many_prompts import ManyPrompts
from reprise.app.turn.prepare import Caller, Prompt
from reprise.app.turn.readiness import Readiness
from reprise.app.turn.service import TurnService

router = APIRouter()


@router.post(
    "/v1/completions",
    **described("Continue a text, or score one", Completion, body=CompletionRequest, events=Completion),
)
async def completions(request: Request) -> Response:
    """The prompt may be a text or token ids, or a list of either. `echo` with `logprobs` scores the prompt, which is
    computed anew for it (`miss_reasons.prompt_logprobs`)."""
    body, headers = await body_of(request, CompletionRequest)
    service, caller = service_of(request), caller_of(request)
    prompts = await _prompts(service, readiness_of(request), body, caller)
    combined = ManyPrompts(await _start(service, body, prompts, request))
    first = combined.generations[0]
    headers |= {**first.limit_headers, "x-session-id": first.session_id}
    frames = CompletionFrames(body, prompts, combined)
    if body.stream:
        return stream(request, combined, frames, headers)
    answer = await until_disconnect(request.receive, _complete(combined, frames))
    headers |= cache_header(combined.generations)
    return Response(msgspec.json.encode(answer), headers=headers, media_type="application/json")


async def _prompts(service: TurnService, readiness: Readiness, body: CompletionRequest, caller: Caller) -> list[Prompt]:
    model = readiness.find_model(body.model)
    _, tokenizer = readiness.require()
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    if len(body.prompt) * (body.n or 1) > (limit := service.places.places_of(caller.tenant)):
        raise invalid(f"Invalid 'prompt': this server takes at most {limit} prompts times 'n'.", "prompt")
    if texts:
        special = body.add_special_tokens is not False
        ids = await service.text_tokens(texts, caller, add_special_tokens=special)
        prompts = [Prompt(token_ids, text) for token_ids, text in zip(ids, texts, strict=True)]
    else:
        given = [list(prompt) for prompt in body.prompt if not isinstance(prompt, str)]
        if max(max(token_ids) for token_ids in given) >= model.vocab_size:
            raise invalid(f"Invalid 'prompt': the vocabulary has {model.vocab_size} tokens.", "prompt")
        prompts = [
            Prompt(token_ids, tokenizer.decode(token_ids, skip_special_tokens=False) if body.echo else None)
            for token_ids in given
        ]
    if not all(prompt.token_ids for prompt in prompts):
        raise invalid("Invalid 'prompt': it has no tokens.", "prompt")
    for prompt in prompts:
        if (problem := tokenizer.problem_of_media(prompt.token_ids)) is not None:
            message = f"Invalid 'prompt': {problem}, and this server serves the model's text only."
            raise invalid(message, "prompt", "image_not_supported")
    return prompts


async def _start(
    service: TurnService, body: CompletionRequest, prompts: list[Prompt], request: Request
) -> list[Generation]:
    generations: list[Generation] = []
    try:
        for place, prompt in enumerate(prompts):
            # Only the first prompt keeps the request's session: two at once would be two histories of one conversation.
            caller, asked = caller_of(request, place), body
            if place:
                caller = replace(caller, session_header=None)
                asked = body.model_copy(update={"session_id": None, "prompt_cache_key": None})
            generations.append(await service.complete(asked, prompt, caller))
    except BaseException:
        for generation in generations:
            await generation.aclose()
        raise
    return generations


async def _complete(combined: ManyPrompts, frames: CompletionFrames) -> dict[str, Any]:
    logprobs: dict[int, list[dict[str, Any]]] = {}
    async with aclosing(combined):
        async for delta in combined:
            if delta.logprobs is not None:
                logprobs.setdefault(delta.choice, []).extend(delta.logprobs)
        return frames.answer(logprobs)
