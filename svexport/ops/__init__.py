"""Ops: functionals with torch's signatures and ``nn.Module`` drop-ins, one file each."""

from svexport.ops.bilinear_sample import BilinearSample, bilinear_sample
from svexport.ops.einsum import Einsum, einsum

__all__ = ["BilinearSample", "Einsum", "bilinear_sample", "einsum"]
