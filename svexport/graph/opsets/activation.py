"""Activations: Softmax and its kin, HardSwish, Mish, Gelu, Celu, Swish."""
