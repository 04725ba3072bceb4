"""Ops: functionals with torch's signatures and ``nn.Module`` drop-ins, one file each."""

from svexport.ops.add_bias_residual_layer_norm import AddBiasResidualLayerNorm, add_bias_residual_layer_norm
from svexport.ops.affine_grid import affine_grid
from svexport.ops.bilinear_sample import BilinearSample, bilinear_sample
from svexport.ops.camera_sample import CameraSample, Detr3DCrossAtten, camera_sample
from svexport.ops.deform_conv2d import DeformConv2d, ModulatedDeformConv2dPack, deform_conv2d
from svexport.ops.dequantize import dequantize
from svexport.ops.einsum import Einsum, einsum
from svexport.ops.fast_sigmoid import FastSigmoid, FastTanh, fast_sigmoid, fast_tanh
from svexport.ops.fold import fold
from svexport.ops.from_chw32 import from_chw32
from svexport.ops.grid_sample import GridSample, grid_sample
from svexport.ops.index_add import index_add
from svexport.ops.index_put import index_put
from svexport.ops.interpolate import interpolate
from svexport.ops.inverse import Inverse, inverse
from svexport.ops.inverse_ex import inverse_ex
from svexport.ops.layer_norm import LayerNorm, layer_norm
from svexport.ops.max_pool2d import max_pool2d
from svexport.ops.ms_deform_attn import MultiScaleDeformableAttention, MultiScaleDeformableSampling, ms_deform_attn
from svexport.ops.quantize import quantize
from svexport.ops.scaled_dot_product_attention import scaled_dot_product_attention
from svexport.ops.scatter_reduce import scatter_add, scatter_reduce
from svexport.ops.sigmoid_gt import sigmoid_gt
from svexport.ops.solve import Solve, solve
from svexport.ops.solve_ex import solve_ex
from svexport.ops.space_to_depth import Focus, SpaceToDepth, space_to_depth
from svexport.ops.to_chw32 import to_chw32
from svexport.ops.transformer_decoder import (
    DecoderOutput,
    TransformerDecoder,
    TransformerDecoderConfig,
    transformer_decoder,
)
from svexport.ops.triu import tril, triu
from svexport.ops.unflatten import unflatten
from svexport.ops.unfold import unfold

__all__ = [
    "AddBiasResidualLayerNorm",
    "BilinearSample",
    "CameraSample",
    "DecoderOutput",
    "DeformConv2d",
    "Detr3DCrossAtten",
    "Einsum",
    "FastSigmoid",
    "FastTanh",
    "Focus",
    "GridSample",
    "Inverse",
    "LayerNorm",
    "ModulatedDeformConv2dPack",
    "MultiScaleDeformableAttention",
    "MultiScaleDeformableSampling",
    "Solve",
    "SpaceToDepth",
    "TransformerDecoder",
    "TransformerDecoderConfig",
    "add_bias_residual_layer_norm",
    "affine_grid",
    "bilinear_sample",
    "camera_sample",
    "deform_conv2d",
    "dequantize",
    "einsum",
    "fast_sigmoid",
    "fast_tanh",
    "fold",
    "from_chw32",
    "grid_sample",
    "index_add",
    "index_put",
    "interpolate",
    "inverse",
    "inverse_ex",
    "layer_norm",
    "max_pool2d",
    "ms_deform_attn",
    "quantize",
    "scaled_dot_product_attention",
    "scatter_add",
    "scatter_reduce",
    "sigmoid_gt",
    "solve",
    "solve_ex",
    "space_to_depth",
    "to_chw32",
    "transformer_decoder",
    "tril",
    "triu",
    "unflatten",
    "unfold",
]
