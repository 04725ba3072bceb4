"""Post-training quantization to int8: calibrates, quantizes explicitly, and finds the layers that suffer from it."""
