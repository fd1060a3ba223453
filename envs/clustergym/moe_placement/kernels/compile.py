"""How the functions of one environment are compiled: see :mod:`clustergym.common.compiling`."""

from clustergym.common.compiling import PLAIN_PYTHON, device, index, inlined

__all__ = ["PLAIN_PYTHON", "device", "index", "inlined"]
