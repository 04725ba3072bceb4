"""Ops: functionals with torch's signatures and ``nn.Module`` drop-ins, one file each."""

from svexport.ops.add_bias_residual_layer_norm import AddBiasResidualLayerNorm, add_bias_residual_layer_norm
from svexport.ops.bilinear_sample import BilinearSample, bilinear_sample
from svexport.ops.einsum import Einsum, einsum
from svexport.ops.layer_norm import LayerNorm, layer_norm

__all__ = [
    "AddBiasResidualLayerNorm",
    "BilinearSample",
    "Einsum",
    "LayerNorm",
    "add_bias_residual_layer_norm",
    "bilinear_sample",
    "einsum",
    "layer_norm",
]
