"""One log record per answer: whose it was, what it cost, where its prompt's KV came from. Never what it says."""

import logging
import time
from typing import Any

from app.turn.generation import Generation
from app.turn.kv_sources import source_fields

log = logging.getLogger("reprise.answers")


def note(generation: Generation, tenant: str) -> None:
    """Once per generation, when it is over."""
    log.info("answer", extra={"fields": fields_of(generation, tenant)})


def fields_of(generation: Generation, tenant: str) -> dict[str, Any]:
    report, first = generation.report, generation.choices[0]
    fields: dict[str, Any] = {
        "answer_id": generation.request_id,
        "session_id": generation.prompt.session_id,
        "tenant": tenant,
        "model": generation.model.name,
        "choices": len(generation.choices),
        "completion_tokens": sum(len(choice.token_ids) for choice in generation.choices),
        "finish_reason": first.finish_reason or "abandoned",
        "ttft_ms": None if first.first_token_s is None else _ms(first.first_token_s - generation.arrived_s),
        "total_ms": _ms(time.monotonic() - generation.arrived_s),
    }
    if report is not None:
        fields["prompt_tokens"] = report.prompt_tokens
        fields.update(source_fields(report))
        fields["truncated_tokens"] = report.truncated_tokens
    if first.timings is not None:
        fields["queue_ms"] = round(first.timings.queue_ms, 3)
        fields["load_ms"] = round(first.timings.load_ms, 3)
        fields["prefill_ms"] = round(first.timings.prefill_ms, 3)
    return fields


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
