"""Describes the fleet for operators: `GET /v1/fleet` of a gateway or of a replica."""

from collections.abc import Callable, Mapping
from typing import Any

from reprise.fleet.directory import Directory
from reprise.fleet.members import Members
from reprise.fleet.records import Heartbeat

MAX_SHOWN = 1000  # replicas
_REDIS = "redis"
SILENT = "silent"  # state of a replica that says nothing any more


def overview(
    members: Members,
    directory: Directory,
    now: float,
    *,
    limit: int = MAX_SHOWN,
    under_way: Callable[[str], int] | None = None,
    gateway: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a description of the fleet from the table of members. now: the time by the table's clock. limit: number of
    replicas to describe, the first in order of name. under_way: returns for a replica how many requests of this gateway
    it has not answered; None on a replica. gateway: counts of this gateway since its start; None on a replica."""
    silent, beats = set(members.silent()), members.beats
    states: dict[str, int] = {}
    for name, beat in beats.items():
        state = state_of(beat, is_silent=name in silent, is_drained=name in members.drained)
        states[state] = states.get(state, 0) + 1
    shown = sorted(beats)[:limit]
    return {
        "object": "fleet",
        "redis": {"state": "ok" if directory.state == "closed" else "away", "failures": directory.failures},
        "kv": _kv(members),
        "states": states,
        "replicas": [
            {
                **_describe(members, name, now, is_silent=name in silent),
                **({} if under_way is None else {"relayed_here": under_way(name)}),
            }
            for name in shown
        ],
        "has_more": len(beats) > len(shown),
        "gateway": gateway,
    }


def state_of(beat: Heartbeat, *, is_silent: bool, is_drained: bool) -> str:
    """Return the state of a replica for operators: the one that it reports, unless it is silent or is being drained."""
    if is_silent:
        return SILENT
    return "draining" if is_drained and beat.state == "ready" else beat.state


def _describe(members: Members, name: str, now: float, *, is_silent: bool) -> dict[str, Any]:
    beat, view = members.beats[name], members.view
    load = view.beat(name)
    return {
        "replica": name,
        "url": beat.url,
        "state": beat.state,
        "open": view.is_open(name, now),
        "silent": is_silent,
        "drained": name in members.drained,
        "model": beat.model,
        "fingerprint": beat.fingerprint,
        "version": beat.version,
        "running": beat.running,
        "waiting": beat.waiting,
        "wait_s": None if load is None else round(view.wait_s(name, now), 3),
        "busy": None if load is None else round(load.busy, 3),
        "sessions": beat.sessions,
        "tiers": {tier: dict(size) for tier, size in beat.tiers.items() if tier != _REDIS},
    }


def _kv(members: Members) -> dict[str, int] | None:
    """Return the bytes of KV that all replicas together store in Redis; None if none stores any. All replicas see the
    same Redis, so the latest beat of any replica tells it."""
    known = [name for name, beat in members.beats.items() if _REDIS in beat.tiers]
    if not known:
        return None
    tier = members.beats[max(known, key=members.made_s)].tiers[_REDIS]
    return {"used_bytes": tier["used_bytes"], "budget_bytes": tier["capacity_bytes"]}
