"""Collector of feedback: reports to the agents what the pods of a node used, and whether they met their objectives.

Workloads need no code for this. Usage comes from a metrics page (DCGM exporter, HAMi) or from NVML, OOM kills and
restarts from the status of the pods, and objectives from Prometheus. It imports neither torch nor numba.
"""
