"""Servers for the webhook tests: agents that fail in different ways, and webhooks that break the contract."""

from __future__ import annotations

import base64
import hashlib
import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from agent_client import TOKEN


class Quiet(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def reply(self, document: Any, status: int = 200) -> None:
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    """A server that ignores closed connections."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Some tests stop waiting for a response on purpose."""


@contextmanager
def served(server: ThreadingHTTPServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


class AgentServer(Server):
    """An agent that grants 75 % of the cores and 50 % of the memory, or fails as its mode says."""

    def __init__(self, address: str, port: int, mode: str = "good") -> None:
        self.mode = mode
        self.seen: list[dict[str, Any]] = []
        self.feedback: list[dict[str, Any]] = []
        """Feedback that was accepted."""
        self.tokens: list[str] = []
        super().__init__((address, port), AgentHandler)


class AgentHandler(Quiet):
    server: AgentServer

    def do_POST(self) -> None:
        request, mode = self.body(), self.server.mode
        self.server.tokens.append(self.headers["Authorization"])
        if self.path == "/feedback":
            if self.headers["Authorization"] != f"Bearer {TOKEN}":
                return self.reply({"detail": "no"}, 401)
            if mode == "503":
                return self.reply({"detail": "the store cannot be written"}, 503)
            if mode == "bug":
                return self.reply({"detail": "an error in the agent"}, 500)
            self.server.feedback.append(request)
            return self.reply({"status": "accepted", "reward": 1.0})
        self.server.seen.append(request)
        if mode == "slow":
            time.sleep(5)
        if self.path != "/allocate" or self.headers["Authorization"] != f"Bearer {TOKEN}" or mode == "401":
            return self.reply({"detail": "no"}, 401)
        if mode == "500":
            return self.reply({"detail": "broken"}, 500)
        if mode == "garbage":
            return self.reply(b"<html>")
        if mode == "empty":
            return self.reply({})
        scale = 2.0 if mode == "greedy" else 0.75
        # The id holds the question, so that a test can tell the answers apart.
        number = int.from_bytes(hashlib.sha256(request["request_id"].encode()).digest()[:16], "big")
        found = {
            "allocation_id": f"1-{number:032x}", "cores": min(request["cores"] * scale, 100.0),
            "memory": request["memory"] * 0.5, "policy_version": 7, "gpu": 0, "decided_by": "rule", "why": "VPA rule",
            "vpa_cores": 10.0, "vpa_memory": 100.0,
        }  # fmt: skip
        found |= {"recommended_cores": found["cores"], "recommended_memory": found["memory"]}
        if mode == "injection":
            found["allocation_id"] = "a\nb"
        return self.reply(found)


class FaultyWebhook(Quiet):
    """Breaks the contract in the way that the last part of the path names."""

    def do_POST(self) -> None:
        review = self.body()
        row = self.path.split("?")[0].rsplit("/", 1)[1]
        response: dict[str, Any] = {"uid": review["request"]["uid"], "allowed": True}
        reply = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}

        def patch(path: str, value: Any) -> str:
            return base64.b64encode(json.dumps([{"op": "add", "path": path, "value": value}]).encode()).decode()

        if row == "other-uid":
            response["uid"] = "another"
        elif row == "no-patch-type":
            response["patch"] = patch("/metadata/annotations", {"a": "b"})
        elif row == "v1beta1":
            reply["apiVersion"] = "admission.k8s.io/v1beta1"
        elif row == "bad-patch":
            response["patchType"], response["patch"] = "JSONPatch", patch("/metadata/missing/key", "x")
        elif row == "slow":
            time.sleep(2)
        elif row == "denied":
            response["allowed"] = False
            response["status"] = {"code": 403, "message": "not today"}
        elif row == "add-container":
            # A sidecar injector. A second call changes nothing.
            names = [container["name"] for container in review["request"]["object"]["spec"]["containers"]]
            if "side" not in names:
                side = {"name": "side", "image": "cuda", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
                response["patchType"], response["patch"] = "JSONPatch", patch("/spec/containers/-", side)
        self.reply(reply)


@contextmanager
def faulty_webhook(certificates: Path) -> Iterator[int]:
    server = Server(("127.0.0.1", 0), FaultyWebhook)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "tls.crt", certificates / "tls.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    with served(server):
        yield server.server_address[1]
