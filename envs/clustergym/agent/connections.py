"""Limits on connections: how many are open, and how long a client may take to send a request or to read an answer."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

BACKLOG = 128
"""Connections that the kernel keeps until they are accepted."""
OTHER_FILES = 128
"""Files that the process opens in addition to connections: database, checkpoint, GPU driver, log."""


@dataclass(frozen=True)
class ConnectionLimits:
    max_connections: int
    read_timeout_s: float
    """Maximum time from the first byte of a request (or from the connection) to its last byte."""
    write_timeout_s: float
    """Maximum time that a client may leave an answer unread."""


class ConnectionPool:
    """The open connections of a server.

    If there are too many, the one that has waited longest for a request is closed; first those that have never sent
    one. So a client that only opens connections pushes out its own, and health probes get through.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.open = 0
        self.evicted = 0
        self.refused = 0
        self.timed_out = 0
        self.accepted: OrderedDict[int, CountedSocket] = OrderedDict()
        """Connections by file number that have no protocol yet: just accepted, or in a TLS handshake."""
        self._new: OrderedDict[TimedProtocol, None] = OrderedDict()
        self._idle: OrderedDict[TimedProtocol, None] = OrderedDict()

    def admit(self) -> bool:
        """Make room for a connection. False if all others are being served."""
        if self.open < self.limits.max_connections:
            return True
        if self._new:
            self._new.popitem(last=False)[0].transport.abort()
        elif self.accepted:
            with contextlib.suppress(OSError):  # the client may have disconnected
                self.accepted.popitem(last=False)[1].shutdown(socket.SHUT_RDWR)
        elif self._idle:
            self._idle.popitem(last=False)[0].transport.abort()
        else:
            self.refused += 1
            return False
        self.evicted += 1
        return True

    def mark_new(self, protocol: TimedProtocol) -> None:
        self.accepted.pop(protocol.transport.get_extra_info("socket").fileno(), None)
        self._new[protocol] = None

    def mark_idle(self, protocol: TimedProtocol) -> None:
        self._idle[protocol] = None

    def mark_busy(self, protocol: TimedProtocol) -> None:
        self._new.pop(protocol, None)
        self._idle.pop(protocol, None)


class CountedSocket(socket.socket):
    """A connection that tells its pool when it is closed."""

    pool: ConnectionPool | None = None

    def close(self) -> None:
        if self.pool is not None:
            self.pool.open -= 1
            self.pool.accepted.pop(self.fileno(), None)
            self.pool = None
        super().close()


class ListeningSocket(socket.socket):
    """Counts connections when they are accepted, so TLS handshakes count too."""

    pool: ConnectionPool

    def accept(self) -> tuple[socket.socket, Any]:
        handle, address = self._accept()  # type: ignore[attr-defined]
        connection = CountedSocket(self.family, self.type, self.proto, fileno=handle)
        if not self.pool.admit():
            connection.close()
            # asyncio ignores this error, as it does if the client has already disconnected.
            raise ConnectionAbortedError("too many connections")
        connection.pool = self.pool
        self.pool.open += 1
        self.pool.accepted[connection.fileno()] = connection
        return connection, address


def listen(host: str, port: int, pool: ConnectionPool) -> ListeningSocket:
    """A listening socket whose connections are counted by the pool."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
        0
    ]
    listener = ListeningSocket(family, kind, proto)
    listener.pool = pool
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}, port {port}: {error.strerror}") from None
    return listener


def reserve_files(max_connections: int) -> None:
    """Raise the limit on open files above the limit on connections, or say that it cannot be done."""
    needed = max_connections + BACKLOG + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise ValueError(
                f"--max-connections {max_connections} needs {needed} open files, but the limit is {hard}: "
                f"raise it (ulimit -Hn), or use at most {hard - BACKLOG - OTHER_FILES} connections"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class Loop(asyncio.SelectorEventLoop):
    """The event loop of the server. TLS handshakes have the time limit of requests; asyncio's default is a minute."""

    handshake_timeout_s = 5.0

    async def create_server(self, *args: Any, **options: Any) -> asyncio.Server:
        if options.get("ssl") is not None:
            options.setdefault("ssl_handshake_timeout", self.handshake_timeout_s)
        return await super().create_server(*args, **options)


class TimedProtocol(H11Protocol):
    """HTTP with time limits. Use :func:`make_protocol`."""

    pool: ConnectionPool

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._timer: asyncio.TimerHandle | None = None

    def _start_timer(self, seconds: float) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(seconds, self._time_out)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_out(self) -> None:
        self._timer = None
        self.pool.timed_out += 1
        self.transport.abort()

    def _watch(self) -> None:
        """Start or stop the timer, depending on whether a request has been received in full."""
        if self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete:
            self._stop_timer()
            self.pool.mark_busy(self)
        else:
            self._start_timer(self.pool.limits.read_timeout_s)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.pool.mark_new(self)
        self._start_timer(self.pool.limits.read_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.pool.mark_busy(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.transport.is_closing():
            self._watch()

    def on_response_complete(self) -> None:
        self._stop_timer()
        self.pool.mark_idle(self)
        super().on_response_complete()
        if self.cycle is not None and not self.cycle.response_complete:  # the next request has already arrived
            self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_timer()
        self._start_timer(self.pool.limits.write_timeout_s)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_timer()


def make_protocol(pool: ConnectionPool) -> type[TimedProtocol]:
    """The protocol of a server with this pool, for uvicorn."""
    return type("PoolProtocol", (TimedProtocol,), {"pool": pool})
