"""One file per workload, ``python -m benchmarks.<workload>``; both sides of a comparison in one process."""
