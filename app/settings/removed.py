"""Lists settings that earlier versions had, so that the user of an old file or script learns what happens now."""

REMOVED_IN = "0.3"
_CONSTANTS = """
cache.answers_per_prompt cache.dram_free_buffer cache.max_pinned_share cache.transcript_mib
engine.hang_timeout_s engine.start_timeout_s
fleet.outbox_mib fleet.tenant_mib fleet.tenant_sessions
limits.body_timeout_s limits.choices limits.header_bytes limits.header_timeout_s limits.json_depth limits.logprobs
limits.messages limits.schema_bytes limits.schema_depth limits.send_timeout_s limits.sessions_timeout_s limits.stop
limits.tools limits.watchers
server.max_weight server.ping_s server.responses_mib
"""
_EXPERIMENTS = """
cache.disk_gbps cache.dram_gbps cache.hbm_high_water cache.hbm_low_water cache.io_deadline_s cache.read_buffer_layers
cache.staging_mib cache.sync_save cache.truncation_mode cache.truncation_ratio
scheduler.chunked_prefill scheduler.scores scheduler.window
"""
REMOVED = {
    **dict.fromkeys(_CONSTANTS.split(), "it is always what its default was"),
    **{name: f"benchmarks set it as experiment.{name.partition('.')[2]}" for name in _EXPERIMENTS.split()},
    "cache.disk_packing": "rows lie on disk as they are",
    "cache.granularity": "sessions leave a tier one after the other",
    "cache.redis_ttl_s": "cache.ttl_s says it for all tiers",
    "cache.redis_upload_gbps": "uploads have no cap",
    "fleet.commit_deadline_ms": "fleet.deadline_ms bounds that wait too",
    "scheduler.class_ordered_entry": "requests enter the window by fair share and arrival",
    "scheduler.length_predictor": "lengths of answers are learned",
}
"""Maps a removed setting to what happens instead."""
