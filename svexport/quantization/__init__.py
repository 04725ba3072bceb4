"""Post-training quantization to int8: calibrate, quantize explicitly, and find the layers that it hurts."""
