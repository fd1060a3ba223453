"""Learning across nodes: agents send their experiences to one learner of the cluster and use its policy.

A node sees few pods. With ``--leader`` its agent has no learner process. It sends what it has experienced to the
leader, an ordinary agent, and replaces its checkpoint with that of the leader. Decisions stay on the node, so they
continue while the leader cannot be reached; what was not sent is sent later. Every row has a number on its node, so the
leader stores a row once, even if it is sent several times.
"""

from __future__ import annotations

import base64
import logging
import os
import secrets
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from clustergym.agent.messages import Text
from clustergym.agent.settings import ServerSettings
from clustergym.agent.store import Allocation, Experience, Feedback, Store
from clustergym.agent.versions import CHECKPOINT_KIND, keep_version
from clustergym.common.checkpoints import CHECKPOINT_NAME, load_checkpoint, save_checkpoint

log = logging.getLogger(__name__)

MAX_ROWS = 64
MAX_BODY_BYTES = 1 << 18
ALLOCATION_FIELDS = tuple(
    name for name in Allocation.__dataclass_fields__ if name not in ("seq", "token", "feedback", "champion")
)
COLUMNS = {"requested_cores": "asked_cores", "requested_memory_mb": "asked_memory_mb"}
"""Fields of an allocation whose columns have another name."""


class RelayedRow(BaseModel):
    """One allocation with its feedback. Arrays are float32, in base64."""

    model_config = ConfigDict(allow_inf_nan=False)

    seq: int = Field(ge=1)
    """Number of the feedback on its node."""
    obs: Annotated[str, Field(max_length=1000)]
    action: Annotated[str, Field(max_length=100)]
    next_obs: Annotated[str, Field(max_length=1000)]
    log_prob: float
    value: float
    status: str
    learnable: bool
    allocation: dict[str, float | int | str | bool]
    feedback: dict[str, float | int | bool]


class RelayRequest(BaseModel):
    """Experiences of a node."""

    node: Text
    rows: Annotated[list[RelayedRow], Field(max_length=MAX_ROWS)]


class RelayResponse(BaseModel):
    """How many of the rows were new."""

    stored: int
    policy_version: int


def read_rows(store: Store, after: int) -> list[dict[str, Any]]:
    """Allocations whose feedback has a number above ``after``, as :class:`RelayedRow`."""
    names = [COLUMNS.get(name, name) for name in ALLOCATION_FIELDS]
    measured = [name for name in Feedback._fields if name != "next_obs"]
    columns = ["f.seq", "a.obs", "a.action", "f.next_obs", "a.log_prob", "a.value", "f.status", "f.learnable"]
    columns += [f"a.{name}" for name in names] + [f"f.{name}" for name in measured]
    rows = store.connection.execute(
        f"SELECT {', '.join(columns)} FROM feedback f JOIN allocations a ON a.seq = f.allocation "
        "WHERE f.seq > ? ORDER BY f.seq LIMIT ?",
        (after, MAX_ROWS),
    ).fetchall()
    found = []
    for seq, obs, action, next_obs, log_prob, value, status, learnable, *rest in rows:
        texts = (base64.b64encode(blob).decode() for blob in (obs, action, next_obs))
        found.append(
            dict(zip(("obs", "action", "next_obs"), texts, strict=True))
            | {"seq": seq, "log_prob": log_prob, "value": value, "status": status, "learnable": bool(learnable)}
            | {"allocation": dict(zip(ALLOCATION_FIELDS, rest, strict=False))}
            | {"feedback": dict(zip(measured, rest[len(ALLOCATION_FIELDS) :], strict=True))}
        )
    return found


def store_rows(store: Store, request: RelayRequest, obs_size: int, levels: int) -> int:
    """Add the rows that are new; call ``store.committed()`` before the answer. Returns how many.

    Raises:
        ValueError: a row that does not fit this agent.
    """
    stored = 0
    for row in request.rows:
        request_id = f"relay:{request.node}:{row.seq}"
        if store.find_request(request_id) is not None:
            continue
        obs, action, next_obs = (
            np.frombuffer(base64.b64decode(text, validate=True), np.float32)
            for text in (row.obs, row.action, row.next_obs)
        )
        if len(obs) != obs_size or len(next_obs) != obs_size:
            raise ValueError(f"row {row.seq} has an observation of {len(obs)} numbers: expected {obs_size}")
        if len(action) != 2 or not all(share in range(levels) for share in action.tolist()):
            raise ValueError(f"row {row.seq} has the action {action.tolist()}: expected two of {levels} shares")
        try:
            fields: dict[str, Any] = row.allocation
            allocation = Allocation(seq=store.next_seq, token=secrets.token_hex(16), **fields)
            measured: dict[str, Any] = row.feedback
            feedback = Feedback(next_obs=next_obs.tobytes(), **measured)
        except TypeError as error:
            raise ValueError(f"row {row.seq}: {error}") from None
        if set(row.allocation) != set(ALLOCATION_FIELDS) or allocation.requested_cores <= 0 or allocation.cores <= 0:
            raise ValueError(f"row {row.seq} is not an allocation with feedback")
        store.next_seq += 1
        store.add(allocation, Experience(obs, action, row.log_prob, row.value), request_id)
        store.add_feedback(allocation, row.status, feedback, row.learnable and row.status == "accepted")
        store.count(f"feedback:{row.status}")
        stored += 1
    return stored


def policy_bytes(store: Path) -> bytes:
    """The checkpoint of the leader."""
    return (store / CHECKPOINT_NAME).read_bytes()


class Relay:
    """The node's side: sends rows and fetches the policy, once per second."""

    def __init__(self, settings: ServerSettings, store: Store) -> None:
        import httpx

        assert settings.leader is not None
        self.settings, self.store = settings, store
        verify: Any = True if settings.leader_ca is None else str(settings.leader_ca)
        self.client = httpx.AsyncClient(
            base_url=settings.leader, verify=verify, trust_env=False, timeout=settings.read_timeout_s
        )
        row = store.connection.execute("SELECT value FROM meta WHERE key = 'relayed'").fetchone()
        self.relayed: int = row[0] if row else 0
        self.version = load_checkpoint(settings.store / CHECKPOINT_NAME, CHECKPOINT_KIND).get("leader_version", -1)

    def _headers(self) -> dict[str, str]:
        path = self.settings.leader_token_file
        return {} if path is None else {"Authorization": f"Bearer {path.read_text().split()[0]}"}

    async def __call__(self) -> None:
        """Send all rows that have not been sent, then fetch the policy if the leader has a new one."""
        while rows := read_rows(self.store, self.relayed):
            body = {"node": self.settings.node_name, "rows": rows}
            answer = await self.client.post("/experiences", json=body, headers=self._headers())
            answer.raise_for_status()
            self.relayed = rows[-1]["seq"]
            self.store.remember_relayed(self.relayed)
        answer = await self.client.get("/policy", headers=self._headers() | {"If-None-Match": f'"{self.version}"'})
        if answer.status_code == 304:
            return
        answer.raise_for_status()
        self._install(answer.content)

    def _install(self, content: bytes) -> None:
        """Replace the checkpoint. It is loaded first: a checkpoint cannot run code, and a broken one is refused."""
        folder = self.settings.store
        temporary = folder / f".leader-{secrets.token_hex(4)}"
        temporary.write_bytes(content)
        try:
            state = load_checkpoint(temporary, CHECKPOINT_KIND)
        finally:
            os.unlink(temporary)
        # Numbers of feedback are those of the leader; the node learns from nothing itself.
        save_checkpoint(
            folder / CHECKPOINT_NAME,
            CHECKPOINT_KIND,
            state | {"learned_through": 0, "leader_version": state["version"]},
        )
        keep_version(folder, state["version"])
        self.version = state["version"]

    async def close(self) -> None:
        await self.client.aclose()
