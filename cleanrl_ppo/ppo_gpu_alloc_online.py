"""The GPU allocation agent behind HTTP, learning from feedback: the policy of ppo_gpu_alloc.py on a live node.

    python cleanrl_ppo/ppo_gpu_alloc_online.py --port 8080
    python cleanrl_ppo/ppo_gpu_alloc_online.py --port 8080 --store DIR --token-file F --init-checkpoint CKPT --explore best-effort

    POST /allocate  {"owner", "cores", "memory", "qos_class"}  ->  {"allocation_id", "cores", "memory", "policy_version"}
    POST /feedback  {"allocation_id", "actual_usage", "qos_met", "pods", "memory_used", "oom"}  ->  {"status", "reward"}
    GET  /healthz /readyz /metrics /docs

An allocation is a sampled action, stored with its log-probability before it is answered. Feedback turns it into one experience,
once. A process of its own reads experiences from the store, makes a PPO update at 32 or more, and replaces the checkpoint;
the server picks the new policy up between two requests. The checkpoint says up to which feedback it has learned, so
that a crash at any moment neither loses an experience nor learns from one twice. docs/agent.md explains the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import gc
import hmac
import json
import logging
import math
import multiprocessing
import os
import re
import secrets
import signal
import sqlite3
import ssl
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro
import uvicorn
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client import Counter as PrometheusCounter
from prometheus_client.core import CounterMetricFamily
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from clustergym.gpu_allocation.history import N_FEATURES, features, new_history, remember
from clustergym.gpu_allocation.reward import compute_reward
from clustergym.gpu_allocation.space import (
    MAX_CORES,
    MAX_MEMORY_MB,
    MIN_CORES,
    MIN_MEMORY_MB,
    STATE_NAMES,
    encode_state,
    grant,
)
from clustergym.training import (
    CHECKPOINT_NAME,
    CheckpointError,
    RunLogger,
    choose_device,
    derive_seed,
    load_checkpoint,
    plain_args,
    save_checkpoint,
)

KIND = "ppo_gpu_alloc_online"
STORE_SCHEMA = 1
NORM_CLIP = 10.0
STATUSES = ("accepted", "duplicate", "unknown", "expired", "stale")
MAX_REQUEST_MB = float(1 << 20)
OPEN_IN_MEMORY = 100_000
OWNERS_IN_MEMORY = 50_000
log = logging.getLogger("clustergym.agent")


@dataclass
class Args:
    port: int = 8080
    """Port to listen on."""
    host: str = "127.0.0.1"
    """Address to listen on. Any but a loopback address needs --token-file or --client-ca."""
    store: Path = Path("runs/ppo_gpu_alloc_online")
    """Folder of the database and the checkpoint. What it holds is resumed."""
    token_file: Path | None = None
    """File with the bearer token that callers must show; a rotated token is picked up while running."""
    init_checkpoint: Path | None = None
    """Checkpoint of ppo_gpu_alloc.py to start from, where the store holds none yet."""
    explore: Literal["off", "best-effort", "all"] = "all"
    """Whose allocations are sampled, and learned from: nobody's (the mean is served), best-effort pods', everybody's."""
    shadow: bool = False
    """Decide and log, but grant what was requested."""
    ttl_s: float = 86_400.0
    """Feedback later than this after its allocation is expired."""
    max_policy_lag: int = 16
    """Feedback on a decision of a policy more than this many updates old is stale: remembered, but not learned from."""
    durability: Literal["process", "power"] = "process"
    """An answered request survives a killed process, or also a power failure (an fsync for each group of requests)."""
    telemetry_s: float = 0.5
    """Seconds between two looks at the GPU; 0 looks at each request."""
    gpu_index: int = 0
    """The GPU that is shared."""
    max_body_bytes: int = 16_384
    """Longer request bodies are refused."""
    retention_days: float = 30.0
    """Allocations older than this are deleted from the store."""
    tls_cert: Path | None = None
    """Serve HTTPS with this certificate (PEM)."""
    tls_key: Path | None = None
    """Its private key."""
    client_ca: Path | None = None
    """Ask callers for a certificate signed by this authority (mutual TLS)."""

    seed: int = 1
    """Of the first weights and of exploration; a restarted server explores with other numbers."""
    run_dir: Path | None = None
    """Folder of the TensorBoard curves; by default the store."""
    resume: bool = True
    """Go on from what the store holds; --no-resume refuses a store that has been used."""
    cuda: bool = False
    """Learn on the GPU. The network is small: leave the GPU to the pods."""
    track: bool = False
    """Log to Weights & Biases as well; offline where there is no account."""
    save_model: bool = False
    """At the end, write the policy to model.pt in the run folder as ppo_gpu_alloc.py does."""

    batch_size: int = 32
    """Experiences that an update waits for."""
    max_batch: int = 1024
    """At most so many in one update, where more are waiting."""
    learning_rate: float = 2e-3
    """Adam's step size."""
    gamma: float = 0.0
    """Discount. 0 by default: feedback tells what one allocation came to, pods' feedback comes in no order, and what an allocation
    does to later pods is small beside their own differences."""
    gae_lambda: float = 0.95
    """Weight of longer returns in the advantage, for gamma above 0."""
    update_epochs: int = 10
    """Passes over a batch: experiences are dear on a live node."""
    target_kl: float | None = 0.02
    """Stop an update after the epoch whose approximate KL exceeds this."""
    minibatch_size: int = 32
    """Experiences in one step of the optimiser, at least; a long batch is cut into at most 16 parts."""
    norm_adv: bool = True
    """Normalise advantages in each minibatch."""
    clip_coef: float = 0.2
    """Range of the ratio between the new policy and the one that decided."""
    ent_coef: float = 0.0
    """Weight of the entropy bonus."""
    vf_coef: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Global norm that gradients are clipped to."""
    action_scale: float = 0.1
    """Standard deviation of exploration (of a range of 1) at the start, where there is no --init-checkpoint."""
    min_std: float = 0.01
    """Exploration never falls below this: a node's pods change, and a policy without noise would not notice."""
    update_interval_s: float = 0.2
    """Seconds between two looks for new experiences, and at least between two updates."""


# ALGO LOGIC: functions that are identical in every trainer (tests/test_trainers_agree.py)


def layer_init(layer: nn.Linear | nn.Conv2d, std: float = 2**0.5, bias_const: float = 0.0) -> nn.Linear | nn.Conv2d:
    """Initialise a layer with orthogonal weights of gain ``std`` and a constant bias."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


def compute_gae(
    rewards: Tensor,
    values: Tensor,
    terminations: Tensor,
    dones: Tensor,
    next_value: Tensor,
    final_values: Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation. Returns (advantages, returns), both of shape (steps, envs).

    ``terminations`` and ``dones`` (terminated or truncated) describe the outcome of step t. If an episode ended at step
    t, ``final_values[t]`` is the value of its last observation. It is used after a truncation, not after a termination.
    ``next_value`` (envs,) is the value of the observation that follows the last step of the rollout.
    """
    advantages = torch.zeros_like(rewards)
    last = torch.zeros_like(next_value)
    for t in reversed(range(len(rewards))):
        following = values[t + 1] if t + 1 < len(rewards) else next_value
        following = torch.where(dones[t], final_values[t], following)
        delta = rewards[t] + gamma * following * ~terminations[t] - values[t]
        last = delta + gamma * gae_lambda * last * ~dones[t]
        advantages[t] = last
    return advantages, advantages + values


def normalize_advantages(advantages: Tensor) -> Tensor:
    """Normalise to mean 0 and standard deviation 1 within the minibatch."""
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8)


def policy_loss(ratio: Tensor, advantages: Tensor, clip_coef: float) -> Tensor:
    """Clipped surrogate loss: for each sample, the larger of the unclipped and the clipped loss."""
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_coef, 1 + clip_coef)
    return torch.max(unclipped, clipped).mean()


def value_loss(new_values: Tensor, old_values: Tensor, returns: Tensor, clip_coef: float | None) -> Tensor:
    """Half the mean squared error. With ``clip_coef``, the larger of the errors of the new and the clipped new value."""
    unclipped = (new_values - returns) ** 2
    if clip_coef is None:
        return 0.5 * unclipped.mean()
    clipped_values = old_values + (new_values - old_values).clamp(-clip_coef, clip_coef)
    return 0.5 * torch.max(unclipped, (clipped_values - returns) ** 2).mean()


def kl_estimators(logratio: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Estimates (k1, k2, k3) of KL(old ‖ new) from samples of the old policy, where logratio = log new − log old.

    k1 = −log r is unbiased but has high variance and can be negative. k2 = (log r)² / 2 is biased with low variance.
    k3 = (r − 1) − log r is unbiased with low variance and never negative. See http://joschu.net/blog/kl-approx.html.
    """
    return -logratio, logratio**2 / 2, logratio.exp() - 1 - logratio


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 − Var[returns − values] / Var[returns]: 1 if the values are perfect, 0 if constant, NaN if returns are constant."""
    variance = returns.var()
    return float(1 - (returns - values).var() / variance) if variance > 0 else float("nan")


def make_optimizer(agent: nn.Module, learning_rate: float) -> torch.optim.Adam:
    # The fused version updates all parameters in one kernel, on CPU and GPU.
    return torch.optim.Adam(agent.parameters(), lr=learning_rate, eps=1e-5, fused=True)


# ALGO LOGIC: continuous actions


def gaussian_logprob(actions: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log-density of independent normal components, summed over the last dimension."""
    return (-((actions - mean) ** 2) / (2 * std**2) - std.log() - 0.5 * np.log(2 * np.pi)).sum(-1)


def gaussian_entropy(std: Tensor) -> Tensor:
    """Entropy of independent normal components, summed over the last dimension."""
    return (0.5 + 0.5 * np.log(2 * np.pi) + std.log()).sum(-1)


class RunningMeanStd:
    """Running mean and variance of all rows, updated batch by batch (Chan et al., 1979)."""

    def __init__(self, shape: tuple[int, ...] = (), device: torch.device | str = "cpu") -> None:
        self.mean = torch.zeros(shape, dtype=torch.float64, device=device)
        self.var = torch.ones(shape, dtype=torch.float64, device=device)
        self.count = torch.tensor(1e-4, dtype=torch.float64, device=device)

    def update(self, rows: Tensor) -> None:
        """Add a batch of rows (n, *shape)."""
        rows = rows.double()
        n = len(rows)
        delta = rows.mean(0) - self.mean
        total = self.count + n
        squares = self.var * self.count + rows.var(0, correction=0) * n + delta**2 * self.count * n / total
        self.mean, self.var, self.count = self.mean + delta * n / total, squares / total, total

    def state_dict(self) -> dict[str, Tensor]:
        return {"mean": self.mean, "var": self.var, "count": self.count}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.mean, self.var, self.count = state["mean"], state["var"], state["count"]


def normalize_obs(obs: Tensor, statistics: RunningMeanStd) -> Tensor:
    """Normalise by the running mean and variance and clip to ±10."""
    scaled = (obs - statistics.mean) / torch.sqrt(statistics.var + 1e-8)
    return scaled.clamp(-NORM_CLIP, NORM_CLIP).float()


class Agent(nn.Module):
    """A Gaussian policy whose mean is a sigmoid, with a standard deviation of its own, and a value function: two networks."""

    def __init__(self, obs_size: int, num_actions: int = 2, hidden: int = 64, action_scale: float = 0.2) -> None:
        super().__init__()

        def network(outputs: int, std: float) -> nn.Sequential:
            return nn.Sequential(
                layer_init(nn.Linear(obs_size, hidden)),
                nn.ReLU(),
                layer_init(nn.Linear(hidden, hidden)),
                nn.ReLU(),
                layer_init(nn.Linear(hidden, outputs), std=std),
            )

        self.actor = network(num_actions, 0.01).append(nn.Sigmoid())
        self.critic = network(1, 1.0)
        self.log_std = nn.Parameter(torch.zeros(num_actions))
        self.action_scale = action_scale

    def std(self) -> Tensor:
        """(actions,) the same in every state; ``action_scale`` at log std 0."""
        return self.action_scale * self.log_std.exp()

    def get_value(self, obs: Tensor) -> Tensor:
        return self.critic(obs).squeeze(-1)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """(means of the actions, values)."""
        return self.actor(obs), self.get_value(obs)


class Policy:
    """One version of the agent for serving: plain numpy, because a request is one row and torch is for many."""

    def __init__(self, state: dict[str, Any]) -> None:
        weights = {name: tensor.cpu().numpy().astype(np.float32) for name, tensor in state["agent"].items()}
        statistics = {name: tensor.cpu().numpy() for name, tensor in state["statistics"].items()}
        self.version: int = state["version"]
        self.obs_size = len(statistics["mean"])
        self._mean, self._std = statistics["mean"], np.sqrt(statistics["var"] + 1e-8)
        self._layers = [(weights[f"actor.{i}.weight"].T.copy(), weights[f"actor.{i}.bias"]) for i in (0, 2, 4)]
        self.std = state["action_scale"] * np.exp(weights["log_std"].astype(np.float64))

    def mean(self, obs: np.ndarray) -> np.ndarray:
        """(2,) the policy's mean action."""
        x = np.clip((obs - self._mean) / self._std, -NORM_CLIP, NORM_CLIP).astype(np.float32)
        for weight, bias in self._layers[:-1]:
            x = np.maximum(x @ weight + bias, 0.0)
        weight, bias = self._layers[-1]
        return 1.0 / (1.0 + np.exp(-(x @ weight + bias).astype(np.float64)))

    def act(self, obs: np.ndarray, rng: np.random.Generator | None) -> tuple[np.ndarray, float]:
        """(action, log-probability): a sample, or the mean where there is no generator. Not clipped: its density is the raw one's."""
        noise = np.zeros(2) if rng is None else rng.standard_normal(2)
        action = self.mean(obs) + self.std * noise
        log_prob = float(-0.5 * (noise @ noise) - np.log(self.std).sum() - math.log(2 * math.pi))
        return action, log_prob


def make_agent(state: dict[str, Any]) -> tuple[Agent, RunningMeanStd]:
    """The network of a checkpoint, and what its observations are normalised by."""
    statistics = RunningMeanStd()
    statistics.load_state_dict(state["statistics"])
    agent = Agent(len(statistics.mean), 2, len(state["agent"]["actor.0.bias"]), state["action_scale"])
    agent.load_state_dict(state["agent"])
    return agent, statistics


def cold_start(action_scale: float) -> dict[str, Any]:
    """Fresh weights. Observations lie within 0 … 1: they are normalised as such numbers, once and for all."""
    statistics = RunningMeanStd((len(STATE_NAMES) + N_FEATURES,))
    statistics.mean += 0.5
    statistics.var *= 0.09
    agent = Agent(len(statistics.mean), action_scale=action_scale)
    return {
        "agent": agent.state_dict(),
        "statistics": statistics.state_dict(),
        "action_scale": action_scale,
        "env_id": "GPUAllocationHistory-v0",
    }


def pretrained(path: Path) -> dict[str, Any]:
    """The policy of a checkpoint or a model.pt of ppo_gpu_alloc.py. The value function is fresh: that one knew another unit."""
    try:
        found = load_checkpoint(path, "ppo_gpu_alloc")
        statistics = found["rollouts"]["statistics"]
    except CheckpointError:
        found = load_checkpoint(path, "ppo_gpu_alloc-model")
        statistics = found["statistics"]
    given = found["args"]
    if not given["norm_obs"]:
        statistics = RunningMeanStd((len(statistics["mean"]),)).state_dict()
    agent = Agent(len(statistics["mean"]), 2, given["hidden"], given["action_scale"])
    fresh = agent.critic.state_dict()
    agent.load_state_dict(found["agent"])
    agent.critic.load_state_dict(fresh)
    return {
        "agent": agent.state_dict(),
        "statistics": statistics,
        "action_scale": given["action_scale"],
        "env_id": given["env_id"],
    }


def initial_state(args: Args) -> dict[str, Any]:
    """What the first checkpoint holds."""
    torch.manual_seed(args.seed)
    state = cold_start(args.action_scale) if args.init_checkpoint is None else pretrained(args.init_checkpoint)
    agent, _ = make_agent(state)
    return state | {
        "optimizer": make_optimizer(agent, args.learning_rate).state_dict(),
        "version": 0,
        "learned_through": 0,
        "experiences": 0,
        "store_schema": STORE_SCHEMA,
        "args": plain_args(args),
    }


def export_model(args: Args, state: dict[str, Any]) -> None:
    """Write the policy as ppo_gpu_alloc.py writes its own, for ``clustergym eval``."""
    hidden = len(state["agent"]["actor.0.bias"])
    described = {"env_id": state["env_id"], "norm_obs": True, "hidden": hidden, "action_scale": state["action_scale"]}
    model = {"args": plain_args(args) | described, "agent": state["agent"], "statistics": state["statistics"]}
    save_checkpoint((args.run_dir or args.store) / "model.pt", "ppo_gpu_alloc-model", model)


# Store


@dataclass(slots=True)
class Allocation:
    """What was asked, decided and granted. ``feedback`` is the status that feedback on it had, once there was some."""

    seq: int
    token: str
    created_s: float
    owner: str
    asked_cores: float
    asked_memory_mb: float
    sensitive: bool
    cores: float
    memory_mb: float
    version: int
    learnable: bool
    feedback: str | None = None

    @property
    def id(self) -> str:
        return f"{self.seq:x}-{self.token}"


TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS allocations (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, token TEXT NOT NULL, request_id TEXT, created_s REAL NOT NULL,
    owner TEXT NOT NULL, asked_cores REAL NOT NULL, asked_memory_mb REAL NOT NULL, sensitive INTEGER NOT NULL,
    obs BLOB NOT NULL, action BLOB NOT NULL, log_prob REAL NOT NULL, version INTEGER NOT NULL, learnable INTEGER NOT NULL,
    cores REAL NOT NULL, memory_mb REAL NOT NULL);
CREATE UNIQUE INDEX IF NOT EXISTS requests ON allocations (request_id) WHERE request_id IS NOT NULL;
CREATE TABLE IF NOT EXISTS feedback (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, allocation INTEGER NOT NULL UNIQUE REFERENCES allocations (seq),
    received_s REAL NOT NULL, status TEXT NOT NULL, usage REAL NOT NULL, qos_met INTEGER NOT NULL, pods INTEGER NOT NULL,
    memory_used_mb REAL NOT NULL, oom INTEGER NOT NULL, reward REAL NOT NULL, needed REAL NOT NULL,
    learnable INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS owners (owner TEXT PRIMARY KEY, history BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
"""
COLUMNS = (
    "a.seq, a.token, a.created_s, a.owner, a.asked_cores, a.asked_memory_mb, a.sensitive, a.cores, a.memory_mb, "
    "a.version, a.learnable, f.status"
)
_ID = re.compile(r"([0-9a-f]{1,15})-([0-9a-f]{32})")


def connect(folder: Path, durability: str) -> sqlite3.Connection:
    """A connection in write-ahead mode: the trainer reads while the server writes."""
    connection = sqlite3.connect(folder / "store.db", isolation_level=None, timeout=1.0, check_same_thread=False)
    # Small pages: what a commit writes is mostly the rest of the pages that it touches.
    connection.execute("PRAGMA page_size = 2048")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {'FULL' if durability == 'power' else 'NORMAL'}")
    # Moving the log into the database waits for the disk: done apart from requests, in Store.tidy.
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    return connection


class Unwritable(Exception):
    """The store refused a transaction; nothing of it was answered."""


class Store:
    """Allocations, feedback, histories and counters in SQLite; requests that come together are committed together.

    All methods run on the event loop, so what is in memory is what will have been committed when the caller is answered: two
    feedbacks on one allocation in one group are one accepted and one duplicate.
    """

    GROUP_S = 0.005
    HISTORIES_S = 1.0
    LOG_BYTES = 16 << 20

    def __init__(self, folder: Path, durability: str) -> None:
        self.folder, self.durability = folder, durability
        self.connection = connect(folder, durability)
        self.connection.executescript(TABLES)
        self.connection.execute("INSERT OR IGNORE INTO meta VALUES ('schema', ?)", (STORE_SCHEMA,))
        (schema,) = self.connection.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
        if schema != STORE_SCHEMA:
            raise ValueError(f"{folder / 'store.db'} has schema {schema}; this agent reads {STORE_SCHEMA}")
        row = self.connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'allocations'").fetchone()
        self.next_seq: int = 1 + (row[0] if row else 0)
        self._open: OrderedDict[int, Allocation] = OrderedDict()
        self._by_request: OrderedDict[str, int] = OrderedDict()
        self._owners: OrderedDict[str, list[float]] = OrderedDict()
        self._statements: list[tuple[str, tuple[Any, ...]]] = []
        self._dirty: set[str] = set()
        self._counted: Counter[str] = Counter()
        self._waiting: list[asyncio.Future[None]] = []
        self._flushed_at = self._histories_at = 0.0
        self._replay()

    def add(
        self, allocation: Allocation, obs: np.ndarray, action: np.ndarray, log_prob: float, request: str | None
    ) -> None:
        a = allocation
        self._statements.append(
            (
                "INSERT INTO allocations VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    a.seq, a.token, request, a.created_s, a.owner, a.asked_cores, a.asked_memory_mb, a.sensitive,
                    obs.astype(np.float32).tobytes(), action.astype(np.float32).tobytes(), log_prob, a.version,
                    a.learnable, a.cores, a.memory_mb,
                ),
            )
        )  # fmt: skip
        self._keep(a)
        if request is not None:
            _bounded(self._by_request, request, a.seq, OPEN_IN_MEMORY)
        self._counted["allocations"] += 1

    def _keep(self, allocation: Allocation) -> None:
        _bounded(self._open, allocation.seq, allocation, OPEN_IN_MEMORY)

    def find(self, allocation_id: str) -> Allocation | None:
        """The allocation of this id. The second half of an id cannot be guessed: knowing the first does not help."""
        match = _ID.fullmatch(allocation_id)
        if match is None:
            return None
        found = self._lookup(int(match[1], 16))
        return found if found is not None and hmac.compare_digest(found.token, match[2]) else None

    def find_request(self, request: str) -> Allocation | None:
        """The allocation that was made for this request id."""
        seq = self._by_request.get(request)
        if seq is None:
            row = self.connection.execute("SELECT seq FROM allocations WHERE request_id = ?", (request,)).fetchone()
            if row is None:
                return None
            (seq,) = row
        return self._lookup(seq)

    def _lookup(self, seq: int) -> Allocation | None:
        if seq not in self._open:
            row = self.connection.execute(
                f"SELECT {COLUMNS} FROM allocations a LEFT JOIN feedback f ON f.allocation = a.seq WHERE a.seq = ?",
                (seq,),
            ).fetchone()
            if row is None:
                return None
            self._keep(Allocation(*row))
        return self._open[seq]

    def history(self, owner: str) -> list[float]:
        """What is remembered of an owner's pods. Kept in memory and written now and then; feedback can always rebuild it."""
        if owner not in self._owners:
            row = self.connection.execute("SELECT history FROM owners WHERE owner = ?", (owner,)).fetchone()
            self._owners[owner] = new_history() if row is None else np.frombuffer(row[0]).tolist()
            if len(self._owners) > OWNERS_IN_MEMORY:
                oldest = next(iter(self._owners))
                if oldest in self._dirty:
                    self._save_histories()
                del self._owners[oldest]
        return self._owners[owner]

    def remember(self, allocation: Allocation, needed: float, met: bool, oom: bool, memory_used_mb: float) -> None:
        """Add an allocation's feedback to its owner's history."""
        share = allocation.cores / allocation.asked_cores
        used = min(memory_used_mb / allocation.asked_memory_mb, 1.0)
        remember(self.history(allocation.owner), needed, share, met, oom, used)
        self._dirty.add(allocation.owner)

    def _save_histories(self) -> None:
        for owner in self._dirty:
            blob = np.array(self._owners[owner]).tobytes()
            sql = "INSERT INTO owners VALUES (?1, ?2) ON CONFLICT DO UPDATE SET history = ?2"
            self._statements.append((sql, (owner, blob)))
        self._dirty.clear()
        # Committed with them, after all feedback that they hold: what comes later is what a restart must add.
        self._statements.append(
            (
                "INSERT OR REPLACE INTO meta SELECT 'remembered', coalesce(max(seq), 0) FROM sqlite_sequence "
                "WHERE name = 'feedback'",
                (),
            )
        )

    def _replay(self) -> None:
        """Add the feedback that came after the histories were last written: what a killed process had in memory."""
        rows = self.connection.execute(
            f"SELECT {COLUMNS}, f.needed, f.qos_met, f.oom, f.memory_used_mb FROM feedback f "
            "JOIN allocations a ON a.seq = f.allocation "
            "WHERE f.seq > coalesce((SELECT value FROM meta WHERE key = 'remembered'), 0) ORDER BY f.seq"
        ).fetchall()
        for row in rows:
            needed, met, oom, memory_used_mb = row[-4:]
            self.remember(Allocation(*row[:-4]), needed, bool(met), bool(oom), memory_used_mb)

    def add_feedback(self, allocation: Allocation, status: str, values: tuple[Any, ...], learnable: bool) -> None:
        """The one feedback that an allocation can have (the table's UNIQUE would refuse a second)."""
        allocation.feedback = status
        self._statements.append(
            (
                "INSERT INTO feedback (allocation, status, received_s, usage, qos_met, pods, memory_used_mb, oom, reward, "
                "needed, learnable) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (allocation.seq, status, *values, learnable),
            )
        )

    def count(self, name: str) -> None:
        self._counted[name] += 1

    async def committed(self) -> None:
        """Return when everything added so far is in the database; raise :class:`Unwritable` if it cannot be."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            # At once where there has been nothing to do; under load as a group, for a commit costs as much as ten requests.
            loop.call_at(self._flushed_at + self.GROUP_S, self.flush)
        future: asyncio.Future[None] = loop.create_future()
        self._waiting.append(future)
        await future

    def flush(self) -> None:
        """Commit what has gathered and wake those who wait for it."""
        waiting, self._waiting = self._waiting, []
        self._flushed_at = time.monotonic()  # the clock of the event loop
        try:
            self._write()
        except sqlite3.Error as error:
            # What was promised in memory is not in the database: believe the database.
            self._open.clear()
            self._by_request.clear()
            self._owners.clear()
            self._dirty.clear()
            with contextlib.suppress(sqlite3.Error):
                self._replay()
            log.error("the store cannot be written: %s", error)
            for future in waiting:
                if not future.done():
                    future.set_exception(Unwritable(str(error)))
            return
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def _write(self) -> None:
        if self._dirty and self._flushed_at - self._histories_at > self.HISTORIES_S:
            self._histories_at = self._flushed_at
            self._save_histories()
        statements, self._statements = self._statements, []
        counted, self._counted = self._counted, Counter()
        if not (statements or counted):
            return
        execute = self.connection.execute
        execute("BEGIN IMMEDIATE")
        try:
            for sql, values in statements:
                execute(sql, values)
            for name, number in counted.items():
                execute(
                    "INSERT INTO counters VALUES (?1, ?2) ON CONFLICT DO UPDATE SET value = value + ?2", (name, number)
                )
            execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                execute("ROLLBACK")
            raise

    def counters(self) -> dict[str, int]:
        self.flush()
        return dict(self.connection.execute("SELECT name, value FROM counters").fetchall())

    def oldest_rows(self, before_s: float) -> int:
        """Delete some of the allocations older than this, with their feedback; returns how many."""
        seqs = self.connection.execute(
            "SELECT seq FROM allocations WHERE created_s < ? ORDER BY seq LIMIT 200", (before_s,)
        ).fetchall()
        if seqs:
            for seq in seqs:
                self._open.pop(seq[0], None)
                self._statements.append(("DELETE FROM feedback WHERE allocation = ?", seq))
                self._statements.append(("DELETE FROM allocations WHERE seq = ?", seq))
            self.flush()
        return len(seqs)

    async def tidy(self) -> None:
        """Move a log that has grown into the database: most of it in a thread, the rest between two requests."""
        try:
            if (self.folder / "store.db-wal").stat().st_size < self.LOG_BYTES:
                return
        except FileNotFoundError:
            return

        def move() -> None:
            with contextlib.closing(connect(self.folder, self.durability)) as connection:
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

        # Twice: the second time there is little left, and then next to nothing for the event loop to wait for.
        await asyncio.to_thread(move)
        await asyncio.to_thread(move)
        self.connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def close(self) -> None:
        self.flush()
        self.connection.close()


def _bounded(cache: OrderedDict[Any, Any], key: Any, value: Any, size: int) -> None:
    """Add to a cache; the oldest entries make room (the database still has them)."""
    cache[key] = value
    if len(cache) > size:
        cache.popitem(last=False)


# Telemetry


@dataclass(frozen=True)
class Load:
    """What the GPU is doing: shares from 0 to 1, and processes on it."""

    gpu_util: float = 0.0
    mem_util: float = 0.0
    pods: int = 0


class Telemetry:
    """The GPU's load through NVML. Without a GPU, or when NVML fails, says why and reports an idle one."""

    RETRY_S = 30.0

    def __init__(self, gpu_index: int, every_s: float) -> None:
        self.gpu_index, self.every_s = gpu_index, every_s
        self.problem: str | None = "not sampled yet"
        self.load = Load()
        self._handle: Any = None
        self._retry_at = 0.0
        self.sample()
        self._stop = threading.Event()
        if every_s > 0:
            threading.Thread(target=self._sample_on, name="telemetry", daemon=True).start()

    def _sample_on(self) -> None:
        while not self._stop.wait(self.every_s):
            self.sample()

    def stop(self) -> None:
        self._stop.set()

    def sample(self) -> None:
        if self._handle is None and time.monotonic() < self._retry_at:
            return
        try:
            import pynvml

            if self._handle is None:
                pynvml.nvmlInit()
                self._handle = pynvml.nvmlDeviceGetHandleByIndex(self.gpu_index)
            busy = pynvml.nvmlDeviceGetUtilizationRates(self._handle).gpu
            memory = pynvml.nvmlDeviceGetMemoryInfo(self._handle)
            # Under MPS its clients are listed apart from the server that runs for them.
            processes = pynvml.nvmlDeviceGetMPSComputeRunningProcesses(self._handle)
            if not processes:
                processes = pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
            share = memory.used / memory.total if memory.total else 0.0
            self.load = Load(min(busy / 100.0, 1.0), min(share, 1.0), len({process.pid for process in processes}))
            self.problem = None
        except Exception as error:  # NVML's errors, a driver that went away, no package: all mean the same
            if self.problem in (None, "not sampled yet"):
                log.warning("no telemetry, deciding from requests alone: %s", error)
            self.problem = f"{type(error).__name__}: {error}"
            self.load, self._handle = Load(), None
            self._retry_at = time.monotonic() + self.RETRY_S

    def now(self) -> Load:
        if self.every_s <= 0:
            self.sample()
        return self.load


# Server


Text = Annotated[str, Field(min_length=1, max_length=256)]


class AllocateRequest(BaseModel):
    """A pod that is about to start."""

    model_config = ConfigDict(allow_inf_nan=False)

    owner: Text = Field(
        description="The workload that the pod belongs to; its earlier pods' feedback informs the decision"
    )
    cores: float = Field(gt=0, le=100, description="Requested share of the GPU's SMs, %")
    memory: float = Field(gt=0, le=MAX_REQUEST_MB, description="Requested GPU memory, MB")
    qos_class: Annotated[str, Field(max_length=64)] = Field(
        default="latency-sensitive", description="best-effort (also BE, BestEffort, Burstable), or latency-sensitive"
    )
    request_id: Text | None = Field(default=None, description="The same id gets the same allocation again")


class AllocateResponse(BaseModel):
    """What the pod gets: never more than requested."""

    allocation_id: str
    cores: float
    memory: float
    policy_version: int


class FeedbackRequest(BaseModel):
    """What an allocation came to."""

    model_config = ConfigDict(allow_inf_nan=False)

    allocation_id: Text
    actual_usage: float = Field(ge=0, le=100, description="Share of the GPU (not of the allocation) that was used, %")
    qos_met: bool = Field(description="Whether the pod met its objective")
    pods: int = Field(default=1, ge=0, le=10_000, description="Pods on the GPU, this one included")
    memory_used: float | None = Field(default=None, ge=0, le=MAX_REQUEST_MB, description="MB")
    oom: bool = Field(default=False, description="Whether the pod was killed for want of memory")
    pressure: float | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="Where it is measured: the larger of load and latency / objective; above 1 the grant was too small by that factor",
    )


class FeedbackResponse(BaseModel):
    """What became of the feedback; a reward where it was accepted or stale."""

    status: Literal["accepted", "duplicate", "unknown", "expired", "stale"]
    reward: float | None


class ProblemResponse(BaseModel):
    """Why a request was refused."""

    detail: Any


PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": ProblemResponse, "description": "The body is not JSON"},
    401: {"model": ProblemResponse, "description": "Missing or wrong bearer token"},
    413: {"model": ProblemResponse, "description": "The body is too long"},
    422: {"model": ProblemResponse, "description": "The body says something that cannot be"},
    503: {"model": ProblemResponse, "description": "The store cannot be written; nothing was decided"},
}
BEST_EFFORT = {"be", "besteffort", "burstable"}


def is_latency_sensitive(qos_class: str) -> bool:
    """Whoever is not known to be best-effort is treated with care."""
    return re.sub(r"[^a-z]", "", qos_class.lower()) not in BEST_EFFORT


class Service:
    """The decisions, apart from HTTP. Every method runs on the event loop."""

    def __init__(self, args: Args, store: Store, telemetry: Telemetry, policy: Policy) -> None:
        self.args, self.store, self.telemetry, self.policy = args, store, telemetry, policy
        # Not from the seed alone: a restarted server must not repeat the noise of its former life.
        self.rng = np.random.default_rng([args.seed, time.time_ns()])
        self.registry = CollectorRegistry()
        self.registry.register(StoreCollector(store))
        self.seconds = Histogram(
            "clustergym_request_seconds",
            "Time of a request, from its arrival to its answer",
            ("path",),
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1),
            registry=self.registry,
        )
        self.refused = PrometheusCounter(
            "clustergym_refused",
            "Requests refused before a decision, by status code",
            ("code",),
            registry=self.registry,
        )
        self.trainer_restarts = PrometheusCounter(
            "clustergym_trainer_restarts",
            "Times that the learning process had to be started again",
            registry=self.registry,
        )
        self.reward = Gauge("clustergym_reward_mean", "Running mean of rewards", registry=self.registry)
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "clustergym_policy_version": ("Updates that the serving policy has seen", lambda: self.policy.version),
            "clustergym_degraded": ("1 without telemetry", lambda: float(self.telemetry.problem is not None)),
            "clustergym_gpu_utilization": ("Busy share of the GPU", lambda: self.telemetry.load.gpu_util),
            "clustergym_gpu_memory_used": ("Used share of its memory", lambda: self.telemetry.load.mem_util),
            "clustergym_gpu_pods": ("Processes on the GPU", lambda: self.telemetry.load.pods),
        }
        for name, (text, value) in gauges.items():
            Gauge(name, text, registry=self.registry).set_function(value)
        self._mean_reward: float | None = None

    def observe(self, request: AllocateRequest, sensitive: bool) -> np.ndarray:
        load = self.telemetry.now()
        # Requests beyond the range that the task knows look like its ends.
        cores = min(max(request.cores, MIN_CORES), MAX_CORES)
        memory = min(max(request.memory, MIN_MEMORY_MB), MAX_MEMORY_MB)
        state = encode_state(cores, memory, load.gpu_util, load.mem_util, load.pods)
        if self.policy.obs_size > len(state):
            state += features(self.store.history(request.owner), state[0], state[1], sensitive)
        return np.array(state, np.float32)

    async def allocate(self, request: AllocateRequest) -> Allocation:
        if request.request_id is not None:
            earlier = self.store.find_request(request.request_id)
            if earlier is not None:
                await self.store.committed()
                return earlier
        sensitive = is_latency_sensitive(request.qos_class)
        explored = self.args.explore == "all" or (self.args.explore == "best-effort" and not sensitive)
        obs = self.observe(request, sensitive)
        action, log_prob = self.policy.act(obs, self.rng if explored else None)
        cores, memory = grant(action.tolist(), request.cores, request.memory)
        if request.memory > MAX_MEMORY_MB:
            # More than the action can give: memory is left as requested.
            memory = request.memory
        if self.args.shadow:
            log.info(
                "shadow: %s would get %g of %g %% and %g of %g MB",
                request.owner, cores, request.cores, memory, request.memory,
            )  # fmt: skip
            cores, memory = request.cores, request.memory
        allocation = Allocation(
            self.store.next_seq, secrets.token_hex(16), time.time(), request.owner, request.cores, request.memory,
            sensitive, cores, memory, self.policy.version, explored and not self.args.shadow,
        )  # fmt: skip
        self.store.next_seq += 1
        self.store.add(allocation, obs, action, log_prob, request.request_id)
        await self.store.committed()
        return allocation

    async def feedback(self, request: FeedbackRequest) -> tuple[str, float | None]:
        """Status and reward. Only the first feedback on an allocation, in time, has any effect."""
        allocation = self.store.find(request.allocation_id)
        now, reward = time.time(), None
        if allocation is None:
            status = "unknown"
        elif allocation.feedback is not None:
            status = "duplicate"
        elif now - allocation.created_s > self.args.ttl_s:
            status = "expired"
        else:
            current = self.policy.version - allocation.version <= self.args.max_policy_lag
            status = "accepted" if current else "stale"
            met = request.qos_met and not request.oom
            usage = min(request.actual_usage, allocation.cores)
            reward = compute_reward(allocation.cores, allocation.memory_mb, usage, met, max(request.pods, 1))
            # The part of the request that the pod needed: what it used, or what monitoring says it would have used.
            needed = (
                usage if request.pressure is None else min(request.pressure * allocation.cores, allocation.asked_cores)
            )
            needed /= allocation.asked_cores
            used_mb = allocation.memory_mb if request.memory_used is None else request.memory_used
            values = (now, usage, met, request.pods, used_mb, request.oom, reward, needed)
            self.store.add_feedback(allocation, status, values, allocation.learnable and status == "accepted")
            self.store.remember(allocation, needed, met, request.oom, used_mb)
            self._mean_reward = reward if self._mean_reward is None else 0.99 * self._mean_reward + 0.01 * reward
            self.reward.set(self._mean_reward)
        self.store.count(f"feedback:{status}")
        await self.store.committed()
        return status, reward


class StoreCollector:
    """Counters that live in the store, so that they go on across restarts."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def describe(self) -> list[CounterMetricFamily]:
        return []

    def collect(self) -> Iterator[CounterMetricFamily]:
        found = self.store.counters()
        allocations = CounterMetricFamily("clustergym_allocations", "Allocations made")
        allocations.add_metric([], found.get("allocations", 0))
        yield allocations
        feedback = CounterMetricFamily(
            "clustergym_feedback", "Feedback received, by what became of it", labels=["status"]
        )
        for status in STATUSES:
            feedback.add_metric([status], found.get(f"feedback:{status}", 0))
        yield feedback


class Token:
    """The bearer token, read again when its file changes."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._expected: bytes | None = None
        self._stamp: tuple[int, int] | None = None
        self.refresh()

    def refresh(self) -> None:
        if self.path is None:
            return
        try:
            status = self.path.stat()
            stamp = status.st_mtime_ns, status.st_ino
            if stamp == self._stamp:
                return
            token = self.path.read_text().strip()
        except OSError as error:
            if self._expected is None:
                raise ValueError(f"--token-file {self.path} cannot be read: {error}") from None
            log.warning("token file %s cannot be read, the old token stays: %s", self.path, error)
            return
        if not token:
            if self._expected is None:
                raise ValueError(f"--token-file {self.path} is empty: expected a token")
            return
        self._expected, self._stamp = f"Bearer {token}".encode(), stamp

    def accepts(self, header: bytes) -> bool:
        """In constant time, whatever is wrong with the header."""
        return self._expected is None or hmac.compare_digest(header, self._expected)


Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


Endpoint = Callable[[Any], Awaitable[Response]]


PUBLIC_PATHS = ("/healthz", "/readyz", "/metrics")
"""Read without a token: probes and scrapers have none."""
DOCUMENT_PATHS = ("/docs", "/openapi.json")


class Gate:
    """In front of the application: who may ask, and how much; and a short way to the two endpoints that matter.

    They are FastAPI's, for their document, but are called from here: routing, dependencies and a stack of middleware take
    longer than the decision.
    """

    def __init__(
        self, app: Any, service: Service, token: Token, endpoints: dict[str, tuple[type[BaseModel], Endpoint]]
    ) -> None:
        self.app, self.service, self.token = app, service, token
        self.endpoints = {
            path: (model, endpoint, service.seconds.labels(path)) for path, (model, endpoint) in endpoints.items()
        }

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Deny by default: the token and the limits are checked before any route is looked up."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        method, path, headers = scope["method"], scope["path"], dict(scope["headers"])
        reading = method in ("GET", "HEAD")
        if not (reading and path in PUBLIC_PATHS) and not self.token.accepts(headers.get(b"authorization", b"")):
            refusal = self.refusal(401, "missing or wrong bearer token", {"www-authenticate": "Bearer"})
        elif path in self.endpoints and method == "POST":
            await self.post(scope, headers, receive, send)
            return
        elif path in (*PUBLIC_PATHS, *DOCUMENT_PATHS) and reading:
            await self.app(scope, receive, send)
            return
        elif path in (*self.endpoints, *PUBLIC_PATHS, *DOCUMENT_PATHS):
            allowed = "POST" if path in self.endpoints else "GET"
            refusal = self.refusal(405, f"{path} takes {allowed}", {"allow": allowed})
        else:
            refusal = self.refusal(404, f"no such path; there are {', '.join((*self.endpoints, *PUBLIC_PATHS))}")
        await refusal(scope, receive, send)

    async def post(self, scope: Any, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        """One of the two endpoints, with a bounded body."""
        began = time.perf_counter()
        model, endpoint, clock = self.endpoints[scope["path"]]
        body = await self.limited_body(headers, receive)
        if body is None:
            limit = self.service.args.max_body_bytes
            response = self.refusal(413, f"the body is longer than {limit} bytes")
        else:
            response = await self.answered(model, endpoint, body)
        await response(scope, receive, send)
        clock.observe(time.perf_counter() - began)

    async def limited_body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """The body, or None as soon as it is known to be too long."""
        limit = self.service.args.max_body_bytes
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > limit:
            return None
        body, more = b"", True
        while more and len(body) <= limit:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        return body if len(body) <= limit else None

    async def answered(self, model: type[BaseModel], endpoint: Endpoint, body: bytes) -> Response:
        try:
            return await endpoint(model.model_validate_json(body))
        except ValidationError as error:
            problems = [
                {"where": list(map(str, one["loc"])), "problem": one["msg"], "type": one["type"]}
                for one in error.errors()
            ]
            return self.refusal(400 if problems[0]["type"] == "json_invalid" else 422, problems)
        except Unwritable as error:
            return self.refusal(503, f"the store cannot be written: {error}")

    def refusal(self, status: int, detail: Any, headers: dict[str, str] | None = None) -> Response:
        self.service.refused.labels(str(status)).inc()
        # The body of a request refused before it was read may still arrive: close the connection.
        closing = {"connection": "close"} if status in (401, 404, 405, 413) else {}
        return JSONResponse({"detail": detail}, status, closing | (headers or {}))


def answer(document: dict[str, Any]) -> Response:
    return Response(json.dumps(document), media_type="application/json")


def create_app(service: Service, token: Token, trainer: Trainer | None, checkpoint: Path) -> FastAPI:
    """The FastAPI application around a service."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        tasks = [
            asyncio.create_task(follow_policy(service, token, checkpoint)),
            asyncio.create_task(keep_house(service, trainer)),
        ]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        service.store.close()

    app = FastAPI(title="clustergym GPU allocation agent", lifespan=lifespan, redoc_url=None)
    secured = {"security": [{"bearer": []}]} if token.path is not None else {}

    @app.post("/allocate", response_model=AllocateResponse, responses=PROBLEMS, openapi_extra=secured)
    async def allocate(request: AllocateRequest) -> Response:
        """Decide what a pod gets."""
        found = await service.allocate(request)
        return answer(
            {
                "allocation_id": found.id,
                "cores": found.cores,
                "memory": found.memory_mb,
                "policy_version": found.version,
            }
        )

    @app.post("/feedback", response_model=FeedbackResponse, responses=PROBLEMS, openapi_extra=secured)
    async def feedback(request: FeedbackRequest) -> Response:
        """Tell what an allocation came to; the first time counts."""
        status, reward = await service.feedback(request)
        return answer({"status": status, "reward": reward})

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """The process answers."""
        return {"status": "ok"}

    @app.get("/readyz", responses={503: {"model": ProblemResponse, "description": "The store cannot be written"}})
    async def readyz() -> dict[str, Any]:
        """Whether decisions can be made; degraded without telemetry, or while the learning process is down."""
        service.store.count("readiness-checks")
        await service.store.committed()
        problems = []
        if service.telemetry.problem is not None:
            problems.append(f"no telemetry, deciding from requests alone ({service.telemetry.problem})")
        if trainer is not None and not trainer.alive:
            problems.append("the learning process is not running")
        return {
            "status": "degraded" if problems else "ready",
            "reasons": problems,
            "policy_version": service.policy.version,
        }

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(generate_latest(service.registry), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(Unwritable)
    async def unwritable(_: Any, error: Unwritable) -> JSONResponse:
        return JSONResponse({"detail": f"the store cannot be written: {error}"}, status_code=503)

    document = app.openapi()
    if secured:
        document.setdefault("components", {})["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    endpoints = {"/allocate": (AllocateRequest, allocate), "/feedback": (FeedbackRequest, feedback)}
    app.add_middleware(Gate, service=service, token=token, endpoints=endpoints)
    return app


async def follow_policy(service: Service, token: Token, checkpoint: Path) -> None:
    """Pick up the trainer's newest policy, and a rotated token."""
    stamp = checkpoint.stat().st_mtime_ns
    while True:
        await asyncio.sleep(0.25)
        token.refresh()
        newest = checkpoint.stat().st_mtime_ns
        if newest != stamp:
            stamp = newest
            service.policy = Policy(load_checkpoint(checkpoint, KIND))


async def keep_house(service: Service, trainer: Trainer | None) -> None:
    """Once a second: the database's log, rows past their time, a trainer that has died."""
    while True:
        await asyncio.sleep(1.0)
        try:
            await service.store.tidy()
            service.store.oldest_rows(time.time() - 86_400 * service.args.retention_days)
        except sqlite3.Error as error:
            log.warning("the store could not be tidied: %s", error)
        if trainer is not None and trainer.restart_if_dead():
            service.trainer_restarts.inc()


# Learning, in a process of its own


@dataclass
class Experiences:
    """A batch from the store, in the order of their feedback."""

    obs: Tensor
    actions: Tensor
    logprobs: Tensor
    rewards: Tensor
    through: int
    skipped: int = 0


class ExperienceReader:
    """Reads experiences from the store in the order of their feedback.

    Decisions of policies that are too old are left out by the query itself, so they cannot fill a batch's limit. They stay
    too old for ever, so the reader remembers how far it has passed over them.
    """

    def __init__(self, connection: sqlite3.Connection, args: Args) -> None:
        self.connection, self.args = connection, args
        self._position = 0

    def read(self, learned_through: int, version: int) -> Experiences | None:
        """The next experiences that have not been learned from, or None if there are too few yet."""
        oldest_version = version - self.args.max_policy_lag
        rows = self.connection.execute(
            "SELECT f.seq, a.obs, a.action, a.log_prob, f.reward "
            "FROM feedback f JOIN allocations a ON a.seq = f.allocation "
            "WHERE f.seq > ? AND f.learnable AND a.version >= ? ORDER BY f.seq LIMIT ?",
            (max(learned_through, self._position), oldest_version, self.args.max_batch),
        ).fetchall()
        if rows:
            self._position = rows[0][0] - 1
        if len(rows) < self.args.batch_size:
            return None
        through = rows[-1][0]
        (waiting,) = self.connection.execute(
            "SELECT count(*) FROM feedback WHERE seq > ? AND seq <= ? AND learnable", (learned_through, through)
        ).fetchone()
        obs, actions = (np.stack([np.frombuffer(row[i], np.float32) for row in rows]) for i in (1, 2))
        return Experiences(
            torch.from_numpy(obs),
            torch.from_numpy(actions),
            torch.tensor([row[3] for row in rows]),
            torch.tensor([row[4] for row in rows]),
            through,
            waiting - len(rows),
        )


def update(agent: Agent, optimizer: torch.optim.Adam, batch: Experiences, args: Args) -> dict[str, float]:
    """One PPO update; returns the means of what was seen."""
    with torch.no_grad():
        values = agent.get_value(batch.obs)
        rewards = batch.rewards[:, None]
        never = torch.zeros_like(rewards, dtype=torch.bool)
        # The batch as one stretch of experience; of what follows it nothing is known but its last state's own value.
        advantages, returns = compute_gae(
            rewards, values[:, None], never, never, values[-1:], torch.zeros_like(rewards), args.gamma, args.gae_lambda
        )
        advantages, returns = advantages.flatten(), returns.flatten()
    seen = []
    for _ in range(args.update_epochs):
        # Parts of at least a minibatch's size, at most 16 of them: a backlog must not make updates longer and longer.
        parts = min(max(1, len(values) // args.minibatch_size), 16)
        for rows in torch.randperm(len(values)).to(values.device).tensor_split(parts):
            means, new_values = agent(batch.obs[rows])
            std = agent.std()
            logratio = gaussian_logprob(batch.actions[rows], means, std) - batch.logprobs[rows]
            ratio = logratio.exp()
            k1, _, k3 = kl_estimators(logratio)

            mb_advantages = normalize_advantages(advantages[rows]) if args.norm_adv else advantages[rows]
            pg_loss = policy_loss(ratio, mb_advantages, args.clip_coef)
            v_loss = value_loss(new_values, values[rows], returns[rows], None)
            entropy = gaussian_entropy(std)
            loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss

            optimizer.zero_grad()
            loss.backward()
            grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()
            with torch.no_grad():
                agent.log_std.clamp_(min=math.log(args.min_std / agent.action_scale))
                clipfrac = ((ratio - 1.0).abs() > args.clip_coef).float().mean()
                seen.append(torch.stack([pg_loss, v_loss, entropy, k1.mean(), k3.mean(), clipfrac, grad_norm]))
        if args.target_kl is not None and float(seen[-1][4]) > args.target_kl:
            break
    names = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "grad_norm")
    means_seen = torch.stack(seen).detach().mean(0).tolist()
    metrics = {f"losses/{name}": value for name, value in zip(names, means_seen, strict=True)}
    std_cores, std_memory = agent.std().tolist()
    return metrics | {
        "losses/explained_variance": explained_variance(values, returns),
        "charts/reward": float(batch.rewards.mean()),
        "charts/batch": float(len(values)),
        "charts/skipped": float(batch.skipped),
        "charts/std_cores": std_cores,
        "charts/std_memory": std_memory,
    }


def learn_once(
    state: dict[str, Any], batch: Experiences, args: Args, device: torch.device
) -> tuple[dict[str, Any], dict[str, float]]:
    """The state after one update on a batch. An update that is not finite changes nothing but where the next one begins."""
    agent, statistics = make_agent(state)
    agent = agent.to(device)
    optimizer = make_optimizer(agent, args.learning_rate)
    optimizer.load_state_dict(state["optimizer"])
    for group in optimizer.param_groups:
        group["lr"] = args.learning_rate
    # The same batch after a crash draws the same minibatches.
    torch.manual_seed(derive_seed(args.seed, state["version"]))
    prepared = Experiences(
        normalize_obs(batch.obs, statistics).to(device), batch.actions.to(device), batch.logprobs.to(device),
        batch.rewards.to(device), batch.through, batch.skipped,
    )  # fmt: skip
    metrics = update(agent, optimizer, prepared, args)
    after = state | {"learned_through": batch.through, "args": plain_args(args)}
    if not all(torch.isfinite(tensor).all() for tensor in agent.state_dict().values()):
        log.error("update %d is not finite and is thrown away", state["version"] + 1)
        return after, {"charts/thrown_away": 1.0}
    return after | {
        "agent": agent.cpu().state_dict(),
        "optimizer": optimizer.state_dict(),
        "version": state["version"] + 1,
        "experiences": state["experiences"] + len(batch.rewards),
    }, metrics


def train_forever(args: Args, parent: int) -> None:
    """The learning process: ends with its parent, however that ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    # Requests come first: learning takes what is left of the processor.
    os.nice(10)
    torch.set_num_threads(1)
    device = choose_device(args.cuda)
    checkpoint = args.store / CHECKPOINT_NAME
    with locked(args.store / "trainer.lock", wait=True), contextlib.ExitStack() as stack:
        state = load_checkpoint(checkpoint, KIND)
        reader = ExperienceReader(connect(args.store, args.durability), args)
        logger = None
        while os.getppid() == parent:
            batch = reader.read(state["learned_through"], state["version"])
            if batch is not None:
                first = state["version"]
                state, metrics = learn_once(state, batch, args, device)
                save_checkpoint(checkpoint, KIND, state)
                # TensorBoard takes longer to load than an update: not before there is something to show.
                logger = logger or stack.enter_context(curves(args, first))
                logger.scalars(metrics, state["version"])
            time.sleep(args.update_interval_s)


def curves(args: Args, version: int) -> RunLogger:
    """TensorBoard where it is installed: an image for a node need not carry it."""
    folder = args.run_dir or args.store
    try:
        return RunLogger(folder, plain_args(args), args.track, start_step=version)
    except ImportError as error:
        log.info("no curves are recorded: %s", error)
        return RunLogger(folder, {}, enabled=False)


@contextmanager
def locked(path: Path, wait: bool = False) -> Iterator[None]:
    """Hold a lock that the kernel releases when the process ends, whatever ends it."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise ValueError(f"{path.parent} is in use by another agent") from None
        yield


class Trainer:
    """The learning process as its parent sees it."""

    def __init__(self, args: Args) -> None:
        self.args = args
        self._backoff_s, self._restart_at = 1.0, 0.0
        self._start()

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._process = spawn.Process(target=train_forever, args=(self.args, os.getpid()), name="trainer", daemon=True)
        self._process.start()
        self._began = time.monotonic()

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def restart_if_dead(self) -> bool:
        """Start it again, later and later while it keeps dying at once."""
        now = time.monotonic()
        if self.alive or now < self._restart_at:
            return False
        self._backoff_s = 1.0 if now - self._began > 60 else min(2 * self._backoff_s, 60.0)
        self._restart_at = now + self._backoff_s
        log.error("the learning process ended with %s and is started again", self._process.exitcode)
        self._start()
        return True

    def stop(self) -> None:
        self._process.kill()  # a checkpoint is whole at any moment
        self._process.join()


def check(args: Args) -> None:
    """Refuse what cannot work or should not be, before anything starts."""
    loopback = args.host in ("localhost", "::1") or args.host.startswith("127.")
    if not loopback and args.token_file is None and args.client_ca is None:
        raise ValueError(
            f"--host {args.host} without --token-file or --client-ca: anybody on the network could teach the agent; "
            "give one of them, or listen on 127.0.0.1"
        )
    if (args.tls_cert is None) != (args.tls_key is None) or (args.client_ca and not args.tls_cert):
        raise ValueError("--tls-cert and --tls-key come together, and --client-ca needs both")
    for name in (
        "ttl_s",
        "batch_size",
        "max_body_bytes",
        "retention_days",
        "minibatch_size",
        "update_interval_s",
        "min_std",
        "action_scale",
    ):
        if getattr(args, name) <= 0:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}: expected more than 0")
    if args.max_batch < args.batch_size:
        raise ValueError(f"--max-batch {args.max_batch} is less than --batch-size {args.batch_size}")
    if not 0 <= args.gamma <= 1:
        raise ValueError(f"--gamma is {args.gamma}: expected 0 … 1")


def serve(args: Args) -> None:
    check(args)
    torch.set_num_threads(1)
    args.store.mkdir(parents=True, exist_ok=True)
    checkpoint = args.store / CHECKPOINT_NAME
    with locked(args.store / "agent.lock"):
        if not args.resume and (args.store / "store.db").exists():
            raise ValueError(f"{args.store} has been used: drop --no-resume to go on, or name another --store")
        token = Token(args.token_file)
        if not checkpoint.exists():
            save_checkpoint(checkpoint, KIND, initial_state(args))
        elif args.init_checkpoint is not None:
            log.info("%s is there already: --init-checkpoint is not used", checkpoint)
        policy = Policy(load_checkpoint(checkpoint, KIND))
        store, telemetry = Store(args.store, args.durability), Telemetry(args.gpu_index, args.telemetry_s)
        trainer = None if args.explore == "off" or args.shadow else Trainer(args)
        app = create_app(Service(args, store, telemetry, policy), token, trainer, checkpoint)
        # What is here now stays: the collector need not look at it again and again between requests.
        gc.collect()
        gc.freeze()
        try:
            uvicorn.run(
                app,
                host=args.host,
                port=args.port,
                access_log=False,
                log_config=None,
                timeout_graceful_shutdown=10,
                timeout_keep_alive=75,
                ssl_certfile=args.tls_cert,
                ssl_keyfile=args.tls_key,
                ssl_ca_certs=None if args.client_ca is None else str(args.client_ca),
                ssl_cert_reqs=ssl.CERT_NONE if args.client_ca is None else ssl.CERT_REQUIRED,
            )
        finally:
            telemetry.stop()
            if trainer is not None:
                trainer.stop()
            if args.save_model:
                export_model(args, load_checkpoint(checkpoint, KIND))


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        serve(args)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
