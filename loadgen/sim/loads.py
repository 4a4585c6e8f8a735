"""Simulates loads into HBM: what is found for a turn, and when it has arrived. The link carries one load at a time."""

from reprise.cache.stats import ResidencyValue
from reprise.loadgen.sim.ahead import SimulatedLookAhead
from reprise.loadgen.sim.context_window import ContextWindow
from reprise.loadgen.sim.disk import Disk
from reprise.loadgen.sim.machine import Config, Machine
from reprise.loadgen.sim.remote import RemoteKV
from reprise.loadgen.sim.store import SimulatedStore
from reprise.loadgen.sim.turn import LiveTurn


class SimulatedLoads:
    """The loads of one run. Times are seconds of its virtual clock."""

    def __init__(
        self,
        machine: Machine,
        config: Config,
        store: SimulatedStore,
        window: ContextWindow,
        disk: Disk,
        ahead: SimulatedLookAhead,
        remote: RemoteKV | None,
    ) -> None:
        self.moved = {"hbm": 0.0, "dram": 0.0, "disk": 0.0, "redis": 0.0}  # bytes into HBM by source
        self._remote = remote
        self._machine, self._config = machine, config
        self._store, self._window = store, window
        self._disk, self._ahead = disk, ahead
        self._link_s = 0.0  # when the link into HBM has finished all loads

    def residency(self, turn: LiveTurn, now: float) -> ResidencyValue:
        """Return where the KV of a waiting turn is."""
        is_loading = turn.loaded_s is not None and turn.loaded_s > now
        found = self.found(turn, now) if turn.loaded_s is None else turn.sources
        if turn.loaded_s is not None and not is_loading:
            found = {"hbm": sum(found.values())}
        hbm = found.get("hbm", 0)
        lower = {tier: tokens for tier, tokens in found.items() if tier != "hbm"}
        size = int(sum(lower.values()) * self._machine.kv_bytes_per_token)
        missing = turn.record.prompt_tokens - hbm - sum(lower.values())
        load_s = max(self._seconds(lower), self._remote_s(lower, now))
        compute_s = self._machine.costs.prefill_s(missing, turn.record.prompt_tokens - missing)
        exposed_s, own = max(0.0, load_s - compute_s), hbm + sum(lower.values())
        return ResidencyValue(hbm, lower, size, missing, compute_s, own, load_s, exposed_s, is_loading)

    def begin(self, turn: LiveTurn, now: float) -> None:
        """Begin to load a turn's KV into HBM."""
        record, name = turn.record, turn.live.name
        turn.sources = self.found(turn, now)
        if self._config.recompute_if_faster:
            self._leave_what_is_slow(turn, now)
        if self._config.reuse:
            self._window.drop(turn.live, turn.dropped)
            self._store.pin(name)
            self._store.hit(name)
        starts_s, seconds = self._starts_s(name, now), self._seconds(turn.sources)
        turn.loaded_s = starts_s + seconds if seconds else now
        if from_disk := turn.sources.get("disk", 0):
            read = self._seconds({"disk": from_disk})
            size = from_disk * self._machine.kv_bytes_per_token / self._machine.codec.ratio
            turn.loaded_s = self._disk.read(size, starts_s, read)
            turn.loaded_s += seconds - read
        if seconds:
            self._link_s = turn.loaded_s
        if self._remote is not None and (from_remote := turn.sources.get("redis", 0)):
            # Over another link than the tiers of this server, so that it delays no load from them.
            turn.loaded_s = max(turn.loaded_s, self._remote.load(name, from_remote, now))
            seconds = max(seconds, turn.loaded_s - now)
        record.load_s = seconds
        record.sources = {tier: tokens for tier, tokens in turn.sources.items() if tokens}
        for tier, tokens in record.sources.items():
            self.moved[tier] += tokens * self._machine.kv_bytes_per_token

    def ready_s(self, turn: LiveTurn) -> float:
        """Return the earliest time at which a turn can start so that its load, which is under way, ends no later than
        its computation. Loading and computing go on layer by layer, side by side."""
        assert turn.loaded_s is not None
        found = turn.record.hit_tokens
        return turn.loaded_s - self._machine.costs.prefill_s(turn.record.prompt_tokens - found, found)

    def found(self, turn: LiveTurn, now: float) -> dict[str, int]:
        """Return tier -> number of leading tokens of a turn's history that are stored there. Each token counts once, in
        the fastest tier that has it; "redis" counts what only Redis has."""
        if not self._config.reuse:
            return {}
        if turn.dropped and self._config.truncation == "coupled":
            return {}
        most = turn.record.prompt_tokens - 1
        found = self._store.found(turn.live.name, turn.dropped, most)
        if self._remote is not None:
            kept = min(self._remote.found(turn.live.name, now), most) - sum(found.values())
            if kept > 0:
                found["redis"] = kept
        return found

    def _seconds(self, sources: dict[str, int]) -> float:
        in_dram, on_disk = sources.get("dram", 0), sources.get("disk", 0)
        s_per_token = self._machine.kv_bytes_per_token / self._machine.dram_to_hbm
        return in_dram * s_per_token + max(on_disk * s_per_token, self._machine.disk_s(on_disk))

    def _remote_s(self, sources: dict[str, int], now: float) -> float:
        tokens = sources.get("redis", 0)
        return self._remote.wait_s(now) + self._remote.seconds(tokens) if tokens and self._remote is not None else 0.0

    def _starts_s(self, name: str, now: float) -> float:
        """Return when the link is free and the current fetch of the session `name`, if there is one, has arrived."""
        starts_s = max(now, self._link_s)
        if self._ahead.fetching is not None and self._ahead.fetching[1] == name:
            starts_s = max(starts_s, self._ahead.fetching[0])
        return starts_s

    def _leave_what_is_slow(self, turn: LiveTurn, now: float) -> None:
        """Reduce the turn's load to the tiers with which its first token comes earliest: all of them, all but Redis,
        neither disk nor Redis, or HBM alone. The tokens that are left out are computed."""
        waits_s = self._starts_s(turn.live.name, now) - now
        hbm = {tier: tokens for tier, tokens in turn.sources.items() if tier == "hbm"}

        def seconds(sources: dict[str, int]) -> float:
            found = sum(sources.values())
            compute_s = self._machine.costs.prefill_s(turn.record.prompt_tokens - found, found)
            loads = any(tokens for tier, tokens in sources.items() if tier not in ("hbm", "redis"))
            remote_s = self._remote_s(sources, now)
            return max(compute_s, remote_s, waits_s + self._seconds(sources)) if loads else max(compute_s, remote_s)

        local = {tier: tokens for tier, tokens in turn.sources.items() if tier != "redis"}
        without_disk = {tier: tokens for tier, tokens in local.items() if tier != "disk"}
        turn.sources = min((turn.sources, local, without_disk, hbm), key=seconds)
