"""Run the per-environment functions over a batch: ``cpu`` under numba's prange, ``cuda`` under a grid.

Both modules offer the same functions over the same named tuples of arrays, so that callers pick one and forget which.
"""
