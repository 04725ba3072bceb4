"""Products of matrices, convolutions, Einsum, Det."""
