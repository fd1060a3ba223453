"""Compiled parts of the planners. Like :mod:`clustergym.moe_placement.kernels`, a function works on one layer ``b``."""
