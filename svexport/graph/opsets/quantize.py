"""QuantizeLinear, DequantizeLinear and their kin."""
