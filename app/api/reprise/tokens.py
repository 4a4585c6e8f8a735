"""POST /tokenize and /detokenize, and the token count of a chat. None of them runs the model."""

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from reprise.app.api.calls import body_of, caller_of, readiness_of, service_of
from reprise.app.api.operation import described
from reprise.app.errors import from_validation, invalid
from reprise.app.schemas.answers.server import Text, Tokens
from reprise.app.schemas.answers.shared import InputTokens
from reprise.app.schemas.chat import ChatCompletionRequest
from reprise.app.schemas.tokens import DetokenizeRequest, TokenizeRequest

router = APIRouter()


@router.post("/tokenize", **described("Convert a text or a chat to tokens", Tokens, body=TokenizeRequest))
@router.post("/v1/tokenize", **described("Convert a text or a chat to tokens", Tokens, body=TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """Messages become the very ids that a chat request would send; recorded answers keep the ids they were generated
    with."""
    body, headers = await body_of(request, TokenizeRequest)
    service, readiness = service_of(request), readiness_of(request)
    _, tokenizer = readiness.require()
    model = readiness.find_model(body.model)
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        (ids,) = await service.text_tokens([body.prompt], caller_of(request), add_special_tokens=special)
    else:
        names = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
        try:
            chat = ChatCompletionRequest(model=model.name, **{name: getattr(body, name) for name in names})
        except ValidationError as error:
            raise from_validation(error) from None
        ids = await service.chat_tokens(chat, caller_of(request))
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": model.max_context, "tokens": ids, "token_strs": None}
    if body.return_token_strs:
        answer["token_strs"] = [tokenizer.token_text(token_id)[0] for token_id in ids]
    return Response(msgspec.json.encode(answer), headers=headers, media_type="application/json")


@router.post("/detokenize", **described("Convert tokens to text", Text, body=DetokenizeRequest))
@router.post("/v1/detokenize", **described("Convert tokens to text", Text, body=DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    body, headers = await body_of(request, DetokenizeRequest)
    readiness = readiness_of(request)
    _, tokenizer = readiness.require()
    model = readiness.find_model(body.model)
    if body.tokens and max(body.tokens) >= model.vocab_size:
        raise invalid(f"Invalid 'tokens': the vocabulary has {model.vocab_size} tokens.", "tokens")
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
    return Response(msgspec.json.encode({"prompt": text}), headers=headers, media_type="application/json")


@router.post(
    "/v1/chat/completions/input_tokens",
    **described("Count a chat's tokens", InputTokens, body=ChatCompletionRequest),
)
async def chat_input_tokens(request: Request) -> Response:
    body, headers = await body_of(request, ChatCompletionRequest)
    ids = await service_of(request).chat_tokens(body, caller_of(request))
    answer = {"object": "chat.completion.input_tokens", "input_tokens": len(ids)}
    return Response(msgspec.json.encode(answer), headers=headers, media_type="application/json")
