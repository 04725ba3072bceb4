"""Random numbers and Dropout."""
