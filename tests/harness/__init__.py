"""How the tests run: which of them, in what order, from which seeds. tests/conftest.py calls it where pytest asks."""
