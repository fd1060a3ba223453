"""Server of the GPU allocation agent: HTTP API, store, GPU telemetry and the process that learns.

The policy and its PPO update are in ``cleanrl_ppo/ppo_gpu_alloc_online.py``, which passes them to
:func:`clustergym.agent.server.serve`. The server needs the ``[agent]`` extra.
"""
