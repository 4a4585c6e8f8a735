"""Builds OpenAI's text-completion answers from generations."""

from collections.abc import Sequence
from typing import Any

from reprise.app.api.chat.answers import merged_ours, usage_of
from reprise.app.errors import ApiError
from reprise.app.http.event_stream import DONE, PING, event
from reprise.app.schemas.completions import CompletionRequest
from reprise.app.text.token_offsets import TokenOffsets
from reprise.app.turn.answer import Delta
from reprise.app.turn.many_prompts import ManyPrompts
from reprise.app.turn.prepare import Prompt

Entry = dict[str, Any]
"""The log-probability entry of one token, in the form of chat answers."""


class CompletionFrames:
    """A builder of the answer to one completions request, as a whole or as the events of a stream."""

    ping = PING

    def __init__(self, request: CompletionRequest, prompts: Sequence[Prompt], combined: ManyPrompts) -> None:
        self._request = request
        self._prompts = prompts
        self._generations = combined.generations
        first = combined.generations[0]
        self._head: dict[str, Any] = {
            "id": first.request_id,
            "object": "text_completion",
            "created": first.created,
            "model": first.model.name,
            "system_fingerprint": f"fp_{first.model.fingerprint[:16]}",
        }
        self._choices = [
            (prompt, choice) for prompt, generation in zip(prompts, self._generations, strict=True)
            for choice in generation.choices
        ]  # fmt: skip
        self._offsets = [TokenOffsets() for _ in self._choices]
        self._unfinished = len(self._choices)

    def answer(self, logprobs: dict[int, list[Entry]]) -> dict[str, Any]:
        """Return the whole answer once all generations are finished. logprobs: choice -> log probabilities of its
        generated tokens."""
        choices = [self._choice(index, logprobs.get(index)) for index in range(len(self._choices))]
        return {**self._head, "choices": choices, "usage": self._usage(), **merged_ours(self._generations)}

    def _choice(self, index: int, entries: list[Entry] | None) -> dict[str, Any]:
        prompt, choice = self._choices[index]
        text = self._echoed(prompt) + ("" if self._hides_answer else choice.text)
        shown = self._with_prompt(index, prompt, entries) if entries is not None else None
        return {
            "index": index,
            "text": text,
            "logprobs": None if shown is None else _logprobs(shown, text, self._offsets[index]),
            "finish_reason": "length" if self._hides_answer else choice.finish_reason,
        }

    @property
    def _hides_answer(self) -> bool:
        """Whether to drop the answer: max_tokens=0 asks for no token, but the engine generates one."""
        return self._request.max_tokens == 0

    def _echoed(self, prompt: Prompt) -> str:
        return prompt.text or "" if self._request.echo else ""

    def _with_prompt(self, index: int, prompt: Prompt, entries: list[Entry]) -> list[Entry]:
        """Return the log-probability entries of all tokens in a choice's text: the prompt's, if the request has `echo`,
        and `entries`, those of the answer. index: the choice's among those of all prompts. The prompt's first token has
        no probability: nothing precedes it."""
        generated: list[Entry] = [] if self._hides_answer else list(entries)
        if not self._request.echo:
            return generated
        first = self._choices[index - index % (self._request.n or 1)][1]  # all choices of a prompt share its entries
        return [first.token_entry(prompt.token_ids[0]), *(first.prompt_logprobs or ()), *generated]

    def opening(self) -> bytes:
        if not self._request.echo:
            return b""
        return b"".join(self._chunk(index, self._echoed(prompt), None, None) for index, (prompt, _) in
                        enumerate(self._choices))  # fmt: skip

    def delta(self, delta: Delta) -> bytes:
        hidden = self._hides_answer
        reason = delta.finish_reason and ("length" if hidden else delta.finish_reason)
        text = "" if hidden else delta.parts.content
        if hidden and reason is None:
            return b""
        self._unfinished -= reason is not None
        return self._chunk(delta.choice, text, None if hidden else delta.logprobs, reason)

    def closing(self) -> bytes:
        if not self._request.include_usage:
            return DONE
        last = {**self._head, "choices": [], "usage": self._usage(), **merged_ours(self._generations)}
        return event(last) + DONE

    def failed(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n"

    def _chunk(self, index: int, text: str, entries: list[Entry] | None, reason: str | None) -> bytes:
        offsets = self._offsets[index]
        if entries is None:
            offsets.next(text, [])
        logprobs = None if entries is None else _logprobs(list(entries), text, offsets)
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        more: dict[str, Any] = {"usage": None} if self._request.include_usage else {}
        if reason is not None and self._unfinished == 0 and not self._request.include_usage:
            more = merged_ours(self._generations)
        return event({**self._head, "choices": [choice], **more})

    def _usage(self) -> dict[str, Any]:
        return usage_of(self._generations, generated=0 if self._hides_answer else None)


def _logprobs(entries: list[Entry], text: str, offsets: TokenOffsets) -> dict[str, Any]:
    """Return log-probabilities in OpenAI's older form. text: what comes with these tokens. offsets: of the choice, told
    of all text and tokens before them."""
    tokens = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        tokens.append(_name(entry))
        values.append(entry["logprob"])
        if entry["logprob"] is None:
            tops.append(None)
        else:
            # As in OpenAI's answers, the chosen token is always listed too.
            tops.append({_name(other): other["logprob"] for other in (*entry["top_logprobs"], entry)})
    places = offsets.next(text, [bytes(entry["bytes"]) for entry in entries])
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": places}


def _name(entry: Entry) -> str:
    """Return a token as a dictionary key: its text, or its bytes if those are not whole characters. (As text, several
    such tokens would be the same key.)"""
    if "\ufffd" not in entry["token"]:
        return str(entry["token"])
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry["bytes"])
