"""Pure-Python by default: no compiler and no CUDA needed. Metadata lives in pyproject.toml.

CUDA kernels are compiled on first use on a CUDA device, or ahead of time when the sources are there and
``SVEXPORT_BUILD_CUDA=1 pip install --no-build-isolation .`` asks for it.
"""

import os
from pathlib import Path

from setuptools import find_packages, setup


def extension() -> dict:
    """Arguments of setup() for the CUDA extension, none unless it was asked for."""
    if os.environ.get("SVEXPORT_BUILD_CUDA") != "1":
        return {}
    from torch.utils.cpp_extension import BuildExtension, CUDAExtension

    csrc = Path("svexport") / "csrc"
    sources = sorted(str(p) for folder in ("cuda", "torch") for p in (csrc / folder).glob("*.c*"))
    if not sources:
        raise SystemExit("SVEXPORT_BUILD_CUDA=1: this source tree has no CUDA sources; install without it")
    return {
        "ext_modules": [CUDAExtension("svexport._C", sources, include_dirs=[str((csrc / "cuda").resolve())])],
        "cmdclass": {"build_ext": BuildExtension},
    }


# The examples are one folder of the checkout and installed as svexport.examples: `svexport demo` runs them.
setup(
    packages=[*find_packages(include=["svexport*"]), "svexport.examples", "svexport.examples.data"],
    package_dir={"svexport.examples": "examples"},
    **extension(),
)
