"""Tests what a result says of the servers that it was measured on."""

from pathlib import Path

from benchmarks.harness.servers import told


def test_settings_are_told_without_paths_addresses_and_keys() -> None:
    flags = {
        "model.source": Path("/tmp/x/125m"), "cache.disk_dir": "/tmp/x/state", "server.api_keys": "a,b",
        "cache.redis_url": "redis://127.0.0.1:1/0", "cache.hbm_tokens": 3000, "cache.mode": "prefix",
    }  # fmt: skip
    assert told(flags) == {"model.source": "125m", "cache.hbm_tokens": 3000, "cache.mode": "prefix"}
    assert told({"model.source": "bundled"}) == {"model.source": "bundled"}
