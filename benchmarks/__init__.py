"""Standing benchmarks: programs run by `make bench`, results in `results/`. Not installed with the package."""
