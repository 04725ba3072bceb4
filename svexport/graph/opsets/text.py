"""Strings, images, n-grams."""
