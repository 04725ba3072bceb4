"""Exports a torch model to a file: two tracers, their translations, writing the file, and proving it."""
