"""Python access to the planners of the CUDA kernels: the tactics for a problem, and the one that is chosen."""
