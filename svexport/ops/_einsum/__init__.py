"""What ``svexport/ops/einsum.py`` is made of: from an equation to labels, to a plan, to a program or to kernels."""
