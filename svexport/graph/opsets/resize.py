"""Resize, down to Upsample."""
