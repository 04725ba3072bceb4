"""Decides which tests run, in what order and from which seeds; tests/conftest.py calls it from pytest's hooks."""
