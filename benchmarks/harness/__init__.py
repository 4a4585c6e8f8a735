"""The parts that benchmarks have in common: servers, streams, measures and result files."""
