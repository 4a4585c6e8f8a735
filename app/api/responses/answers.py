"""Builds a response from a generation: its items, and the events of its stream."""

from typing import Any

from reprise.app.api.chat.answers import cached_tokens, ours
from reprise.app.api.custom_input import CustomInput
from reprise.app.api.responses.as_chat import item_id, wants_logprobs
from reprise.app.api.thought_seal import ThoughtSeal
from reprise.app.errors import ApiError
from reprise.app.schemas.responses import CustomTool, FunctionTool, ResponseRequest
from reprise.app.text.answer_parts import Call, CallPiece
from reprise.app.turn.answer import Delta
from reprise.app.turn.generation import Generation

Event = dict[str, Any]
_SUMMARY = "reasoning_summary_text"
_PART_KINDS = {
    "output_text": "content_part",
    "reasoning_text": "content_part",
    _SUMMARY: "reasoning_summary_part",
}
"""Maps the name that events give to a text to the name of the part that holds it."""


class ResponseBuilder:
    """A builder of one response, which collects its items in the order in which they begin. Its methods return the
    stream events for each change; for a plain answer the caller ignores them."""

    def __init__(
        self, request: ResponseRequest, generation: Generation, *, response_id: str, seal: ThoughtSeal
    ) -> None:
        self.id = response_id
        self.output: list[dict[str, Any]] = []
        self.status = "in_progress"
        self.error: dict[str, Any] | None = None
        self._request = request
        self._generation = generation
        self._seal = seal
        self._wants_logprobs = wants_logprobs(request)
        self._open: dict[str, Any] | None = None  # the last item, while it grows
        self._tools = {tool.flat_name: tool for tool in request.tools or ()}
        self._custom = CustomInput()  # decodes the input of the open item, if that calls a custom tool
        self._sequence = 0

    def body(self) -> dict[str, Any]:
        """Return the response object in its present state."""
        request, generation = self._request, self._generation
        incomplete = {"reason": "max_output_tokens"} if self.status == "incomplete" else None
        conversation = None if request.conversation is None else {"id": request.conversation.id}
        text = request.text.model_dump(by_alias=True, exclude_none=True) if request.text is not None else {}
        reasoning = request.reasoning
        body: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": generation.created,
            "status": self.status,
            "background": bool(request.background),
            "error": self.error,
            "incomplete_details": incomplete,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": generation.model.name,
            "output": self.output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "conversation": conversation,
            "reasoning": {
                "effort": None if reasoning is None else reasoning.effort,
                "summary": None if reasoning is None else reasoning.summary,
            },
            "service_tier": generation.service_tier,
            "store": request.store is not False,
            "temperature": generation.sampling.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
            "tools": [_shown(tool) for tool in request.tools or ()],
            "top_p": generation.sampling.top_p if request.top_p is None else request.top_p,
            "top_logprobs": request.top_logprobs or 0,
            "truncation": generation.request.truncation or "auto",
            "usage": None if self.status == "in_progress" else self._usage(),
            "user": request.user,
            "metadata": request.metadata or {},
        }
        return body if self.status == "in_progress" else {**body, **ours(generation)}

    def _usage(self) -> dict[str, Any]:
        generation = self._generation
        written = sum(len(choice.token_ids) for choice in generation.choices)
        read = len(generation.token_ids)
        return {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": cached_tokens(generation)},
            "output_tokens": written,
            "output_tokens_details": {
                "reasoning_tokens": sum(choice.reasoning_tokens for choice in generation.choices)
            },
            "total_tokens": read + written,
        }

    def begin(self) -> list[Event]:
        return [
            self._event("response.created", response=self.body()),
            self._event("response.in_progress", response=self.body()),
        ]

    def take(self, delta: Delta) -> list[Event]:
        events: list[Event] = []
        logprobs = iter(delta.text_logprobs)
        for piece in delta.parts.pieces:
            if isinstance(piece, CallPiece):
                self._take_call(piece, events)
            elif piece.is_thought:
                item = self._item("reasoning", events)
                _part(item)["text"] += piece.text
                events.append(self._part_event(f"response.{_kind(item)}.delta", delta=piece.text))
            else:
                self._take_content(piece.text, [_logprob(entry) for entry in next(logprobs, ())], events)
        if delta.finish_reason is not None and not self.output:
            self._item("message", events)
        return events

    def _take_content(self, text: str, logprobs: list[dict[str, Any]], events: list[Event]) -> None:
        part = self._item("message", events)["content"][0]
        part["text"] += text
        if self._wants_logprobs:
            part["logprobs"] += logprobs
        events.append(self._part_event("response.output_text.delta", delta=text, logprobs=logprobs))

    def _take_call(self, piece: CallPiece, events: list[Event]) -> None:
        if piece.call is not None:
            self._close(events)
            self._begin_item(self._call_item(piece.call), events)
        if piece.arguments and self._open is not None:
            self._add_arguments(self._open, piece.arguments, events)

    def _call_item(self, call: Call) -> dict[str, Any]:
        """Return the item of a call as the client knows the tool: in its namespace, and as what it is."""
        tool = self._tools.get(call.name)
        name = call.name if tool is None else tool.name
        within = {} if tool is None or tool.namespace is None else {"namespace": tool.namespace}
        if isinstance(tool, CustomTool):
            self._custom = CustomInput()
            fields = {"call_id": call.id, "name": name, "input": "", **within}
            return {"type": "custom_tool_call", "id": self._new_id("ctc"), **fields}
        fields = {"call_id": call.id, "name": name, "arguments": "", **within}
        return {"type": "function_call", "id": self._new_id("fc"), **fields}

    def _add_arguments(self, item: dict[str, Any], arguments: str, events: list[Event]) -> None:
        if item["type"] == "custom_tool_call":
            self._add_input(item, self._custom.push(arguments), events)
            return
        item["arguments"] += arguments
        events.append(self._item_event("response.function_call_arguments.delta", delta=arguments))

    def _add_input(self, item: dict[str, Any], text: str, events: list[Event]) -> None:
        if text:
            item["input"] += text
            events.append(self._item_event("response.custom_tool_call_input.delta", delta=text))

    def end(self, finish_reason: str | None) -> list[Event]:
        """End the response. Returns the last events of its stream. finish_reason: that of the response's only
        choice."""
        events: list[Event] = []
        is_cut = finish_reason == "length"
        self._close(events, status="incomplete" if is_cut else "completed")
        self.status = "incomplete" if is_cut else "completed"
        return [*events, self._event(f"response.{self.status}", response=self.body())]

    def fail(self, error: ApiError) -> list[Event]:
        self.status = "failed"
        self.error = {"code": error.code or "server_error", "message": error.message}
        return [self._event("response.failed", response=self.body())]

    def cancel(self) -> None:
        self._close([], status="incomplete")
        self.status = "cancelled"

    # --- items --------------------------------------------------------------------------------------------------------

    def _item(self, kind: str, events: list[Event]) -> dict[str, Any]:
        """Return the open item if it is of this kind; otherwise close it and begin a new one."""
        if self._open is not None and self._open["type"] == kind:
            return self._open
        self._close(events)
        if kind == "message":
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"type": "message", "id": self._new_id("msg"), "role": "assistant", "content": [part]}
        elif self._request.wants_summary:  # a client that shows it would show the thought twice if both came
            part = {"type": "summary_text", "text": ""}
            item = {"type": "reasoning", "id": self._new_id("rs"), "summary": [part], "content": []}
        else:
            part = {"type": "reasoning_text", "text": ""}
            item = {"type": "reasoning", "id": self._new_id("rs"), "summary": [], "content": [part]}
        self._begin_item(item, events)
        events.append(self._part_event(f"response.{_PART_KINDS[_kind(item)]}.added", part=dict(part)))
        return item

    def _new_id(self, kind: str) -> str:
        return item_id(self.id, kind, len(self.output))

    def _begin_item(self, item: dict[str, Any], events: list[Event]) -> None:
        item["status"] = "in_progress"
        self.output.append(item)
        self._open = item
        empty = {name: [] if name in ("content", "summary") else value for name, value in item.items()}
        events.append(self._event("response.output_item.added", output_index=len(self.output) - 1, item=empty))

    def _close(self, events: list[Event], *, status: str = "completed") -> None:
        item = self._open
        if item is None:
            return
        item["status"] = status
        if item["type"] == "custom_tool_call":
            self._add_input(item, self._custom.flush(), events)
            events.append(self._item_event("response.custom_tool_call_input.done", input=item["input"]))
        elif item["type"] == "function_call":
            said = {"arguments": item["arguments"], "name": item["name"]}
            events.append(self._item_event("response.function_call_arguments.done", **said))
        else:
            part, kind = _part(item), _kind(item)
            said = {"logprobs": part["logprobs"]} if kind == "output_text" else {}
            events.append(self._part_event(f"response.{kind}.done", text=part["text"], **said))
            events.append(self._part_event(f"response.{_PART_KINDS[kind]}.done", part=part))
            if item["type"] == "reasoning" and self._request.wants_sealed_thoughts:
                item["encrypted_content"] = self._seal.seal(part["text"])
        events.append(self._event("response.output_item.done", output_index=len(self.output) - 1, item=item))
        self._open = None

    def _part_event(self, kind: str, **fields: Any) -> Event:
        """Return an event about the only part of the open item."""
        assert self._open is not None
        index = "summary_index" if _kind(self._open) == _SUMMARY else "content_index"
        return self._item_event(kind, **{index: 0}, **fields)

    def _item_event(self, kind: str, **fields: Any) -> Event:
        assert self._open is not None
        return self._event(kind, item_id=self._open["id"], output_index=len(self.output) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}


def _part(item: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a message or of a thought that holds its text."""
    part: dict[str, Any] = (item["content"] or item["summary"])[0]
    return part


def _kind(item: dict[str, Any]) -> str:
    """Return the name that events give to the text of a message or of a thought."""
    if item["type"] == "message":
        return "output_text"
    return "reasoning_text" if item["content"] else _SUMMARY


def _shown(tool: FunctionTool | CustomTool) -> dict[str, Any]:
    """Return a tool as a response tells it."""
    shown = tool.model_dump(exclude={"namespace"} if tool.namespace is None else None)
    if isinstance(tool, CustomTool):
        return shown
    return {**shown, "strict": bool(tool.strict), "parameters": tool.parameters or {}}


def _logprob(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: entry[name] for name in ("token", "logprob", "bytes", "top_logprobs")}
