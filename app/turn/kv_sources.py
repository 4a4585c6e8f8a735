"""Names where a prompt's KV came from, alike for clients, metrics, logs and traces."""

from reprise.engine.messages import TokensBySource

CACHED = ("hbm", "dram", "disk", "redis")
SOURCES = (*CACHED, "computed")


def tokens_by_source(report: TokensBySource) -> dict[str, int]:
    """Return source -> tokens, with an entry for each of SOURCES, in their order. Together they are the prompt."""
    found = report.by_source()
    return {source: found.get(source, 0) for source in SOURCES}


def source_fields(report: TokensBySource) -> dict[str, int]:
    """Return the same under the names of JSON and log records: `hbm_tokens`, `dram_tokens` and so on."""
    return {f"{source}_tokens": tokens for source, tokens in tokens_by_source(report).items()}
