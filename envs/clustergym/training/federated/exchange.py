"""Exchange of policies between agents, within one process or between processes."""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.distributed import DistError, Store, TCPStore  # type: ignore[attr-defined]

RECONNECT_TIMEOUT_S = 5.0
log = logging.getLogger("clustergym.training.federated")

HEADER = struct.Struct("<qq")
"""Round and number of parameters, in front of the parameters as little-endian float32."""


def message_bytes(n_parameters: int) -> int:
    """Size of a message with ``n_parameters`` parameters."""
    return HEADER.size + 4 * n_parameters


def pack(round_: int, vector: Tensor) -> bytes:
    """Encode the parameters that an agent publishes in a round."""
    return HEADER.pack(round_, vector.numel()) + vector.numpy().astype("<f4").tobytes()


def unpack(message: bytes, n_parameters: int, sender: int) -> tuple[int, Tensor]:
    """Decode (round, parameters). Messages come over the network, so their size is validated."""
    round_, length = HEADER.unpack_from(message) if len(message) >= HEADER.size else (-1, -1)
    if length != n_parameters or len(message) != message_bytes(n_parameters):
        raise ValueError(
            f"agent {sender} published {len(message)} bytes: expected {message_bytes(n_parameters)} for {n_parameters} "
            "parameters. Do all agents have the same environment and --hidden?"
        )
    return round_, torch.from_numpy(np.frombuffer(message, "<f4", offset=HEADER.size).astype(np.float32))


@dataclass
class Traffic:
    """Totals over all exchanges of this process."""

    sent_bytes: int = 0
    received_bytes: int = 0
    wait_s: float = 0.0
    """Time spent waiting for agents that had not published yet."""
    transfer_s: float = 0.0
    """Time spent sending and receiving."""

    def since(self, earlier: Traffic) -> Traffic:
        return Traffic(*(now - before for now, before in zip(vars(self).values(), vars(earlier).values(), strict=True)))


class Exchange(Protocol):
    """Transfers policies between agents.

    Round r exchanges the policies after r · local_updates rollouts. In each round an agent publishes first and gathers
    afterwards. The result of an agent is a JSON object.
    """

    traffic: Traffic

    def publish(self, agent: int, round_: int, vector: Tensor) -> int:
        """Send the parameters of ``agent`` to the other agents. Returns the size of the message in bytes."""

    def gather(self, agent: int, round_: int, peers: Sequence[int]) -> dict[int, Tensor]:
        """Return the parameters of the peers. Peers that have never published are left out."""

    def agree_on_folder(self, folder: Path) -> Path:
        """Return the run folder that the first process proposed."""

    def share_result(self, agent: int, result: dict[str, Any]) -> None:
        """Make the result of an agent available to :meth:`collect_results`."""

    def collect_results(self, n_agents: int) -> dict[int, dict[str, Any]]:
        """Return the results by agent. Agents that did not share one in time are left out."""


class LocalExchange:
    """All agents run in this process."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self._published: dict[int, Tensor] = {}
        self._results: dict[int, dict[str, Any]] = {}

    def publish(self, agent: int, round_: int, vector: Tensor) -> int:
        self._published[agent] = vector
        self.traffic.sent_bytes += message_bytes(vector.numel())
        return message_bytes(vector.numel())

    def gather(self, agent: int, round_: int, peers: Sequence[int]) -> dict[int, Tensor]:
        self.traffic.received_bytes += sum(message_bytes(self._published[j].numel()) for j in peers)
        return {j: self._published[j] for j in peers}

    def agree_on_folder(self, folder: Path) -> Path:
        return folder

    def share_result(self, agent: int, result: dict[str, Any]) -> None:
        self._results[agent] = result

    def collect_results(self, n_agents: int) -> dict[int, dict[str, Any]]:
        return self._results


class StoreLocation(NamedTuple):
    """Where the store is, and whether this process hosts it."""

    host: str
    port: int
    is_host: bool = False

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, address: str) -> StoreLocation:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"store address is {address!r}: expected HOST:PORT with a port from 1 to 65535")
        return cls(host.strip("[]"), int(port))

    @classmethod
    def from_environment(cls, rank: int) -> StoreLocation:
        """The store of torchrun, or the one that rank 0 hosts where ranks are started by hand."""
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ValueError(
                f"RANK is set but {missing[0]} is not: start with torchrun, or give --exchange-store HOST:PORT"
            )
        # The store of torchrun's own process outlives every rank.
        is_host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        return cls(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_host)


def serve_store(location: StoreLocation) -> None:
    """Host a store until interrupted. It holds two policies per agent and nothing else."""
    store = TCPStore(location.host, location.port, is_master=True, wait_for_workers=False)
    print(f"store at {location.host}:{store.port}", flush=True)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        pass


class StoreExchange:
    """One agent runs in this process. Policies are written to and read from a store.

    Collectives such as all_gather hang or abort all processes when one of them dies. With a store, each agent writes
    its policy and the number of its round, and reads what the others wrote last.

    Agents wait for each other in every round, so a run without failures is bit-identical to the in-process engine. An
    agent that has not published a round after ``timeout_s`` is late: the others stop waiting for it and use its newest
    policy. They wait for it again once it has caught up.

    Each agent has two slots, for even and odd rounds. That is enough: an agent publishes round r + 2 only after all
    agents have published round r + 1, and they do that after reading round r.

    Args:
        location: address of the store.
        agent: index of the agent in this process.
        readers: agents that read the policy of this agent.
        config: description of the run. All processes that use a store must have the same.
        timeout_s: how long to wait for other agents in each round.
    """

    def __init__(
        self, location: StoreLocation, agent: int, readers: Iterable[int], config: Mapping[str, Any], timeout_s: float
    ) -> None:
        self.location, self.agent, self.readers, self.config = location, agent, set(readers), dict(config)
        self.timeout_s = timeout_s
        self.traffic = Traffic()
        self.late: dict[int, int] = {}
        """Newest known round of each late agent; −1 if it has never published."""
        self._announced: set[int] = set()
        """Late agents whose return has been logged."""
        self._published: tuple[int, Tensor] | None = None
        self._result: dict[str, Any] = {}
        self._store: Store | None = None
        self._connect(timeout_s)

    def _connect(self, timeout_s: float) -> None:
        host, port, is_host = self.location
        timeout = timedelta(seconds=timeout_s)
        store = TCPStore(host, port, is_master=is_host, wait_for_workers=False, timeout=timeout)
        # The first process to connect defines the run.
        config = json.dumps(self.config)
        ours, theirs = json.loads(config), json.loads(store.compare_set("config", "", config))
        differing = [
            f"{key} is {theirs.get(key)!r} there, {ours.get(key)!r} here"
            for key in sorted(ours | theirs)
            if theirs.get(key) != ours.get(key)
        ]
        if differing:
            raise ValueError(f"the store at {self.location} belongs to another run: {'; '.join(differing)}")
        self._store = store

    @contextmanager
    def _connection(self) -> Iterator[Store | None]:
        """Yield the store, or None while it cannot be reached. Learning continues in both cases."""
        if self._store is None:
            try:
                # This notices a refused connection at once; TCPStore retries for a long time.
                socket.create_connection((self.location.host, self.location.port), timeout=1.0).close()
                self._connect(RECONNECT_TIMEOUT_S)
                if self._published is not None:
                    self._write(*self._published)
                log.warning("agent %d: connected to the store at %s again", self.agent, self.location)
            except (OSError, RuntimeError):
                self._store = None
                yield None
                return
        try:
            yield self._store
        except DistError as reason:
            self._store = None
            log.warning(
                "agent %d: lost the store at %s (%s); continuing with the last policies of all neighbours",
                self.agent, self.location, str(reason).splitlines()[0],
            )  # fmt: skip

    def _rounds_published(self, store: Store, agent: int) -> int:
        # Adding 0 reads the counter without waiting for the key to exist.
        return store.add(f"rounds/{agent}", 0)

    def _write(self, round_: int, vector: Tensor) -> None:
        assert self._store is not None
        message = pack(round_, vector)
        self._store.set(f"policy/{self.agent}/{round_ % 2}", message)  # type: ignore[arg-type]
        self._store.set(f"rounds/{self.agent}", str(round_ + 1))
        self._rounds_published(self._store, self.agent)  # set() returns before the store has the value; a read waits
        self.traffic.sent_bytes += len(message)

    def check_unused(self) -> None:
        """Raise if this agent has published before. A new run must not mix with the policies of an older one."""
        with self._connection() as store:
            if store is not None and self._rounds_published(store, self.agent) > 0:
                raise ValueError(
                    f"the store at {self.location} holds policies that agent {self.agent} published before: "
                    "add --resume to continue that run, or use a new store for a new run"
                )

    def publish(self, agent: int, round_: int, vector: Tensor) -> int:
        start = time.perf_counter()
        self._published = round_, vector
        with self._connection() as store:
            if store is not None:
                self._write(round_, vector)
        self.traffic.transfer_s += time.perf_counter() - start
        return message_bytes(vector.numel())

    def gather(self, agent: int, round_: int, peers: Sequence[int]) -> dict[int, Tensor]:
        assert self._published is not None, "publish() comes before gather()"
        _, own = self._published
        received: dict[int, Tensor] = {}
        with self._connection() as store:
            if store is None:
                return received
            self._wait(store, round_, {*peers, *self.readers})
            start = time.perf_counter()
            for j in peers:
                newest = self._rounds_published(store, j) - 1
                if newest < 0:
                    continue
                # A peer that is at most one round ahead still has this round. One further ahead has overwritten it.
                slot = round_ if round_ <= newest <= round_ + 1 else newest
                message = store.get(f"policy/{j}/{slot % 2}")
                self.traffic.received_bytes += len(message)
                try:
                    _, received[j] = unpack(message, own.numel(), j)
                except ValueError as reason:
                    log.warning("agent %d: %s Keeping the last valid policy of agent %d.", self.agent, reason, j)
            self.traffic.transfer_s += time.perf_counter() - start
        return received

    def _wait(self, store: Store, round_: int, others: set[int]) -> None:
        """Wait until all agents that are not late have published the round, at most ``timeout_s``."""
        start = time.perf_counter()
        pause_s = 0.0005
        waiting = others - self.late.keys()
        while True:
            waiting = {j for j in waiting if self._rounds_published(store, j) <= round_}
            if not waiting or time.perf_counter() - start > self.timeout_s:
                break
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)
        self.traffic.wait_s += time.perf_counter() - start
        for j in sorted(others & self.late.keys()):
            self._check_return(store, j, round_)
        for j in sorted(waiting):
            newest = self.late[j] = self._rounds_published(store, j) - 1
            substitute = f"its policy of round {newest}" if newest >= 0 else "no policy of it"
            log.warning(
                "agent %d: agent %d has not published round %d within %g s; continuing with %s",
                self.agent, j, round_, self.timeout_s, substitute,
            )  # fmt: skip

    def _check_return(self, store: Store, late: int, round_: int) -> None:
        """Update what is known about a late agent, and wait for it again if it has caught up."""
        newest = self._rounds_published(store, late) - 1
        if newest >= round_:
            del self.late[late]
            self._announced.discard(late)
            log.warning("agent %d: agent %d has caught up at round %d", self.agent, late, newest)
        elif newest != self.late[late]:
            self.late[late] = newest
            if late not in self._announced:
                self._announced.add(late)
                log.warning(
                    "agent %d: agent %d is back with its policy of round %d, %d rounds late; using its newest policy",
                    self.agent, late, newest, round_ - newest,
                )  # fmt: skip

    def agree_on_folder(self, folder: Path) -> Path:
        with self._connection() as store:
            if store is not None:
                return Path(store.compare_set("folder", "", str(folder)).decode())
        return folder

    def share_result(self, agent: int, result: dict[str, Any]) -> None:
        self._result = result
        with self._connection() as store:
            if store is not None:
                store.set(f"result/{self.agent}", json.dumps(result))

    def collect_results(self, n_agents: int) -> dict[int, dict[str, Any]]:
        """Wait for the results of agents that are not late. The host of the store waits for all, since they use it."""
        results = {self.agent: self._result}
        start = time.perf_counter()
        with self._connection() as store:
            while store is not None and len(results) < n_agents:
                for j in range(n_agents):
                    if j not in results and store.check([f"result/{j}"]):
                        results[j] = json.loads(store.get(f"result/{j}"))
                missing = set(range(n_agents)) - results.keys()
                if not self.location.is_host:
                    missing -= self.late.keys()
                if not missing or time.perf_counter() - start > self.timeout_s:
                    break
                time.sleep(0.05)
        return results


def connect_rank(
    address: str | None,
    rank: int,
    n_agents: int,
    readers: Iterable[int],
    config: Mapping[str, Any],
    timeout_s: float,
    resume: bool,
) -> StoreExchange:
    """Connect the process of an agent to the store at ``address``, or to that of the environment variables.

    Raises:
        ValueError: there is not one process per agent, or without ``resume`` the store holds policies of this agent.
    """
    size = int(os.environ.get("WORLD_SIZE", str(n_agents)))
    if size != n_agents or not 0 <= rank < size:
        raise ValueError(f"rank {rank} of {size} with --n-agents {n_agents}: start one process per agent")
    location = StoreLocation.from_environment(rank) if address is None else StoreLocation.parse(address)
    exchange = StoreExchange(location, rank, readers, config, timeout_s)
    if not resume:
        exchange.check_unused()
    return exchange
