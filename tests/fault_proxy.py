"""An HTTP proxy before a real server, which does to chosen requests what networks and busy buckets do.

    with FaultProxy(host, port) as proxy:
        proxy.inject(lose_answer, "PUT", "recipes/")      # the next PUT of a recipe is stored, and nobody is told
        proxy.inject(refuse(503, "SlowDown"), times=20)   # a storm

A fault is a function of (handler, request); it answers, or fails to.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_HOP_HEADERS = {"connection", "keep-alive", "transfer-encoding", "content-length"}


@dataclass(frozen=True)
class Request:
    """What a client asked.

    Attributes:
        method: GET, PUT, ...
        target: path and query.
        headers: as sent.
        body: as sent.
    """

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def is_listing(self) -> bool:
        return self.method == "GET" and "list-type=" in self.target


@dataclass(frozen=True)
class Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes


Fault = Callable[["_Handler", Request], None]


@dataclass
class _Injected:
    fault: Fault
    method: str
    part: str
    skip: int
    times: int


@dataclass
class FaultProxy:
    """Passes everything on, but what faults were injected for.

    Attributes:
        host: of the server behind.
        port: of the server behind.
        listings_lag_seconds: listings are answered as they were asked for first within this time.
        requests: all that were made, in the order of their arrival.
    """

    host: str
    port: int
    listings_lag_seconds: float = 0.0
    requests: list[Request] = field(default_factory=list)
    _injected: list[_Injected] = field(default_factory=list)
    _listings: dict[str, tuple[float, Answer]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> FaultProxy:
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = _Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def inject(self, fault: Fault, method: str = "", part: str = "", skip: int = 0, times: int = 1) -> None:
        """Let ``fault`` answer requests by ``method`` with ``part`` in their target: ``times``, after ``skip``."""
        self._injected.append(_Injected(fault, method, part, skip, times))

    def reset(self) -> None:
        self._injected.clear()
        self._listings.clear()
        self.requests.clear()
        self.listings_lag_seconds = 0.0

    def count(self, method: str = "", part: str = "") -> int:
        """How many requests by ``method`` with ``part`` in their target were made."""
        return sum(request.method.startswith(method) and part in request.target for request in self.requests)

    @property
    def num_waiting(self) -> int:
        """Injected faults that no request met yet."""
        return sum(each.times for each in self._injected)

    def fault_for(self, request: Request) -> Fault | None:
        with self._lock:
            self.requests.append(request)
            for each in self._injected:
                if request.method.startswith(each.method) and each.part in request.target and each.times:
                    if each.skip:
                        each.skip -= 1
                        continue
                    each.times -= 1
                    return each.fault
        return None

    def forward(self, request: Request) -> Answer:
        if not (request.is_listing and self.listings_lag_seconds):
            return self._ask(request)
        with self._lock:
            asked, answer = self._listings.get(request.target, (0.0, None))
            if answer is None or time.monotonic() - asked > self.listings_lag_seconds:
                asked, answer = time.monotonic(), self._ask(request)
                self._listings[request.target] = asked, answer
            return answer

    def _ask(self, request: Request) -> Answer:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        try:
            connection.putrequest(request.method, request.target, skip_host=True, skip_accept_encoding=True)
            for name, value in request.headers.items():
                if name.lower() not in _HOP_HEADERS | {"expect"}:
                    connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(request.body)))
            connection.endheaders(request.body)
            response = connection.getresponse()
            body = b"" if request.method == "HEAD" else response.read()
            return Answer(response.status, response.getheaders(), body)
        finally:
            connection.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are what this proxy is for."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: FaultProxy

    def do_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = Request(self.command, self.path, dict(self.headers), body)
        fault = self.owner.fault_for(request)
        if fault is not None:
            fault(self, request)
        else:
            self.send(request, self.owner.forward(request))

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do_any

    def send(self, request: Request, answer: Answer, pieces: Iterator[bytes] | None = None) -> None:
        """Send headers and a body, which may be given in other ``pieces`` than the headers promise."""
        self.send_response_only(answer.status)
        promised = dict(answer.headers).get("Content-Length") if request.method == "HEAD" else None
        for name, value in answer.headers:
            if name.lower() not in _HOP_HEADERS:
                self.send_header(name, value)
        self.send_header("Content-Length", promised or str(len(answer.body)))
        self.end_headers()
        for piece in pieces if pieces is not None else iter([answer.body]):
            self.wfile.write(piece)
            self.wfile.flush()

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None: ...


# Faults


def refuse(status: int, code: str, more: str = "") -> Fault:
    """Answer with a status and S3's error code, and do nothing."""

    def fault(handler: _Handler, request: Request) -> None:
        xml = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}: injected</Message>{more}</Error>"
        body = b"" if request.method == "HEAD" else xml.encode()
        handler.send(request, Answer(status, [("Content-Type", "application/xml")], body))

    return fault


def lose_answer(handler: _Handler, request: Request) -> None:
    """Do what is asked, and hang up."""
    handler.owner.forward(request)
    handler.hang_up()


def lose_request(handler: _Handler, request: Request) -> None:
    """Hang up, and do nothing."""
    handler.hang_up()


def truncate(handler: _Handler, request: Request) -> None:
    """Promise all of the body, send half of it, and hang up."""
    answer = handler.owner.forward(request)
    handler.send(request, answer, iter([answer.body[: len(answer.body) // 2]]))
    handler.hang_up()


def stall(seconds: float) -> Fault:
    """Send half of the body, and then nothing for so long."""

    def fault(handler: _Handler, request: Request) -> None:
        answer = handler.owner.forward(request)

        def halves() -> Iterator[bytes]:
            yield answer.body[: len(answer.body) // 2]
            time.sleep(seconds)

        handler.send(request, answer, halves())
        handler.hang_up()

    return fault


def trickle(pause: float) -> Fault:
    """Send the body a byte at a time."""

    def fault(handler: _Handler, request: Request) -> None:
        answer = handler.owner.forward(request)

        def drops() -> Iterator[bytes]:
            for number in range(len(answer.body)):
                time.sleep(pause)
                yield answer.body[number : number + 1]

        handler.send(request, answer, drops())

    return fault


def delay(seconds: float) -> Fault:
    """Do what is asked, late."""

    def fault(handler: _Handler, request: Request) -> None:
        time.sleep(seconds)
        handler.send(request, handler.owner.forward(request))

    return fault


def overlook(header: str) -> Fault:
    """Do what is asked, as a server does that does not know ``header``."""

    def fault(handler: _Handler, request: Request) -> None:
        kept = {name: value for name, value in request.headers.items() if name.lower() != header.lower()}
        handler.send(request, handler.owner.forward(Request(request.method, request.target, kept, request.body)))

    return fault


def overlook_query(field: str) -> Fault:
    """Do what is asked, as a server does that does not know a field of the query."""

    def fault(handler: _Handler, request: Request) -> None:
        path, _, query = request.target.partition("?")
        kept = "&".join(each for each in query.split("&") if not each.startswith(f"{field}="))
        understood = Request(request.method, f"{path}?{kept}", request.headers, request.body)
        handler.send(request, handler.owner.forward(understood))

    return fault
