"""The federation package: communication matrices, replayable environments, exchange of policies, plots."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from clustergym.training.federated.environments import Environments, Episode, ReplayableEnv
from clustergym.training.federated.exchange import StoreExchange, StoreLocation, pack, unpack
from clustergym.training.federated.matrices import load_matrix, read_matrix
from clustergym.training.federated.plots import plot_graph, plot_returns
from federation import processes as processes  # a fixture
from federation import run_store, start
from processes import free_port
from trainers import FOLDER

BUNDLED = FOLDER / "comm_matrices"


# Communication matrices


@pytest.mark.parametrize(
    ("name", "n_agents", "edges"),
    [("pair", 2, 2), ("two_pairs", 4, 4), ("ring", 4, 8), ("star", 4, 6), ("all_to_all", 4, 12)],
)
def test_bundled_matrices_load_by_name_and_by_path(name: str, n_agents: int, edges: int) -> None:
    for path in (name, f"{name}.json", f"comm_matrices/{name}.json", str(BUNDLED / f"{name}.json")):
        matrix = load_matrix(Path(path), n_agents, BUNDLED)
        assert matrix.shape == (n_agents, n_agents)
        assert np.count_nonzero(matrix) == edges
        assert (matrix == matrix.T).all()
        assert not matrix.diagonal().any()


def test_matrix_can_be_asymmetric_and_normalised(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text('{"comm_matrix": {"0": {"1": 10, "2": 30}, "2": {"0": 0.5}}}')
    assert load_matrix(path, 3, BUNDLED).tolist() == [[0, 10, 30], [0, 0, 0], [0.5, 0, 0]]
    assert load_matrix(path, 3, BUNDLED, normalise_rows=True).tolist() == [[0, 0.25, 0.75], [0, 0, 0], [1, 0, 0]]


def test_default_matrix_connects_all_agents() -> None:
    assert load_matrix(None, 3, BUNDLED).tolist() == (1 - np.eye(3)).tolist()


def test_unknown_matrix_names_the_bundled_ones() -> None:
    with pytest.raises(
        FileNotFoundError, match=r"nowhere: no such file\. Bundled matrices: 4_agents, all_to_all, pair"
    ):
        load_matrix(Path("nowhere"), 2, BUNDLED)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"comm_matrix": {"0": {"2": 1}}}', r"""comm_matrix\["0"\] names agent '2': with --n-agents 2, agents are"""),
        ('{"comm_matrix": {"-1": {"0": 1}}}', r"comm_matrix names agent '-1': with --n-agents 2, agents are 0 … 1"),
        ('{"comm_matrix": {"01": {"0": 1}}}', r"names agent '01'"),
        ('{"comm_matrix": {"zero": {"0": 1}}}', r"names agent 'zero'"),
        ('{"comm_matrix": {"0": {"1": -2}}}', r'comm_matrix\["0"\]\["1"\] is -2: expected a finite number, 0 or more'),
        ('{"comm_matrix": {"0": {"1": NaN}}}', r'comm_matrix\["0"\]\["1"\] is nan'),
        ('{"comm_matrix": {"0": {"1": Infinity}}}', r'comm_matrix\["0"\]\["1"\] is inf'),
        ('{"comm_matrix": {"0": {"1": true}}}', r"is True: expected a finite number"),
        ('{"comm_matrix": {"0": {"1": "10"}}}', r"is '10': expected a finite number"),
        ('{"comm_matrix": {"0": [1]}}', r'comm_matrix\["0"\] is \[1\]: expected an object'),
        ('{"comm_matrix": {"0": {"1": 1, "1": 2}}}', r"key '1' occurs twice"),
        ('{"comm_matrix": [[0, 1]]}', r"comm_matrix has 1 rows: expected 2 × 2"),
        ('{"comm_matrix": [[0, 1], [1]]}', r"comm_matrix\[1\] has 1 entries: expected 2, the matrix is square"),
        ('{"comm_matrix": [[0, 1], [-1, 0]]}', r"comm_matrix\[1\]\[0\] is -1"),
        ('{"comm_matrix": 3}', r"comm_matrix is 3: expected an object of rows"),
        ('{"matrix": {}}', r"found 'matrix'; expected"),
        ('{"comm_matrix": {}, "n": 2}', r"unknown key 'n'"),
        ("[1, 2", r"not JSON"),
    ],
)  # fmt: skip
def test_invalid_matrix_is_rejected_with_file_and_key(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint) as caught:
        read_matrix(path, 2)
    assert str(path) in str(caught.value)


# Plots


def test_plots_are_png_files(tmp_path: Path) -> None:
    for n in (1, 4, 12):
        plot_graph(1.0 - np.eye(n), tmp_path / f"{n}.png")
    curves = {0: np.array([[1, 2, 3], [np.nan, 5, 6]]), 1: np.array([[2, 3], [7, 8]]), 2: np.array([[1], [np.nan]])}
    assert plot_returns(curves, tmp_path / "returns.png", "title") == tmp_path / "returns.png"
    for file in ("1.png", "4.png", "12.png", "returns.png"):
        assert (tmp_path / file).read_bytes().startswith(b"\x89PNG")


def test_curves_without_episodes_are_not_plotted(tmp_path: Path) -> None:
    assert plot_returns({0: np.array([[1], [np.nan]])}, tmp_path / "returns.png", "title") is None
    assert not list(tmp_path.iterdir())


def test_plots_without_matplotlib_name_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"matplotlib.figure is not installed: pip install 'clustergym\[render\]'"):
        plot_graph(np.ones((2, 2)), tmp_path / "graph.png")


# Environments


def make_envs(env_id: str, count: int = 2) -> Environments:
    return Environments([ReplayableEnv(gym.make(env_id), lambda episode, i=i: 100 * i + episode) for i in range(count)])


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "MountainCarContinuous-v0"])
def test_environments_restore_exactly_in_the_middle_of_an_episode(env_id: str) -> None:
    def play(envs: Environments, steps: int, generator: np.random.Generator) -> list[Any]:
        seen: list[Any] = []
        for _ in range(steps):
            if envs.continuous:
                actions: Any = generator.normal(size=(2, envs.action_size)).astype(np.float32)
            else:
                actions = generator.integers(envs.action_size, size=2)
            result = envs.step(actions)
            seen += [envs.obs, result.rewards, result.terminated, result.truncated, result.episodes]
        return seen

    envs, copy = make_envs(env_id), make_envs(env_id)
    envs.reset()
    generator = np.random.default_rng(0)
    play(envs, 57, generator)
    copy.restore(envs.state())
    np.testing.assert_array_equal(copy.obs, envs.obs)
    noise = generator.bit_generator.state
    expected = play(envs, 230, generator)
    generator.bit_generator.state = noise
    for a, b in zip(expected, play(copy, 230, generator), strict=True):
        np.testing.assert_array_equal(a, b)


def test_step_returns_the_last_observation_of_truncated_episodes() -> None:
    envs = make_envs("Pendulum-v1")
    envs.reset()
    for _ in range(199):
        result = envs.step(np.zeros((2, 1), np.float32))
        assert not result.truncated.any()
        assert not result.final_obs
        assert not result.episodes
    result = envs.step(np.zeros((2, 1), np.float32))
    assert result.truncated.all()
    assert not result.terminated.any()
    assert sorted(result.final_obs) == [0, 1]
    assert [episode.length for episode in result.episodes] == [200, 200]
    assert not np.array_equal(envs.obs, np.stack([result.final_obs[0], result.final_obs[1]]))


def test_episodes_have_the_sum_of_their_rewards() -> None:
    envs = make_envs("CartPole-v1", count=1)
    envs.reset()
    episodes: list[Episode] = []
    lengths, length = [], 0
    while len(lengths) < 3:
        result = envs.step(np.zeros(1, np.int64))
        episodes += result.episodes
        length += 1
        if result.terminated[0]:
            lengths.append(length)
            length = 0
    assert episodes == [Episode(float(each), each) for each in lengths]  # every step of CartPole has reward 1


class SpacesEnv(gym.Env[Any, Any]):
    """An environment with the given spaces."""

    def __init__(self, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.observation_space.seed(3)
        return self.observation_space.sample(), {}


def test_observations_are_flattened_without_the_action_mask() -> None:
    spaces = {
        "a": gym.spaces.Discrete(3, start=1),
        "action_mask": gym.spaces.MultiBinary(4),
        "b": gym.spaces.Box(-1, 1, (2, 2), np.float64),
    }
    env = SpacesEnv(gym.spaces.Dict(spaces), gym.spaces.Discrete(4))
    envs = Environments([ReplayableEnv(env, lambda episode: episode)])
    envs.reset()
    expected, _ = env.reset()
    one_hot = np.eye(3)[expected["a"] - 1]
    assert envs.obs_size == 7
    assert envs.obs.dtype == np.float32
    np.testing.assert_array_equal(envs.obs, [[*one_hot, *expected["b"].astype(np.float32).ravel()]])


@pytest.mark.parametrize(
    ("observations", "actions", "complaint"),
    [
        (gym.spaces.Sequence(gym.spaces.Discrete(2)), gym.spaces.Discrete(2), "observation space Sequence"),
        (gym.spaces.Discrete(2), gym.spaces.MultiBinary(2), "action space MultiBinary"),
    ],
)
def test_unsupported_spaces_are_rejected(observations: gym.Space[Any], actions: gym.Space[Any], complaint: str) -> None:
    with pytest.raises(TypeError, match=rf"{complaint}.* is not supported"):
        Environments([ReplayableEnv(SpacesEnv(observations, actions), lambda episode: episode)])


# Exchange through a store


@pytest.fixture
def store() -> Iterator[StoreLocation]:
    kept = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield StoreLocation("127.0.0.1", kept.port)
    del kept


def connect(location: StoreLocation, agent: int, timeout_s: float = 30.0, **config: Any) -> StoreExchange:
    return StoreExchange(location, agent, [1 - agent], config, timeout_s)


def vector(value: float) -> torch.Tensor:
    return torch.full((3,), value)


def test_agent_waits_for_the_round_that_it_needs(store: StoreLocation) -> None:
    a, b = connect(store, 0), connect(store, 1)
    for round_ in range(4):
        a.publish(0, round_, vector(round_))
        late = threading.Timer(0.05, b.publish, (1, round_, vector(10 + round_)))
        late.start()
        assert a.gather(0, round_, [1])[1].tolist() == [10 + round_] * 3
        late.join()
        assert b.gather(1, round_, [0])[0].tolist() == [round_] * 3
    assert a.traffic.wait_s > 0.1
    assert not a.late
    assert a.traffic.sent_bytes == a.traffic.received_bytes == 4 * (16 + 12)


def test_neighbour_one_round_ahead_is_read_at_the_right_round(store: StoreLocation) -> None:
    a, b = connect(store, 0), connect(store, 1)
    for round_ in (4, 5):
        b.publish(1, round_, vector(round_))
    a.publish(0, 4, vector(0))
    assert a.gather(0, 4, [1])[1].tolist() == [4.0] * 3


def test_late_agent_is_not_waited_for_until_it_has_caught_up(
    store: StoreLocation, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="clustergym.training.federated")
    a, b = connect(store, 0, timeout_s=0.1), connect(store, 1, timeout_s=0.1)
    for exchange in (a, b):
        exchange.publish(exchange.agent, 0, vector(exchange.agent))
    assert a.gather(0, 0, [1])[1].tolist() == [1.0] * 3
    a.publish(0, 1, vector(0))
    assert a.gather(0, 1, [1])[1].tolist() == [1.0] * 3
    assert "agent 1 has not published round 1 within 0.1 s; continuing with its policy of round 0" in caplog.text
    start_s = time.perf_counter()
    a.timeout_s = 30.0
    a.publish(0, 2, vector(0))
    assert a.gather(0, 2, [1])[1].tolist() == [1.0] * 3
    assert time.perf_counter() - start_s < 10
    b.publish(1, 1, vector(5))
    a.publish(0, 3, vector(0))
    assert a.gather(0, 3, [1])[1].tolist() == [5.0] * 3
    assert "agent 1 is back with its policy of round 1, 2 rounds late" in caplog.text
    b.publish(1, 2, vector(5.5))
    a.publish(0, 4, vector(0))
    assert a.gather(0, 4, [1])[1].tolist() == [5.5] * 3
    assert caplog.text.count("is back") == 1
    b.publish(1, 5, vector(6))
    a.publish(0, 5, vector(0))
    assert a.gather(0, 5, [1])[1].tolist() == [6.0] * 3
    assert "agent 1 has caught up at round 5" in caplog.text
    # An agent that is far behind reads the newest policies of the others.
    b.publish(1, 2, vector(7))
    assert b.gather(1, 2, [0])[0].tolist() == [0.0] * 3


def test_learning_continues_without_the_store_and_reconnects(
    caplog: pytest.LogCaptureFixture, processes: list[ForkServerProcess]
) -> None:
    caplog.set_level(logging.WARNING, logger="clustergym.training.federated")
    location = StoreLocation("127.0.0.1", free_port())
    host = start(run_store, location.host, location.port)
    processes.append(host)
    a = connect(location, 0)
    a.publish(0, 0, vector(1))
    host.kill()
    host.join()
    for round_ in (1, 2, 3):
        a.publish(0, round_, vector(round_))
        assert a.gather(0, round_, [1]) == {}
    assert caplog.text.count("lost the store") == 1
    processes.append(start(run_store, location.host, location.port))
    b = connect(location, 1, timeout_s=60.0)
    b.publish(1, 4, vector(9))
    a.publish(0, 4, vector(4))
    assert a.gather(0, 4, [1])[1].tolist() == [9.0] * 3
    assert f"connected to the store at {location} again" in caplog.text


def test_store_of_another_run_is_rejected(store: StoreLocation) -> None:
    a = connect(store, 0, seed=1)
    with pytest.raises(ValueError, match="belongs to another run: seed is 1 there, 2 here"):
        connect(store, 1, seed=2)
    a.check_unused()
    a.publish(0, 0, vector(0))
    with pytest.raises(ValueError, match="holds policies that agent 0 published before"):
        connect(store, 0, seed=1).check_unused()


def test_results_of_all_agents_are_collected(store: StoreLocation) -> None:
    a, b = connect(store, 0), connect(store, 1)
    b.share_result(1, {"mean_return": 2.5})
    a.share_result(0, {"mean_return": None})
    assert a.collect_results(2) == {0: {"mean_return": None}, 1: {"mean_return": 2.5}}


def test_results_of_late_agents_are_not_waited_for(store: StoreLocation) -> None:
    a = connect(store, 0, timeout_s=60.0)
    a.late[1] = 3
    a.share_result(0, {"steps": 1})
    start_s = time.perf_counter()
    assert a.collect_results(2) == {0: {"steps": 1}}
    assert time.perf_counter() - start_s < 10


def test_all_agents_use_the_folder_of_the_first(store: StoreLocation) -> None:
    a, b = connect(store, 0), connect(store, 1)
    assert b.agree_on_folder(Path("runs/b")) == Path("runs/b")
    assert a.agree_on_folder(Path("runs/a")) == Path("runs/b")


@pytest.mark.parametrize("message", [b"", b"short", pack(0, torch.zeros(4)), pack(0, torch.zeros(3))[:-1]])
def test_malformed_message_is_rejected(message: bytes) -> None:
    with pytest.raises(ValueError, match=r"agent 7 published .* bytes: expected 28 for 3 parameters"):
        unpack(message, 3, 7)


def test_malformed_message_in_the_store_is_skipped(store: StoreLocation, caplog: pytest.LogCaptureFixture) -> None:
    a, b = connect(store, 0), connect(store, 1)
    b.publish(1, 0, torch.zeros(4))
    a.publish(0, 0, vector(0))
    assert a.gather(0, 0, [1]) == {}
    assert "agent 1 published 32 bytes: expected 28" in caplog.text


def test_messages_keep_every_bit() -> None:
    values = torch.tensor([1.5, -0.0, 1e-42, float("inf")])
    round_, back = unpack(pack(12, values), 4, 0)
    assert round_ == 12
    assert back.numpy().tobytes() == values.numpy().tobytes()


@pytest.mark.parametrize("text", ["", "29500", "host:", "host:0", "host:70000", "host:x"])
def test_invalid_store_address_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="expected HOST:PORT"):
        StoreLocation.parse(text)


def test_store_address_with_ipv6() -> None:
    assert StoreLocation.parse("[::1]:29500") == StoreLocation("::1", 29500)
