"""Pure-Python by default: no compiler and no CUDA needed. Metadata lives in pyproject.toml.

CUDA kernels are compiled on first use on a CUDA device, or ahead of time by ``SVEXPORT_BUILD_CUDA=1 pip install
--no-build-isolation .``, for the architectures of TORCH_CUDA_ARCH_LIST or else of svexport/csrc/architectures.txt.
"""

import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).resolve().parent


def loading() -> ModuleType:
    """svexport/ops/_cuda.py, which knows sources and flags, alone: its package would register every op."""
    spec = spec_from_file_location("_cuda", ROOT / "svexport" / "ops" / "_cuda.py")
    module = module_from_spec(spec)
    sys.path.insert(0, str(ROOT))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT))
    return module


def extension() -> dict:
    """Arguments of setup() for the CUDA extension, none unless it was asked for."""
    if os.environ.get("SVEXPORT_BUILD_CUDA") != "1":
        return {}
    from torch.utils.cpp_extension import BuildExtension, CUDAExtension

    cuda = loading()
    if not cuda.sources():
        raise SystemExit("SVEXPORT_BUILD_CUDA=1: this source tree has no CUDA sources; install without it")
    given = os.environ.get("TORCH_CUDA_ARCH_LIST") or cuda.architectures()
    os.environ["TORCH_CUDA_ARCH_LIST"] = cuda.with_features(given)
    module = CUDAExtension(
        "svexport._C",
        [str(path.relative_to(ROOT)) for path in cuda.sources()],
        include_dirs=[str(cuda.CSRC / "cuda")],
        # Python's own flags may ask for debug information: twice the time to compile, 25 times the size.
        extra_compile_args={"cxx": [*cuda.FLAGS["cxx"], "-g0"], "nvcc": cuda.FLAGS["nvcc"]},
    )
    return {"ext_modules": [module], "cmdclass": {"build_ext": BuildExtension}}


# The folders of the CUDA sources are namespaces: setuptools wants every folder with data to be a package.
PACKAGES = find_namespace_packages(include=["svexport", "svexport.*"], exclude=["*.__pycache__"])

# The examples are one folder of the checkout and installed as svexport.examples: `svexport demo` runs them.
setup(
    packages=[*PACKAGES, "svexport.examples", "svexport.examples.data"],
    package_dir={"svexport.examples": "examples"},
    **extension(),
)
