"""Learning across nodes: experiences reach the leader once, and its policy reaches the nodes."""

from __future__ import annotations

import base64
import json
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agent_client import Server, agent_server
from clustergym.agent.relay import RelayRequest, read_rows, store_rows
from clustergym.agent.store import Store
from clustergym.agent.traffic import SimulatedNode
from clustergym.agent.versions import CHECKPOINT_KIND
from clustergym.common.checkpoints import load_checkpoint
from processes import wait_until


def play(server: Server, node: SimulatedNode, pods: int) -> None:
    for _ in range(pods):
        status, made = server.post("/allocate", node.request())
        assert status == 200, made
        outcome, _ = node.apply(made["cores"], made["memory"])
        status, answer = server.post("/feedback", outcome | {"allocation_id": made["allocation_id"]})
        assert status == 200, answer


def rows(store: Path, query: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(store / "store.db")
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def count(store: Path) -> int:
    return int(rows(store, "SELECT count(*) FROM feedback")[0][0])


def test_two_nodes_learn_through_one_leader(tmp_path: Path) -> None:
    leader_store, stores = tmp_path / "leader", [tmp_path / "a", tmp_path / "b"]
    with agent_server(leader_store, "--update-interval-s", 0.05, "--batch-size", 32) as leader:
        flags = ("--leader", f"http://127.0.0.1:{leader.port}", "--leader-token-file", leader_store / "token")
        flags += ("--explore", "all")
        with agent_server(stores[0], *flags, "--node-name", "a") as one:
            play(one, SimulatedNode(1, 100, "a"), 20)
            # Killed while it sends: what the leader already has is not stored twice.
            one.kill()
        nodes = [SimulatedNode(seed, 100, name) for seed, name in ((2, "a"), (3, "b"))]
        with (
            agent_server(stores[0], *flags, "--node-name", "a") as one,
            agent_server(stores[1], *flags, "--node-name", "b") as two,
        ):
            for server, node in zip((one, two), nodes, strict=True):
                play(server, node, 20)
            wait_until(lambda: count(leader_store) == 60, "all experiences are on the leader")

            def version(server: Server) -> int:
                return int(json.loads(server.get("/readyz"))["policy_version"])

            # Neither node alone has the 32 experiences of an update.
            wait_until(lambda: version(leader) >= 1 and version(one) == version(two) == version(leader), "its policy")
            assert json.loads(one.get("/readyz"))["reasons"] == json.loads(two.get("/readyz"))["reasons"]
    states = [load_checkpoint(store / "checkpoint.pt", CHECKPOINT_KIND) for store in (leader_store, *stores)]
    for state in states[1:]:
        assert all(torch.equal(state["agent"][name], states[0]["agent"][name]) for name in state["agent"])
    sent = {
        row for store in stores for row in rows(store, "SELECT received_s, usage, reward, advised_reward FROM feedback")
    }
    assert set(rows(leader_store, "SELECT received_s, usage, reward, advised_reward FROM feedback")) == sent
    assert len(sent) == 60
    # The leader knows the owners of all nodes.
    owners = {owner for (owner,) in rows(leader_store, "SELECT DISTINCT owner FROM allocations")}
    assert {owner.split("/")[0] for owner in owners} == {"a", "b"}


def test_a_node_decides_while_the_leader_is_away(tmp_path: Path) -> None:
    flags = ("--leader", "http://127.0.0.1:9", "--explore", "all")
    with agent_server(tmp_path, *flags) as server:
        play(server, SimulatedNode(1, 100), 5)
        wait_until(lambda: "relay: ConnectError" in server.get("/readyz"), "the problem in /readyz")
        play(server, SimulatedNode(2, 100), 5)
        assert server.metrics()['clustergym_task_failures_total{task="relay"}'] > 0


def test_rows_are_stored_once_and_checked(tmp_path: Path) -> None:
    with agent_server(tmp_path / "node", "--explore", "all") as server:
        play(server, SimulatedNode(1, 100), 10)
    node, leader = Store(tmp_path / "node", "process"), Store(tmp_path, "process")
    request = RelayRequest.model_validate({"node": "a", "rows": read_rows(node, 0)})
    assert store_rows(leader, request, 19, 24) == 10
    leader.flush()
    assert store_rows(leader, request, 19, 24) == 0
    again = Store(tmp_path, "process")
    assert store_rows(again, request, 19, 24) == 0
    other = RelayRequest.model_validate({"node": "b", "rows": read_rows(node, 8)})
    assert store_rows(again, other, 19, 24) == 2
    with pytest.raises(ValueError, match="an observation of 19 numbers: expected 5"):
        store_rows(again, RelayRequest.model_validate({"node": "c", "rows": read_rows(node, 0)}), 5, 24)
    broken = read_rows(node, 0)
    del broken[0]["allocation"]["owner"]
    with pytest.raises(ValueError, match="owner"):
        store_rows(again, RelayRequest.model_validate({"node": "d", "rows": broken}), 19, 24)
    # An index that the policy does not have would stop the learner.
    for numbers in ([24, 0], [-1, 0], [0, float("nan")], [0.5, 1], [0, 0, 0]):
        broken = read_rows(node, 0)
        broken[3]["action"] = base64.b64encode(np.array(numbers, np.float32)).decode()
        with pytest.raises(ValueError, match=r"row \d+ has the action .*: expected two of 24 shares"):
            store_rows(again, RelayRequest.model_validate({"node": "e", "rows": broken}), 19, 24)
    for store in (node, leader, again):
        store.connection.close()
