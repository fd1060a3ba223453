"""Run the kernels of one environment over a batch: ``cpu`` on all cores, ``cuda`` on a grid.

Both modules offer the same functions over the same named tuples of arrays.
"""
