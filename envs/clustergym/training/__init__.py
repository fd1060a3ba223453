"""Infrastructure that the trainers share: run folders, logging, checkpoints, progress and distributed training.

Nothing here depends on an algorithm. The parts of PPO that trainers share (``layer_init``, ``compute_gae``, …) are
copied between them on purpose, so that each trainer can be read from top to bottom.
"""

from clustergym.common.checkpoints import CHECKPOINT_NAME, CheckpointError, load_checkpoint, save_checkpoint
from clustergym.training.arguments import check_same_args, plain_args
from clustergym.training.distributed import World, choose_device, init_distributed
from clustergym.training.folders import run_folder
from clustergym.training.logger import RunLogger, read_scalars
from clustergym.training.progress import Progress, print_result
from clustergym.training.random_state import capture_rng_state, derive_seed, restore_rng_state

__all__ = [
    "CHECKPOINT_NAME", "CheckpointError", "Progress", "RunLogger", "World", "capture_rng_state", "check_same_args",
    "choose_device", "derive_seed", "init_distributed", "load_checkpoint", "plain_args", "print_result", "read_scalars",
    "restore_rng_state", "run_folder", "save_checkpoint",
]  # fmt: skip
