"""Connection to a Ray cluster."""

from __future__ import annotations

import os
from typing import Any

from clustergym.common.extras import require

RETRIES = 5
"""Times that Ray starts a piece of work again after a host or process was lost."""


def connect_ray(address: str | None) -> Any:
    """The module ``ray``, connected to a cluster. Without an address, Ray is started on this machine."""
    ray = require("ray", "ray")
    if not ray.is_initialized():
        # Workers must find this checkout if clustergym is not installed.
        environment = {"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}}
        ray.init(address=address, runtime_env=environment, log_to_driver=False, logging_level="warning")
    return ray
