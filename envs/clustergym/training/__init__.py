"""What the trainers share: flags, run folders, logs, checkpoints, vector environments and several processes.

Nothing that a trainer calls in its loop depends on its algorithm: each file in ``cleanrl_ppo/`` can be read from top to
bottom.

| module | content |
| --- | --- |
| `args` | flags of all trainers, valid values, errors of one line |
| `runs` | ``Run``: folder, seeds, device, logs, checkpoint and resume of one training |
| `logs` | TensorBoard, Weights & Biases, progress bar |
| `envs` | vector environments: creation, state, evaluation episodes |
| `distributed` | ``World``: the processes of ``torchrun`` and what they exchange |
| `policies` | for ``ppo_moe_marl``: a trained policy as a program, ``policy.onnx`` |
"""
