"""What the documentation site has that nobody writes: a page per op, the reference, files of the repository."""
