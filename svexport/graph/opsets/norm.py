"""Normalizations over batches, instances, layers and groups."""
