"""Builds OpenAI's chat answers from generations, with Reprise's own fields `x_cache` and `timings`."""

from collections.abc import Container, Sequence
from dataclasses import asdict
from typing import Any

from reprise.app.api.custom_input import CustomInput, input_of
from reprise.app.errors import ApiError
from reprise.app.http.event_stream import DONE, PING, event
from reprise.app.text.answer_parts import AnswerParts, Call
from reprise.app.turn.answer import Answer, Delta
from reprise.app.turn.generation import Generation
from reprise.app.turn.kv_sources import SOURCES, source_fields, tokens_by_source
from reprise.engine.messages import Progress, TokensBySource


def completion(
    generation: Generation, logprobs: dict[int, list[dict[str, Any]]], *, custom: Container[str]
) -> dict[str, Any]:
    """Return the plain (not streamed) answer of a finished generation. logprobs: choice -> log probabilities of its
    tokens; empty if the request asks for none. custom: names of the custom tools."""
    choices = [
        {
            "index": choice.index,
            "message": _message(choice, custom),
            "logprobs": {"content": logprobs[choice.index], "refusal": None} if choice.index in logprobs else None,
            "finish_reason": choice.finish_reason,
        }
        for choice in generation.choices
    ]
    return {**head(generation, "chat.completion"), "choices": choices, "usage": usage(generation), **ours(generation)}


def _message(choice: Answer, custom: Container[str]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
    if choice.reasoning:
        message |= _thought(choice.reasoning)
    if choice.calls:
        message["content"] = choice.content or None
        message["tool_calls"] = [_call(call, custom) for call in choice.calls]
    return message


def _thought(text: str) -> dict[str, Any]:
    """Return a thought under both of the names by which clients look for it."""
    return {"reasoning_content": text, "reasoning": text}


def _call(call: Call, custom: Container[str]) -> dict[str, Any]:
    if call.name in custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": input_of(call.arguments)}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class Chunks:
    """A maker of the chunks of one streamed answer. With `include_usage` every chunk has a `usage` field, as in
    OpenAI's API."""

    ping = PING

    def __init__(self, generation: Generation, *, include_usage: bool, custom: Container[str]) -> None:
        """Set up. custom: names of the custom tools."""
        self._generation = generation
        self._custom = custom
        self._inputs: dict[tuple[int, int], CustomInput] = {}  # decoders, by choice and call
        self._include_usage = include_usage
        self._head = head(generation, "chat.completion.chunk")
        if include_usage:
            self._head["usage"] = None
        self._unfinished = len(generation.choices)

    def opening(self) -> bytes:
        first = {"role": "assistant", "content": ""}
        return b"".join(event(self._chunk(choice.index, first, None, None)) for choice in self._generation.choices)

    def delta(self, delta: Delta) -> bytes:
        """Return the chunk for a delta. The chunk with the last finish_reason also carries `x_cache` and `timings`,
        unless a usage chunk will."""
        if delta.progress is not None:
            return event({**self._head, "choices": [], "x_progress": progress_fields(delta.progress)})
        is_last = delta.finish_reason is not None
        said = self._said(delta.choice, delta.parts, is_last=is_last)
        chunk = self._chunk(delta.choice, said, delta.logprobs, delta.finish_reason)
        if delta.finish_reason is not None:
            self._unfinished -= 1
            if self._unfinished == 0 and not self._include_usage:
                chunk.update(ours(self._generation))
        return event(chunk)

    def closing(self) -> bytes:
        if not self._include_usage:
            return DONE
        last = {**self._head, "choices": [], "usage": usage(self._generation), **ours(self._generation)}
        return event(last) + DONE

    def failed(self, error: ApiError) -> bytes:
        """Return the last event of a stream that ends with an error. No [DONE] follows, so that a client that waits for
        it knows that the answer is incomplete."""
        return b"data: " + error.body() + b"\n\n"

    def _said(self, choice: int, parts: AnswerParts, *, is_last: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if parts.reasoning:
            delta |= _thought(parts.reasoning)
        if parts.content:
            delta["content"] = parts.content
        calls: dict[int, dict[str, Any]] = {}  # one entry per call: clients take the first chunk's list as it is
        for index, call, arguments in parts.calls:
            if call is not None:
                calls[index] = self._begun(choice, index, call)
            if (decoder := self._inputs.get((choice, index))) is not None:
                entry = calls.setdefault(index, {"index": index, "custom": {"input": ""}})
                entry["custom"]["input"] += decoder.push(arguments)
            else:
                entry = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                entry["function"]["arguments"] += arguments
        for (of_choice, index), decoder in self._inputs.items():
            if is_last and of_choice == choice and (rest := decoder.flush()):
                entry = calls.setdefault(index, {"index": index, "custom": {"input": ""}})
                entry["custom"]["input"] += rest
        if calls:
            delta["tool_calls"] = list(calls.values())
        return delta

    def _begun(self, choice: int, index: int, call: Call) -> dict[str, Any]:
        """Return the first entry of a call."""
        if call.name in self._custom:
            self._inputs[choice, index] = CustomInput()
            custom = {"name": call.name, "input": ""}
            return {"index": index, "id": call.id, "type": "custom", "custom": custom}
        function = {"name": call.name, "arguments": ""}
        return {"index": index, "id": call.id, "type": "function", "function": function}

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: list[dict[str, Any]] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        content = None if logprobs is None else {"content": logprobs, "refusal": None}
        choice = {"index": index, "delta": delta, "logprobs": content, "finish_reason": finish_reason}
        return {**self._head, "choices": [choice]}


def progress_fields(progress: Progress) -> dict[str, Any]:
    """Return `x_progress`, which tells a client how far its prompt is before its first token comes."""
    return {
        "prompt_tokens": progress.prompt_tokens,
        "read_tokens": progress.read_tokens,
        "cached_tokens": progress.cached_tokens,
        "ahead": progress.ahead,
        "left_ms": None if progress.left_ms is None else round(progress.left_ms, 3),
    }


def head(generation: Generation, kind: str) -> dict[str, Any]:
    return {
        "id": generation.request_id,
        "object": kind,
        "created": generation.created,
        "model": generation.model.name,
        "system_fingerprint": f"fp_{generation.model.fingerprint[:16]}",
        "service_tier": generation.service_tier,
    }


def usage(generation: Generation) -> dict[str, Any]:
    return usage_of([generation])


def usage_of(generations: Sequence[Generation], *, generated: int | None = None) -> dict[str, Any]:
    """Return OpenAI's usage object, summed over the generations of one request. generated: number of answer tokens to
    report; None: all tokens that were generated."""
    prompt_tokens = sum(len(generation.token_ids) for generation in generations)
    choices = [choice for generation in generations for choice in generation.choices]
    if generated is None:
        generated = sum(len(choice.token_ids) for choice in choices)
    cached = sum(cached_tokens(generation) for generation in generations)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prompt_tokens + generated,
        # Never null: a client cannot tell "no report" from "no hit".
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": sum(choice.reasoning_tokens for choice in choices),
            "accepted_prediction_tokens": sum(choice.accepted_predictions for choice in choices),
            "rejected_prediction_tokens": sum(choice.rejected_predictions for choice in choices),
        },
    }


def cached_tokens(generation: Generation) -> int:
    return _cached_tokens(generation.report, len(generation.token_ids))


def _cached_tokens(report: TokensBySource | None, prompt_tokens: int) -> int:
    """Return how many of the prompt's tokens were cached. The report may count more tokens than the prompt has: a
    context that was cut at a block's border keeps some history that the client no longer sends."""
    if report is None:
        return 0
    return max(0, min(report.cached_tokens, prompt_tokens - report.computed_tokens))


def ours(generation: Generation) -> dict[str, Any]:
    """Return Reprise's own fields `x_cache` and `timings`. They describe the first choice, since it alone computes or
    loads the prompt."""
    fields: dict[str, Any] = {"timings": timings(generation)}
    diverged = generation.prompt.diverged
    if (report := generation.report) is not None:
        fields["x_cache"] = {
            "session_id": generation.prompt.session_id,
            "resumed": generation.choices[0].is_resumed,
            **source_fields(report),
            "history_tokens": report.history_tokens,
            "truncated_tokens": report.truncated_tokens,
            "shifted_tokens": report.shifted_tokens,
            "coded_tokens": report.coded_tokens,
            "recalled_tokens": report.recalled_tokens,
            "codec": generation.codec,
            "hbm_dtype": generation.model.hbm_dtype or generation.model.dtype,
            "selected_tokens": report.selected_tokens,
            "selector": generation.selector,
            "miss_reasons": report.miss_reasons,
            "diverged_at": None if diverged is None else asdict(diverged),
            "load_ms": fields["timings"]["load_ms"],
            "saved_ms": _saved_ms(generation),
            "ttft_target_ms": generation.ttft_target_ms,
            "ttft_target_made": generation.made_target,
        }
    return fields


def _saved_ms(generation: Generation) -> float | None:
    engine = generation.choices[0].timings
    return None if engine is None else round(engine.saved_ms, 3)


def cache_header(generations: Sequence[Generation]) -> dict[str, str]:
    """Return the `x-cache` header of a plain answer: its prompt tokens by the source of their KV."""
    found = [tokens_by_source(generation.report) for generation in generations if generation.report is not None]
    if not found:
        return {}
    counts = {source: sum(tokens[source] for tokens in found) for source in SOURCES}
    return {"x-cache": ", ".join(f"{source}={count}" for source, count in counts.items())}


def merged_ours(generations: Sequence[Generation]) -> dict[str, Any]:
    """Return the fields `x_cache` and `timings` of a request with several prompts, merged into one: token counts are
    summed, `ttft_target_made` is true if all have made their target, and session and timings are those of the first."""
    all_of = [ours(generation) for generation in generations]
    merged = all_of[0]
    for other in all_of[1:]:
        if "x_cache" not in merged or "x_cache" not in other:
            continue
        mine, its = merged["x_cache"], other["x_cache"]
        for name in mine:
            if name.endswith("_tokens"):
                mine[name] += its[name]
        if mine["ttft_target_made"]:
            mine["ttft_target_made"] = its["ttft_target_made"]
        reasons = {*mine["miss_reasons"], *its["miss_reasons"]}
        mine["miss_reasons"] = {
            name: mine["miss_reasons"].get(name, 0) + its["miss_reasons"].get(name, 0) for name in sorted(reasons)
        }
    return merged


def timings(generation: Generation) -> dict[str, float | None]:
    """Return the times of the first choice in milliseconds. A time that is not known is None."""
    choice = generation.choices[0]
    engine = choice.timings
    ttft_ms = decode_ms = tokens_per_s = None
    if choice.first_token_s is not None and choice.last_token_s is not None:
        ttft_ms = round((choice.first_token_s - generation.arrived_s) * 1e3, 3)
        decode_ms = round((choice.last_token_s - choice.first_token_s) * 1e3, 3)
    # After a stop string the engine's are of an earlier token, and of a resumed answer it knows the end alone.
    if engine is not None and not choice.stopped_by_string and not choice.is_resumed:
        decode_ms = round(engine.decode_ms, 3)
    if decode_ms:
        tokens_per_s = round((len(choice.token_ids) - 1) / decode_ms * 1e3, 3)
    return {
        "queue_ms": None if engine is None else round(engine.queue_ms, 3),
        "load_ms": None if engine is None else round(engine.load_ms, 3),
        "prefill_ms": None if engine is None else round(engine.prefill_ms, 3),
        "ttft_ms": ttft_ms,
        "decode_ms": decode_ms,
        "tokens_per_s": tokens_per_s,
    }
