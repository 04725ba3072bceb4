"""The planners of the CUDA kernels, asked from Python: which tactics there are for a problem and which is chosen."""
