"""A model and its arguments: binding, state, sizes, source lines; for tracers and comparisons alike."""
