"""The 37 implementation details of PPO as data: the line of code that implements each, and the tests that check it.

python tests/details/ledger.py     # write docs/reference/37-details.md again after a trainer changed
python tests/details/mutate.py     # break each detail in a copy of its trainer; the tests listed here must fail
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
PAGE = ROOT / "docs" / "reference" / "37-details.md"

AUXILIARY = ("clip annealing", "parallel gradients", "early stop", "masking")


@dataclass(frozen=True)
class Detail:
    """One row of the page."""

    key: str
    """Number in "The 37 Implementation Details of PPO", or the name of one of the four auxiliary details."""
    name: str
    trainer: str
    """File in cleanrl_ppo, without .py."""
    code: str
    """Text that occurs on exactly one line of the trainer: the line that implements the detail."""
    tests: tuple[str, ...]
    """``file::function`` in tests. Each mutation must make at least one of them fail."""
    mutations: tuple[tuple[str, str], ...]
    """(text, replacement): changes that remove the detail. The text occurs exactly once in the trainer."""

    @property
    def source(self) -> Path:
        return ROOT / "cleanrl_ppo" / f"{self.trainer}.py"

    def line(self) -> int:
        """Number of the line that implements the detail."""
        found = [number for number, line in enumerate(self.source.read_text().splitlines(), 1) if self.code in line]
        if len(found) != 1:
            raise ValueError(
                f"detail {self.key}: {self.code!r} is on lines {found} of {self.source.name}, expected one line"
            )
        return found[0]


SLOW = "test_trainer_updates.py::test_update_matches_the_reference"
UPDATE = f"{SLOW}[ppo-defaults]"
STOPS = "test_trainer_updates.py::test_update_stops_after_an_epoch_whose_last_kl_exceeds_the_target"
SCHEDULES = "test_trainer_updates.py::test_schedules_reach_the_update"
JOURNALS = "test_trainer_updates.py::test_rollout_matches_the_journals_of_its_environments"
ROLLOUT = f"{JOURNALS}[ppo-defaults]"
WRAPPERS = "test_ppo_atari.py::test_wrappers_of_training_and_evaluation_games"

DETAILS: list[Detail] = [
    Detail(
        "1",
        "vectorised architecture: num_envs × num_steps; episodes continue in the next rollout",
        "ppo",
        "for noise in agent.draw_noise(*shape).unbind():",
        ("test_ppo.py::test_episodes_continue_in_the_next_rollout", ROLLOUT),
        (
            (
                "            for noise in agent.draw_noise(*shape).unbind():",
                "            self.restart(1)\n            envs = self.envs\n"
                "            for noise in agent.draw_noise(*shape).unbind():",
            ),
            ("steps.append(envs.step(actions))", "steps.append(envs.step(actions[:1].expand_as(actions)))"),
        ),
    ),
    Detail(
        "2",
        "orthogonal initialisation: √2 hidden, 0.01 policy, 1 value, bias 0",
        "ppo",
        "nn.init.orthogonal_(layer.weight, std)",
        ("test_ppo.py::test_weights_are_orthogonal_and_scaled",),
        (
            ("nn.init.orthogonal_(layer.weight, std)", "nn.init.xavier_uniform_(layer.weight, std)"),
            ("nn.init.constant_(layer.bias, bias_const)", "pass"),
            ("std: float = 2**0.5", "std: float = 1.0"),
            ("nn.Linear(hidden, sum(self.components)), std=0.01", "nn.Linear(hidden, sum(self.components)), std=1.0"),
            ("nn.Linear(hidden, 1), std=1.0", "nn.Linear(hidden, 1), std=0.01"),
        ),
    ),
    Detail(
        "3",
        "Adam's epsilon 1e-5",
        "ppo",
        "lr=learning_rate, eps=1e-5",
        ("test_ppo.py::test_adam_epsilon_is_1e_5", UPDATE),
        (("eps=1e-5", "eps=1e-8"), ("eps=1e-5", "eps=1e-5, betas=(0.9, 0.99)")),
    ),
    Detail(
        "4",
        "learning rate annealed linearly to 0",
        "ppo",
        'optimizer.param_groups[0]["lr"] = anneal(args.learning_rate, iteration, run.num_iterations)',
        (
            "test_ppo.py::test_learning_rate_and_clip_range_are_annealed",
            "test_ppo.py::test_anneal_start_middle_and_end",
            f"{SCHEDULES}[annealed-ppo]",
        ),
        (
            (
                "anneal(args.learning_rate, iteration, run.num_iterations)",
                "max(anneal(args.learning_rate, iteration, run.num_iterations), 1e-5)",
            ),
            ('optimizer.param_groups[0]["lr"] = anneal(', "_ = anneal("),
            ("(1.0 - (iteration - 1) / num_iterations)", "(1.0 - iteration / num_iterations)"),
        ),
    ),
    Detail(
        "5",
        "generalised advantage estimation; bootstrapping at truncations (with a flag)",
        "ppo",
        "advantages[t] = last = deltas[t] + decays[t] * last",
        (
            "test_ppo.py::test_gae_matches_its_definition_with_terminations_and_truncations",
            ROLLOUT,
            f"{JOURNALS}[ppo-ends_are_ends]",
            f"{JOURNALS}[ppo-reset_steps]",
        ),
        (
            ("gamma * gae_lambda * (~dones).to(rewards.dtype)", "gamma * gae_lambda * torch.ones_like(rewards)"),
            ("gamma * following * ~terminations", "gamma * following"),
            (
                "torch.where(dones, final_values, torch.cat([values[1:], next_value[None]]))",
                "torch.cat([values[1:], next_value[None]])",
            ),
            ("torch.cat([values[1:], next_value[None]])", "torch.cat([values[1:], 0 * next_value[None]])"),
            ("return advantages, advantages + values", "return advantages, advantages"),
            ("ends = terminations if args.bootstrap_truncated else dones", "ends = dones"),
            ("ends = terminations if args.bootstrap_truncated else dones", "ends = terminations"),
            ("final_values[t, cut] = agent.get_value(last_obs)", "pass"),
            ("return batch if bool(valid.all()) else batch.take(valid.flatten())", "return batch"),
        ),
    ),
    Detail(
        "6",
        "minibatches: shuffled, every index once per epoch",
        "ppo",
        "shuffled = batch.take(torch.randperm(len(batch), device=batch.obs.device))",
        ("test_ppo.py::test_epoch_uses_every_row_once_in_a_new_order", UPDATE),
        (
            (
                "torch.randperm(len(batch), device=batch.obs.device)",
                "torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))",
            ),
            ("batch.take(torch.randperm(len(batch), device=batch.obs.device))", "batch"),
            ("torch.randperm(len(batch), device=batch.obs.device)", "torch.randint(len(batch), (len(batch),))"),
            ("mb = shuffled.take(slice(start, end))", "mb = shuffled.take(slice(0, end - start))"),
        ),
    ),
    Detail(
        "7",
        "advantages normalised in each minibatch",
        "ppo",
        "advantages = normalize_advantages(mb.advantages) if args.norm_adv else mb.advantages",
        ("test_ppo.py::test_advantages_are_normalised", UPDATE),
        (
            ("advantages.std() + 1e-8", "advantages.std(correction=0) + 1e-8"),
            ("advantages.std() + 1e-8", "advantages.std() + 1e-5"),
            ("normalize_advantages(mb.advantages) if args.norm_adv", "mb.advantages if args.norm_adv"),
            (
                "normalize_advantages(mb.advantages) if args.norm_adv",
                "(mb.advantages - batch.advantages.mean()) / (batch.advantages.std() + 1e-8) if args.norm_adv",
            ),
            ("(advantages - advantages.mean()) / (advantages.std() + 1e-8)", "advantages / (advantages.std() + 1e-8)"),
            ("(advantages - advantages.mean()) / (advantages.std() + 1e-8)", "(advantages - advantages.mean())"),
        ),
    ),
    Detail(
        "8",
        "clipped surrogate objective",
        "ppo",
        "clipped = -advantages * ratio.clamp(1 - clip_coef, 1 + clip_coef)",
        ("test_ppo.py::test_clipped_surrogate_by_hand", UPDATE),
        (
            ("ratio.clamp(1 - clip_coef, 1 + clip_coef)", "ratio"),
            ("return torch.max(unclipped, clipped).mean()", "return torch.min(unclipped, clipped).mean()"),
            ("return torch.max(unclipped, clipped).mean()", "return clipped.mean()"),
            ('clip_coef if args.use_clipping else float("inf")', 'float("inf")'),
        ),
    ),
    Detail(
        "9",
        "value loss clipped: the larger of the two errors",
        "ppo",
        "return 0.5 * torch.max(unclipped, (clipped_values - returns) ** 2).mean()",
        ("test_ppo.py::test_value_loss_is_the_larger_of_unclipped_and_clipped", UPDATE),
        (
            ("old_values + (new_values - old_values).clamp", "old_values + (new_values - returns).clamp"),
            ("0.5 * torch.max(unclipped, (clipped_values", "0.5 * torch.min(unclipped, (clipped_values"),
            ("0.5 * torch.max(unclipped, (clipped_values - returns) ** 2)", "0.5 * ((clipped_values - returns) ** 2)"),
            ("clip_coef if args.clip_vloss else None", "None"),
        ),
    ),
    Detail(
        "10",
        "one loss: policy − c·entropy + c·value",
        "ppo",
        "loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss",
        (UPDATE,),
        (
            ("pg_loss - args.ent_coef * entropy", "pg_loss + args.ent_coef * entropy"),
            ("- args.ent_coef * entropy +", "+"),
            ("+ args.vf_coef * v_loss", "+ v_loss"),
        ),
    ),
    Detail(
        "11",
        "gradients clipped by their global norm, 0.5",
        "ppo",
        "grad_norm = nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)",
        ("test_ppo.py::test_gradients_are_clipped_before_the_step", UPDATE),
        (
            ("clip_grad_norm_(parameters, args", "clip_grad_norm_(agent.actor_head.parameters(), args"),
            ("clip_grad_norm_(parameters, args.max_grad_norm)", "clip_grad_norm_(parameters, 1e9)"),
            ("max_grad_norm: float = 0.5", "max_grad_norm: float = 5.0"),
        ),
    ),
    Detail(
        "12",
        "debug variables: losses, entropy, KL twice, clip fraction, explained variance",
        "ppo",
        'names = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "grad_norm")',
        (
            "test_ppo.py::test_every_debug_variable_is_logged",
            "test_ppo.py::test_explained_variance_by_hand",
            "test_ppo.py::test_kl_estimators_match_the_exact_kl_of_categoricals",
            UPDATE,
        ),
        (
            ('metrics["losses/explained_variance"] = explained_variance(batch.values, batch.returns)', "pass"),
            ("approx_kl = k3.mean()", "approx_kl = k1.mean()"),
            ("((ratio - 1.0).abs() > clip_coef)", "((ratio - 1.0) > clip_coef)"),
            ("return -logratio, logratio**2 / 2", "return logratio, logratio**2 / 2"),
            ("(returns - values).var() / variance", "(returns - values).var() / values.var()"),
        ),
    ),
    Detail(
        "13",
        "shared and separate networks",
        "ppo",
        "self.critic_trunk = self.actor_trunk if share_network else trunk()",
        ("test_ppo.py::test_networks_are_separate_or_shared", "test_ppo.py::test_share_network_flag_is_used"),
        (
            ("self.actor_trunk if share_network else trunk()", "trunk()"),
            ("self.actor_trunk if share_network else trunk()", "self.actor_trunk"),
            ("args.hidden, args.share_network", "args.hidden, False"),
        ),
    ),
    Detail(
        "14",
        "no-op reset: 1 to 30 no-op frames",
        "ppo_atari",
        "for _ in range(self.unwrapped.np_random.integers(1, self.noop_max + 1)):",
        ("test_ppo_atari.py::test_game_starts_with_1_to_30_noop_frames", WRAPPERS),
        (
            ("range(self.unwrapped.np_random.integers(1, self.noop_max + 1))", "range(self.noop_max)"),
            ("noop_max: int = 30", "noop_max: int = 10"),
            ("    env = NoopReset(env)\n", ""),
        ),
    ),
    Detail(
        "15",
        "max-and-skip: four frames, maximum of the last two",
        "ppo_atari",
        "return np.max(frames, axis=0), total, terminated, truncated, info",
        ("test_ppo_atari.py::test_action_repeats_for_4_frames_and_the_last_2_are_merged", WRAPPERS),
        (
            ("np.max(frames, axis=0), total", "frames[-1], total"),
            ("skip: int = 4", "skip: int = 2"),
            ("total += float(reward)", "total = float(reward)"),
            ("deque(maxlen=2)", "deque(maxlen=4)"),
            ("    env = MaxAndSkip(env)\n", ""),
        ),
    ),
    Detail(
        "16",
        "episodic life: a lost life ends the episode, not the game",
        "ppo_atari",
        "if 0 < lives < self.lives:",
        (
            "test_ppo_atari.py::test_lost_life_ends_the_episode_but_not_the_game",
            "test_ppo_atari.py::test_last_lost_life_does_not_end_the_episode_early",
            WRAPPERS,
        ),
        (
            ("if 0 < lives < self.lives:", "if False:"),
            ("if 0 < lives < self.lives:", "if lives < self.lives:"),
            ("if self.game_over or seed is not None:", "if True:"),
            ("        env = EpisodicLife(env)\n", "        pass\n"),
        ),
    ),
    Detail(
        "17",
        "fire on reset",
        "ppo_atari",
        "for action in (1, 2):",
        ("test_ppo_atari.py::test_fire_is_pressed_on_reset", WRAPPERS),
        (("for action in (1, 2):", "for action in (2,):"), ("        env = FireReset(env)\n", "        pass\n")),
    ),
    Detail(
        "18",
        "frames resized to 84 × 84 grayscale",
        "ppo_atari",
        "return cv2.resize(gray, (self.size, self.size), interpolation=cv2.INTER_AREA)",
        (
            "test_ppo_atari.py::test_frames_are_grayscale_and_84_by_84",
            "test_ppo_atari.py::test_resizing_averages_over_areas",
        ),
        (
            ("cv2.INTER_AREA", "cv2.INTER_NEAREST"),
            ("size: int = 84", "size: int = 96"),
            ("cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY)", "frame[..., 0]"),
        ),
    ),
    Detail(
        "19",
        "rewards clipped to their sign",
        "ppo_atari",
        "return float(np.sign(reward))",
        ("test_ppo_atari.py::test_rewards_are_clipped_to_their_sign", WRAPPERS),
        (("float(np.sign(reward))", "float(reward)"), ("        env = ClipReward(env)\n", "        pass\n")),
    ),
    Detail(
        "20",
        "four frames stacked",
        "ppo_atari",
        "return FrameStackObservation(env, 4)",
        ("test_ppo_atari.py::test_four_frames_are_stacked_oldest_first",),
        (
            ("FrameStackObservation(env, 4)", "FrameStackObservation(env, 3)"),
            ("FrameStackObservation(env, 4)", 'FrameStackObservation(env, 4, padding_type="zero")'),
        ),
    ),
    Detail(
        "21",
        "the Nature CNN, shared by policy and value",
        "ppo_atari",
        "layer_init(nn.Conv2d(4, 32, 8, stride=4))",
        ("test_ppo_atari.py::test_network_is_the_nature_cnn_shared_by_both_heads",),
        (
            ("self.critic_head(features)", "self.critic_head(features.detach())"),
            ("nn.Conv2d(64, 64, 3, stride=1)", "nn.Conv2d(64, 64, 3, stride=1, padding=1)"),
            ("nn.Conv2d(4, 32, 8, stride=4)", "nn.Conv2d(4, 32, 8, stride=4, padding=2)"),
        ),
    ),
    Detail(
        "22",
        "pixels scaled to [0, 1]",
        "ppo_atari",
        "features = self.network(obs / 255.0)",
        ("test_ppo_atari.py::test_pixels_are_scaled_to_the_unit_interval",),
        (("obs / 255.0", "obs.float()"),),
    ),
    Detail(
        "23",
        "a normal distribution for continuous actions",
        "ppo_gpu_alloc",
        "actions[step] = mean + std * noise[step]",
        (
            "test_ppo_details.py::test_sampled_actions_follow_the_policy",
            "test_ppo_details.py::test_gaussian_functions_match_torch_distributions",
        ),
        (
            ("actions[step] = mean + std * noise[step]", "actions[step] = mean"),
            ("noise = torch.randn(*shape, 2)", "noise = 2 * torch.rand(*shape, 2) - 1"),
            ("(std.log() + 0.5 * np.log(2 * np.pi))).sum(-1)", "0.5 * np.log(2 * np.pi)).sum(-1)"),
        ),
    ),
    Detail(
        "24",
        "log standard deviation independent of the state, initially 0",
        "ppo_gpu_alloc",
        "self.log_std = nn.Parameter(torch.zeros(num_actions))",
        ("test_ppo_details.py::test_standard_deviation_is_a_state_independent_parameter",),
        (
            ("nn.Parameter(torch.zeros(num_actions))", "nn.Parameter(torch.full((num_actions,), -0.5))"),
            ("nn.Parameter(torch.zeros(num_actions))", "torch.zeros(num_actions)"),
        ),
    ),
    Detail(
        "25",
        "independent components: log-densities summed",
        "ppo_gpu_alloc",
        "return (-0.5 * deviations**2 - (std.log() + 0.5 * np.log(2 * np.pi))).sum(-1)",
        ("test_ppo_details.py::test_gaussian_functions_match_torch_distributions",),
        (
            ("0.5 * np.log(2 * np.pi))).sum(-1)", "0.5 * np.log(2 * np.pi))).mean(-1)"),
            ("0.5 * np.log(2 * np.pi) + std.log()).sum(-1)", "0.5 * np.log(2 * np.pi) + std.log()).mean(-1)"),
            ("0.5 * np.log(2 * np.pi) + std.log()).sum(-1)", "0.5 * np.log(2 * np.pi) + std.log())[..., 0]"),
        ),
    ),
    Detail(
        "26",
        "separate networks for policy and value",
        "ppo_gpu_alloc",
        "self.critic = network(1, 1.0)",
        ("test_ppo_details.py::test_policy_and_value_have_separate_networks",),
        (
            (
                "self.critic = network(1, 1.0)",
                "self.critic = nn.Sequential(*list(self.actor)[:4], layer_init(nn.Linear(hidden, 1), 1.0))",
            ),
        ),
    ),
    Detail(
        "27",
        "actions clipped for the environment, stored raw",
        "ppo_gpu_alloc",
        "next_obs, reward, ended = envs.step(clip_action(actions[step]))",
        ("test_ppo_details.py::test_actions_are_clipped_for_the_environment_and_stored_raw",),
        (
            ("envs.step(clip_action(actions[step]))", "envs.step(actions[step])"),
            ("actions[step] = mean + std * noise[step]", "actions[step] = clip_action(mean + std * noise[step])"),
            ("return raw.clamp(0.0, 1.0)", "return raw.sigmoid()"),
        ),
    ),
    Detail(
        "28",
        "observations normalised by running statistics, which are saved and fixed in evaluation",
        "ppo_gpu_alloc",
        "scaled = (obs.numpy() - statistics.mean) / np.sqrt(statistics.var + 1e-8)",
        (
            "test_ppo_details.py::test_observations_are_normalised_and_clipped_to_10",
            "test_ppo_details.py::test_running_statistics_match_those_of_all_rows",
            "test_ppo_details.py::test_statistics_are_updated_in_training_saved_and_fixed_in_evaluation",
        ),
        (
            ("scaled = (obs.numpy() - statistics.mean) /", "scaled = obs.numpy() /"),
            ("(obs.numpy() - statistics.mean) / np.sqrt(statistics.var + 1e-8)", "obs.numpy() - statistics.mean"),
            (" + (1 - new) * delta**2", ""),
            ("                    self.statistics.update(next_obs)\n", "                    pass\n"),
            ('            "statistics": self.statistics.state_dict(),\n            "scaler"', '            "scaler"'),
            (
                "        outputs = agent.actor(rollouts.normalize(obs)",
                "        rollouts.statistics.update(obs)\n        outputs = agent.actor(rollouts.normalize(obs)",
            ),
        ),
    ),
    Detail(
        "29",
        "normalised observations clipped to ±10",
        "ppo_gpu_alloc",
        "NORM_CLIP = 10.0",
        ("test_ppo_details.py::test_observations_are_normalised_and_clipped_to_10",),
        (
            ("NORM_CLIP = 10.0", "NORM_CLIP = 5.0"),
            (
                "+ 1e-8)\n    return torch.from_numpy(scaled).clamp(-NORM_CLIP, NORM_CLIP).float()",
                "+ 1e-8)\n    return torch.from_numpy(scaled).float()",
            ),
        ),
    ),
    Detail(
        "30",
        "rewards divided by the standard deviation of the discounted return",
        "ppo_gpu_alloc",
        "scaled = rewards.numpy() / np.sqrt(self.statistics.var + 1e-8)",
        (
            "test_ppo_details.py::test_rewards_are_divided_by_the_standard_deviation_of_the_return",
            "test_ppo_details.py::test_scaled_rewards_are_used_for_the_advantages",
        ),
        (
            ("scaled = rewards.numpy() /", "scaled = (rewards.numpy() - self.statistics.mean) /"),
            ("rewards.numpy() + self.gamma * self.returns", "rewards.double().numpy().copy()"),
            ("self.returns[dones.numpy()] = 0.0", "pass"),
            ("rewards[step] = self.scaler(reward, ended) if args.norm_reward else reward", "rewards[step] = reward"),
        ),
    ),
    Detail(
        "31",
        "scaled rewards clipped to ±10",
        "ppo_gpu_alloc",
        "        return torch.from_numpy(scaled).clamp(-NORM_CLIP, NORM_CLIP).float()",
        ("test_ppo_details.py::test_scaled_rewards_are_clipped_to_10",),
        (
            (
                "        return torch.from_numpy(scaled).clamp(-NORM_CLIP, NORM_CLIP).float()",
                "        return torch.from_numpy(scaled).float()",
            ),
        ),
    ),
    Detail(
        "32",
        "LSTM weights orthogonal with standard deviation 1, biases 0",
        "ppo_lstm",
        "nn.init.orthogonal_(parameter, 1.0)",
        ("test_ppo_details.py::test_lstm_weights_are_orthogonal_and_biases_are_zero",),
        (
            ("nn.init.orthogonal_(parameter, 1.0)", "nn.init.orthogonal_(parameter, 2**0.5)"),
            ("nn.init.constant_(parameter, 0.0)", "pass"),
            ("init_lstm(nn.LSTM(hidden, hidden))", "nn.LSTM(hidden, hidden)"),
        ),
    ),
    Detail(
        "33",
        "LSTM state initially zero",
        "ppo_lstm",
        "zeros = torch.zeros(1, num_envs, self.lstm.hidden_size, device=self.log_std.device)",
        ("test_ppo_details.py::test_initial_lstm_state_is_zero",),
        (
            ("zeros = torch.zeros(1, num_envs", "zeros = torch.ones(1, num_envs"),
            ("self.state = agent.initial_state(args.num_envs)", "self.state = [torch.rand(1, args.num_envs, 16)] * 2"),
        ),
    ),
    Detail(
        "34",
        "LSTM state reset at the end of an episode, in rollouts and updates",
        "ppo_lstm",
        "keep = (~starts[begin]).to(encoded.device)[None, :, None]",
        (
            "test_ppo_details.py::test_lstm_state_is_reset_at_the_start_of_an_episode",
            "test_ppo_details.py::test_rollout_and_update_reset_the_lstm_state_at_the_same_steps",
        ),
        (
            ("keep = (~starts[begin]).to(encoded.device)[None, :, None]", "keep = 1.0"),
            ("self.start = ended.clone()", "pass"),
            ("agent(mb.obs, mb.starts, mb.state)", "agent(mb.obs, mb.starts & False, mb.state)"),
            (
                "agent(obs[step : step + 1].to(device), self.start[None], self.state)",
                "agent(obs[step : step + 1].to(device), self.start[None] & False, self.state)",
            ),
        ),
    ),
    Detail(
        "35",
        "minibatches of whole sequences, by environment",
        "ppo_lstm",
        "for envs in torch.randperm(args.num_envs).chunk(args.num_minibatches):",
        ("test_ppo_details.py::test_minibatches_hold_whole_sequences", f"{SLOW}[ppo_lstm-defaults]"),
        (
            ("torch.randperm(args.num_envs).chunk", "torch.arange(args.num_envs).chunk"),
            ("torch.randperm(args.num_envs).chunk", "torch.randint(args.num_envs, (args.num_envs,)).chunk"),
            ("torch.randperm(args.num_envs).chunk(args.num_minibatches)", "[torch.randperm(args.num_envs)]"),
            ("if args.num_envs % args.num_minibatches:", "if False:"),
        ),
    ),
    Detail(
        "36",
        "LSTM states recomputed in the update from the first state of the rollout",
        "ppo_lstm",
        "initial = (self.state[0].clone(), self.state[1].clone())",
        ("test_ppo_details.py::test_update_starts_from_the_lstm_state_of_the_rollout",),
        (
            (
                "initial = (self.state[0].clone(), self.state[1].clone())",
                "initial = agent.initial_state(args.num_envs)",
            ),
            ("batch = Batch(*parts, starts, initial)", "batch = Batch(*parts, starts, self.state)"),
        ),
    ),
    Detail(
        "37",
        "MultiDiscrete: independent components, log-probabilities and entropies are added",
        "ppo",
        "logprobs = logprobs + all_logprobs.gather(-1, chosen[:, None]).squeeze(-1)",
        (
            "test_ppo.py::test_log_probabilities_and_entropies_of_components_are_added",
            "test_ppo.py::test_every_component_is_sampled_from_its_own_distribution",
        ),
        (
            ("logprobs = logprobs + all_logprobs", "logprobs = all_logprobs"),
            ("entropies = entropies + categorical_entropy", "entropies = categorical_entropy"),
            (
                "[part.argmax(-1) for part in scores.split(self.components, -1)]",
                "[scores.argmax(-1)] * len(self.components)",
            ),
        ),
    ),
    Detail(
        "clip annealing",
        "clip range annealed (with a flag)",
        "ppo",
        "clip_coef = anneal(args.clip_coef, iteration, run.num_iterations) if args.anneal_clip else args.clip_coef",
        (
            "test_ppo.py::test_learning_rate_and_clip_range_are_annealed",
            "test_ppo.py::test_learning_rate_and_clip_range_are_constant_without_annealing",
            f"{SCHEDULES}[annealed-ppo]",
        ),
        (
            (
                "anneal(args.clip_coef, iteration, run.num_iterations) if",
                "max(anneal(args.clip_coef, iteration, run.num_iterations), 1e-3) if",
            ),
            (
                "anneal(args.clip_coef, iteration, run.num_iterations) if args.anneal_clip else args.clip_coef",
                "args.clip_coef",
            ),
            ("if args.anneal_clip else args.clip_coef", "if True else args.clip_coef"),
        ),
    ),
    Detail(
        "parallel gradients",
        "gradients averaged over all processes of torchrun",
        "ppo",
        "world.average_gradients(parameters)",
        ("test_ppo_runs.py::test_two_processes_train_one_network", f"{SLOW}[ppo-two_ranks]"),
        (
            (
                "            world.average_gradients(parameters)\n"
                "            grad_norm = nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)\n",
                "            grad_norm = nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)\n"
                "            world.average_gradients(parameters)\n",
            ),
            ("world.average_gradients(parameters)", "pass"),
            ("rollouts.restart(run.seed_torch(iteration))", "rollouts.restart(derive_seed(args.seed, iteration, 0))"),
        ),
    ),
    Detail(
        "early stop",
        "update stops after an epoch whose KL exceeds target_kl",
        "ppo",
        "if args.target_kl is not None and world.mean(approx_kl.item()) > args.target_kl:",
        (
            "test_ppo.py::test_target_kl_stops_the_update_after_an_epoch",
            f"{STOPS}[one_rank-ppo]",
            f"{STOPS}[two_ranks-ppo]",
        ),
        (
            ("world.mean(approx_kl.item())", "world.mean(seen[0][4].item())"),
            ("world.mean(approx_kl.item())", "world.mean(seen[-args.num_minibatches][4].item())"),
            ("world.mean(approx_kl.item())", "approx_kl.item()"),
            ("world.mean(approx_kl.item()) > args.target_kl", "False"),
            ("world.mean(approx_kl.item()) > args.target_kl", "True"),
        ),
    ),
    Detail(
        "masking",
        "invalid actions: logits −1e8, excluded from the entropy",
        "ppo",
        "return logits if mask is None else torch.where(mask, logits, MASKED_LOGIT)",
        (
            "test_ppo.py::test_masked_distribution_covers_only_valid_actions",
            "test_ppo.py::test_invalid_actions_are_never_played",
            "test_ppo.py::test_ratio_is_one_in_the_first_minibatch",
            f"{SLOW}[ppo-masked]",
        ),
        (
            ("return logits if mask is None else torch.where(mask, logits, MASKED_LOGIT)", "return logits"),
            ("MASKED_LOGIT = -1e8", "MASKED_LOGIT = -1.0"),
            ("scores = mask_logits(self.get_logits(obs), masks) + noise", "scores = self.get_logits(obs) + noise"),
            ("parts = mask_logits(logits, masks).split", "parts = logits.split"),
            ("obs, masks = envs.obs, envs.masks", "obs, masks = envs.obs, None"),
        ),
    ),
]


def page() -> str:
    """The content of docs/reference/37-details.md."""
    rows = [
        f"| {detail.key} | {detail.name} | `cleanrl_ppo/{detail.trainer}.py:{detail.line()}` "
        f"| `{detail.code.strip()}` | " + ", ".join(f"`{test}`" for test in detail.tests) + " |"
        for detail in DETAILS
    ]
    mutations = sum(len(detail.mutations) for detail in DETAILS)
    return (
        f"""# The 37 details of PPO

[The 37 Implementation Details of Proximal Policy Optimization][paper] (Huang et al., ICLR blog track 2022) lists what a
PPO implementation needs to reproduce published results. This page shows the line of code that implements each detail,
and the tests in `tests/` that fail without it.

Details 1–13 are core, 14–22 Atari, 23–31 continuous actions, 32–36 LSTM, and 37 MultiDiscrete. The last four rows are
the auxiliary details. Functions that trainers share (`layer_init`, `compute_gae`, …) are identical in all of them, so
a row about one of these functions holds for every trainer (`tests/test_trainers_agree.py`).

After a change of a trainer, `python tests/details/ledger.py` writes this page again. `tests/details/test_ledger.py`
fails if a line has moved or a test is missing. `python tests/details/mutate.py` removes the details in copies of the
trainers, in {mutations} ways, and prints the test that fails for each.

[paper]: https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/

| # | detail | line | code | tests that fail without it |
| --- | --- | --- | --- | --- |
"""
        + "\n".join(rows)
        + "\n"
    )


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(ROOT)}: {len(DETAILS)} rows")
