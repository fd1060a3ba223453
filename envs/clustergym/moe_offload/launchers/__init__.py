"""Run the kernels of one environment over a batch: ``cpu`` on all cores, ``cuda`` on a grid.

Both modules have a class ``Launcher`` with the same methods.
"""
