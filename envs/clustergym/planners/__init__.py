"""Planners: recorded traffic and the current placement in, the next placement out."""
