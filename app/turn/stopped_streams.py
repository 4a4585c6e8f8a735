"""Makes a prompt wait until an answer that its client has just stopped is recorded.

Some clients hang up in the middle of an answer, and at once send its beginning back in their next request. The tokens
of such an answer are recorded when its stream closes. A prompt that is prepared before that would be tokenized anew,
and the KV of the answer would be lost.
"""

import asyncio
from collections.abc import Iterable, Sequence

from reprise.app.conversations.prepared_prompt import PreparedPrompt
from reprise.app.schemas.chat import ChatCompletionRequest
from reprise.app.turn.generation import Generation

CLOSING_S = 1.0  # a stream whose client has hung up closes within this; one that goes on is not waited for


def sent_back(
    under_way: Iterable[Generation], request: ChatCompletionRequest, prompt: PreparedPrompt
) -> list[Generation]:
    """Return those of the generations `under_way` whose answer a client may have stopped and sent back as the last
    answer of this request: they have the prompt that this answer has, and their text so far begins with it."""
    if not prompt.answered:
        return []
    said = next(message.content for message in reversed(request.messages) if message.role == "assistant")
    return [
        generation
        for generation in under_way
        if said and generation.prompt.chain == prompt.answered and generation.may_have_said(said)
    ]


async def wait_closed(generations: Sequence[Generation]) -> None:
    """Wait until the answers of these generations are recorded, at most CLOSING_S."""
    closing = [asyncio.create_task(generation.closed.wait()) for generation in generations]
    try:
        await asyncio.wait(closing, timeout=CLOSING_S)
    finally:
        for task in closing:
            task.cancel()
