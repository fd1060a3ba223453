"""Infrastructure that the trainers share: run folders, logging, checkpoints, progress and distributed training.

Nothing here depends on an algorithm. The parts of PPO that trainers share (``layer_init``, ``compute_gae``, …) are
copied between them on purpose, so that each trainer can be read from top to bottom.
"""

from clustergym.common.checkpoints import CHECKPOINT_NAME, CheckpointError, load_checkpoint, save_checkpoint
from clustergym.training.arguments import (
    BaseArgs,
    RunArgs,
    TrainArgs,
    check_same_args,
    check_values,
    parse_args,
    plain_args,
)
from clustergym.training.distributed import World, choose_device, init_distributed
from clustergym.training.folders import choose_folder, run_folder
from clustergym.training.logger import RunLogger, read_scalars
from clustergym.training.progress import Progress, print_result
from clustergym.training.random_state import capture_rng_state, derive_seed, restore_rng_state
from clustergym.training.run import NonFiniteLoss, Run, check_finite, run_trainer, save_model
from clustergym.training.vector import (
    EpisodeStatistics,
    Step,
    VectorEnvs,
    action_mask,
    flat_size,
    flatten,
    make_vector_env,
    play_and_record,
    play_episodes,
    record_video,
    space_sizes,
)

__all__ = [
    "CHECKPOINT_NAME", "BaseArgs", "CheckpointError", "EpisodeStatistics", "NonFiniteLoss", "Progress", "Run",
    "RunArgs", "RunLogger", "Step", "TrainArgs", "VectorEnvs", "World", "action_mask", "capture_rng_state",
    "check_finite", "check_same_args", "check_values", "choose_device", "choose_folder", "derive_seed", "flat_size",
    "flatten", "init_distributed", "load_checkpoint", "make_vector_env", "parse_args", "plain_args",
    "play_and_record", "play_episodes", "print_result", "read_scalars", "record_video", "restore_rng_state",
    "run_folder", "run_trainer", "save_checkpoint", "save_model", "space_sizes",
]  # fmt: skip
