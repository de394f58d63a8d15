"""fxfuser: a `torch.compile` backend that fuses ATen graphs into as few Triton kernels as they allow.

    torch.compile(fn, backend="fxfuser")
"""

from fxfuser.backend import fxfuser
from fxfuser.config import Config
from fxfuser.explanation import Explanation, explain
from fxfuser.ops import boundary, fuse

__version__ = "0.1.0"
__all__ = ["Config", "Explanation", "__version__", "boundary", "explain", "fuse", "fxfuser"]
