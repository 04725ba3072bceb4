"""The parts of ``svexport/ops/einsum.py``: an equation becomes labels, then a plan, then a program or CUDA kernels."""
