"""The decoder of multi-camera detectors: object queries that look at each other and into every camera."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from svexport.ops import add_bias_residual_layer_norm as fused_norm
from svexport.ops import camera_sample as sampling
from svexport.ops import scaled_dot_product_attention as attention
from svexport.ops._op import Op
from svexport.ops.dequantize import dequantize
from svexport.ops.from_chw32 import from_chw32
from svexport.ops.sigmoid_gt import sigmoid_gt

__all__ = ["EPS", "DecoderOutput", "TransformerDecoder", "TransformerDecoderConfig", "transformer_decoder"]
