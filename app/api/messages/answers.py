"""Builds Anthropic's messages from generations, plain or as typed events."""

import json
from typing import Any

from reprise.app.api.chat.answers import cached_tokens, ours
from reprise.app.api.thought_seal import ThoughtSeal
from reprise.app.errors import ApiError, too_deep_call
from reprise.app.http.body import MAX_CALL_LEVELS
from reprise.app.http.event_stream import event
from reprise.app.schemas.fields import is_deeper
from reprise.app.text.answer_parts import Call, CallPiece, TextPiece
from reprise.app.text.families.reading import JsonEnd
from reprise.app.turn.answer import Answer, Delta
from reprise.app.turn.generation import Generation

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def message(generation: Generation, seal: ThoughtSeal) -> dict[str, Any]:
    """Return the plain (not streamed) answer of a finished generation."""
    (choice,) = generation.choices
    return {
        **_head(generation),
        "content": [_block(part, seal) for part in choice.said],
        **_reason(choice),
        "usage": usage(generation),
        **ours(generation),
    }


def _block(part: TextPiece | Call, seal: ThoughtSeal) -> dict[str, Any]:
    if isinstance(part, Call):
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": _object(part.arguments)}
    if part.is_thought:
        return {"type": "thinking", "thinking": part.text, "signature": seal.seal(part.text)}
    return {"type": "text", "text": part.text}


class MessageFrames:
    """A maker of the events of one streamed message."""

    ping = b'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(self, generation: Generation, seal: ThoughtSeal) -> None:
        self._generation = generation
        self._seal = seal
        self._thought = ""  # the text of an open thinking block
        self._arguments = JsonEnd()  # tells how deeply those of the last call are nested
        self._kind: str | None = None  # kind of the open content block
        self._index = -1

    def opening(self) -> bytes:
        said = {**_head(self._generation), "content": [], "stop_reason": None, "stop_sequence": None}
        return _event("message_start", message={**said, "usage": usage(self._generation)})

    def delta(self, delta: Delta) -> bytes:
        return b"".join(self._said(piece) for piece in delta.parts.pieces)

    def _said(self, piece: TextPiece | CallPiece) -> bytes:
        if isinstance(piece, CallPiece):
            return self._called(piece)
        if piece.is_thought:
            opened = self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._thought += piece.text
            return opened + self._piece({"type": "thinking_delta", "thinking": piece.text})
        opened = self._open("text", {"type": "text", "text": ""})
        return opened + self._piece({"type": "text_delta", "text": piece.text})

    def _called(self, piece: CallPiece) -> bytes:
        data, call = b"", piece.call
        if call is not None:
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            data = self._open(f"call{piece.place}", block)
            self._arguments = JsonEnd()
        if piece.arguments:
            self._arguments.push(piece.arguments)
            if self._arguments.deepest > MAX_CALL_LEVELS:  # the client could not send it back
                raise too_deep_call(MAX_CALL_LEVELS)
            data += self._piece({"type": "input_json_delta", "partial_json": piece.arguments})
        return data

    def closing(self) -> bytes:
        """Return the last events, with the final counts. They repeat the number of cached tokens, which the opening
        event lacks if it was sent before the first token."""
        (choice,) = self._generation.choices
        last = _event("message_delta", delta=_reason(choice), usage=usage(self._generation), **ours(self._generation))
        return self._close() + last + _event("message_stop")

    def failed(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + error.anthropic_body() + b"\n\n"

    def _open(self, kind: str, block: dict[str, Any]) -> bytes:
        if kind == self._kind:
            return b""
        closed = self._close()
        self._kind = kind
        self._index += 1
        return closed + _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> bytes:
        if self._kind is None:
            return b""
        signed = b""
        if self._kind == "thinking":
            signed = self._piece({"type": "signature_delta", "signature": self._seal.seal(self._thought)})
            self._thought = ""
        self._kind = None
        return signed + _event("content_block_stop", index=self._index)

    def _piece(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def usage(generation: Generation) -> dict[str, Any]:
    """Return Anthropic's usage, in which `input_tokens` excludes the tokens read from the cache."""
    cached = cached_tokens(generation)
    return {
        "input_tokens": len(generation.token_ids) - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": sum(len(choice.token_ids) for choice in generation.choices),
        "service_tier": "standard",
    }


def _head(generation: Generation) -> dict[str, Any]:
    name = generation.request_id.rpartition("-")[2]
    return {"id": f"msg_{name}", "type": "message", "role": "assistant", "model": generation.model.name}


def _reason(choice: Answer) -> dict[str, Any]:
    if choice.stopped_by_string and choice.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_string}
    return {"stop_reason": _REASONS.get(choice.finish_reason or "", "end_turn"), "stop_sequence": None}


def _object(arguments: str) -> dict[str, Any]:
    """Parse a call's arguments; those that are cut short by the token limit, or too deeply nested to be sent back,
    become an empty object."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) and not is_deeper(value, MAX_CALL_LEVELS) else {}


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)
