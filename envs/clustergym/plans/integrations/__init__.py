"""Planners inside serving engines.

| module | content |
| --- | --- |
| `eplb` | :func:`~clustergym.plans.integrations.eplb.rebalance_experts`, a drop-in for that of deepseek-ai/EPLB |
| `vllm` | a policy of vLLM's expert-parallel load balancer |
| `sglang` | an algorithm of SGLang's EPLB manager |
| `planners` | any planner that needs loads only, by its name, for both engines |
| `settings` | the environment variables |

Both engines load plugins of installed packages. Ours do nothing unless the environment variable ``CLUSTERGYM_EPLB`` or
``CLUSTERGYM_EPLB_PLAN`` is set, so that installing clustergym beside an engine changes nothing:

- vLLM: ``CLUSTERGYM_EPLB=1 vllm serve … --enable-expert-parallel --enable-eplb``
- SGLang: ``CLUSTERGYM_EPLB=1 python -m sglang.launch_server … --enable-eplb``

1 is our EPLB. The name of another planner that needs loads only (``CLUSTERGYM_EPLB=flashlb``) uses that planner.
"""
