"""Where a prompt's KV came from, by the names that clients, metrics, logs and traces share."""

from engine.messages import TokensBySource

CACHED = ("hbm", "dram", "disk", "redis")  # no KV lies in Redis yet: clients are told of it, so that none has to change
SOURCES = (*CACHED, "computed")


def tokens_by_source(report: TokensBySource) -> dict[str, int]:
    """One entry for each of SOURCES, in their order; together the prompt."""
    found = report.by_source()
    return {source: found.get(source, 0) for source in SOURCES}


def source_fields(report: TokensBySource) -> dict[str, int]:
    """The same as `hbm_tokens`, `dram_tokens` and so on, which is how JSON and log records name them."""
    return {f"{source}_tokens": tokens for source, tokens in tokens_by_source(report).items()}
