"""Names the tiers that a prompt's KV came from, in the same way for clients, metrics, logs and traces."""

from reprise.engine.messages import TokensBySource

CACHED = ("hbm", "dram", "disk", "redis")
SOURCES = (*CACHED, "computed")


def tokens_by_source(report: TokensBySource) -> dict[str, int]:
    """Return source -> tokens of the prompt, with an entry for each of SOURCES, in their order. They add up to the
    prompt."""
    found = report.by_source()
    return {source: found.get(source, 0) for source in SOURCES}


def source_fields(report: TokensBySource) -> dict[str, int]:
    """Return the result of `tokens_by_source` under the names of JSON and log records: `hbm_tokens`, `dram_tokens` and
    so on."""
    return {f"{source}_tokens": tokens for source, tokens in tokens_by_source(report).items()}
