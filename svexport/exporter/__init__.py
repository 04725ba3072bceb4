"""A torch model to a file: two tracers, their translations, what is written and how it is proven."""
