"""Checks that the bytes, tokens and turns of a fleet add up at the end of a run."""

from reprise.loadgen.fleet.simulation import FleetSimulation
from reprise.loadgen.sim import books
from reprise.loadgen.sim.store import BrokenBooks


def check(fleet: FleetSimulation) -> None:
    """Raise BrokenBooks unless the turns, tokens and bytes of a finished run add up over all replicas and Redis."""
    killed = {name for name, replica in fleet.replicas.items() if replica.server.unfinished()}
    for name, replica in fleet.replicas.items():
        if name not in killed:
            books.check_end(replica.server)
        elif replica.is_alive:
            raise BrokenBooks(f"{name} has turns that have not ended")
    if fleet.redis is not None:
        try:
            fleet.redis.check()
        except ValueError as error:
            raise BrokenBooks(str(error)) from None
        loads = sum(replica.server.loads.moved["redis"] for replica in fleet.replicas.values())
        if abs(loads - fleet.redis.loaded) > 1e-6 * loads + 1.0:
            raise BrokenBooks(f"replicas have loaded {loads} bytes, and Redis has sent {fleet.redis.loaded}")
    _check_turns(fleet)


def _check_turns(fleet: FleetSimulation) -> None:
    """Raise BrokenBooks unless every turn was answered once, in its order, and no turn used more history than was said
    before."""
    contexts = dict(fleet.histories)
    turns: dict[str, int] = {}
    for record in sorted(fleet.records, key=lambda record: (record.started_s, record.turn)):
        name, turn = record.session_id, record.turn
        if not record.done_s:
            if (name, turn) not in fleet.resumed:
                raise BrokenBooks(f"{name}: turn {turn} began and never ended")
            continue
        if turn != turns.get(name, -1) + 1:
            raise BrokenBooks(f"{name}: turn {turn} after turn {turns.get(name)}")
        if record.history_tokens != contexts.get(name, 0):
            raise BrokenBooks(f"{name}: turn {turn} has a history of {record.history_tokens}, not {contexts.get(name)}")
        if record.hit_tokens > max(0, record.history_tokens - 1):
            raise BrokenBooks(f"{name}: turn {turn} found KV that nobody has computed")
        if record.cut_tokens:
            raise BrokenBooks(f"{name}: longer than the window, which fleets are not simulated with")
        turns[name], contexts[name] = turn, record.context_tokens
    if (sent := sum(fleet.routes[route] for route in ("home", "new", "moved"))) < len(turns):
        raise BrokenBooks(f"{sent} turns were sent, and {len(turns)} sessions have answers")
