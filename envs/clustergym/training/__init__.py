"""What the trainers share: flags, run folders, logs, checkpoints, vector environments and several processes.

Nothing here depends on an algorithm: each trainer in ``cleanrl_ppo/`` can be read from top to bottom.
"""
