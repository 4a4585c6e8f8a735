"""Checks that bytes, counts and tokens add up at the end of a run."""

from reprise.loadgen.sim.simulated_server import SimulatedServer
from reprise.loadgen.sim.store import BrokenBooks
from reprise.loadgen.sim.turn import TurnRecord


def check(server: SimulatedServer) -> None:
    """Raise BrokenBooks if something does not add up in a server that had all turns of its sessions."""
    check_end(server)
    _check_order(server.records)


def check_end(server: SimulatedServer) -> None:
    """Raise BrokenBooks if a turn still runs, or bytes or tokens do not add up."""
    if server.ahead.fetching is not None:
        server.ahead.fetched()
    server.store.check()
    if server.num_running or abs(server.running_bytes) > 1.0 or len(server.queue):
        raise BrokenBooks("somebody still runs or waits at the end")
    records = server.records
    hits = sum(record.hit_tokens for record in records)
    prompts = sum(record.prompt_tokens for record in records)
    if hits + server.prefilled_tokens != prompts:
        raise BrokenBooks(f"{prompts} tokens of prompts, {hits} found and {server.prefilled_tokens} computed")
    answers = sum(record.answer_tokens for record in records)
    if server.decoded_tokens + len(records) != answers:
        raise BrokenBooks(f"{answers} tokens of answers, {server.decoded_tokens} decoded behind the first")


def _check_order(records: list[TurnRecord]) -> None:
    last: dict[str, TurnRecord] = {}
    for record in records:
        before = last.get(record.session_id)
        context = before.context_tokens if before is not None else 0
        if record.turn != (before.turn + 1 if before is not None else 0):
            raise BrokenBooks(f"{record.session_id}: turn {record.turn} out of order")
        if record.history_tokens > context or record.hit_tokens > max(0, context - 1):
            raise BrokenBooks(f"{record.session_id}: more history in turn {record.turn} than was said before")
        last[record.session_id] = record
