"""Pooling, RoiAlign, NonMaxSuppression."""
