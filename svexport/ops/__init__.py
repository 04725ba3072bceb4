"""Ops: functionals with torch's signatures and ``nn.Module`` drop-ins, one file each."""

from svexport.ops.bilinear_sample import BilinearSample, bilinear_sample

__all__ = ["BilinearSample", "bilinear_sample"]
