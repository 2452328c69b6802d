"""As much of Google Cloud Storage's JSON API as gcsfs needs to keep objects, preconditions included.

The emulator on PyPI (gcp-storage-emulator 2026.7) knows no ``ifGenerationMatch``, which every promise rests on.
https://cloud.google.com/storage/docs/json_api/v1/objects
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import threading
import time
from dataclasses import dataclass, field
from email.parser import BytesParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class GcsStub:
    """A server with every bucket that anybody names. Use as a context manager.

    Attributes:
        objects: data, generation and time by (bucket, name).
    """

    objects: dict[tuple[str, str], tuple[bytes, int, float]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    generations: Any = field(default_factory=lambda: itertools.count(int(time.time() * 1e6)))

    def __enter__(self) -> GcsStub:
        stub = self

        class Handler(_Handler):
            owner = stub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    def put(self, bucket: str, name: str, data: bytes, only_if_absent: bool) -> dict[str, Any] | None:
        """Store an object; None if there is one and there must not be."""
        with self.lock:
            if only_if_absent and (bucket, name) in self.objects:
                return None
            self.objects[bucket, name] = data, next(self.generations), time.time()
            return self.describe(bucket, name)

    def describe(self, bucket: str, name: str) -> dict[str, Any]:
        data, generation, modified = self.objects[bucket, name]
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(modified)) + f".{int(modified % 1 * 1000):03d}Z"
        return {
            "kind": "storage#object",
            "id": f"{bucket}/{name}/{generation}",
            "name": name,
            "bucket": bucket,
            "generation": str(generation),
            "size": str(len(data)),
            "md5Hash": base64.b64encode(hashlib.md5(data).digest()).decode(),
            "timeCreated": when,
            "updated": when,
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: GcsStub

    def do_any(self) -> None:
        url = urlsplit(self.path)
        # Each segment is quoted by itself: a name's slashes are %2F.
        steps = [unquote(step) for step in url.path.strip("/").split("/")]
        query = {key: values[-1] for key, values in parse_qs(url.query, keep_blank_values=True).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        match self.command, steps:
            case "POST", ["upload", "storage", "v1", "b", bucket, "o"]:
                self._upload(bucket, query, body)
            case "GET", ["storage", "v1", "b", bucket, "o"]:
                self._list(bucket, query)
            case "GET", ["storage" | "download", *_, "b", bucket, "o", name]:
                self._get(bucket, name, media=query.get("alt") == "media")
            case "DELETE", ["storage", "v1", "b", bucket, "o", name]:
                with self.owner.lock:
                    found = self.owner.objects.pop((bucket, name), None)
                self._answer(204 if found else 404, b"")
            case _:
                self._refuse(404, f"no such method: {self.command} {self.path}")

    do_GET = do_POST = do_DELETE = do_PUT = do_any

    def _upload(self, bucket: str, query: dict[str, str], body: bytes) -> None:
        if query.get("uploadType") != "multipart" or query.get("ifGenerationMatch", "0") != "0":
            self._refuse(400, f"the stub knows no such upload: {query}")
            return
        head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
        metadata, media = BytesParser().parsebytes(head + body).get_payload()  # type: ignore[misc]
        name = json.loads(metadata.get_payload(decode=True))["name"]
        # Not the parser's payload, whose line ends are not the sender's.
        mark = f"\nContent-Type: {media.get_content_type()}\n\n".encode()
        data = body[body.index(mark) + len(mark) : body.rindex(b"\n--")]
        stored = self.owner.put(bucket, name, data, "ifGenerationMatch" in query)
        if stored is None:
            self._refuse(412, "At least one of the pre-conditions you specified did not hold.")
        else:
            self._answer(200, json.dumps(stored).encode())

    def _get(self, bucket: str, name: str, media: bool) -> None:
        with self.owner.lock:
            data = self.owner.objects.get((bucket, name), (None,))[0]
            described = self.owner.describe(bucket, name) if data is not None else {}
        if data is None:
            self._refuse(404, f"No such object: {bucket}/{name}")
        elif not media:
            self._answer(200, json.dumps(described).encode())
        elif "Range" not in self.headers:
            self._answer(200, data, "application/octet-stream")
        else:
            begin, end = self.headers["Range"].removeprefix("bytes=").split("-")
            if int(begin) >= len(data):
                self._refuse(416, "The requested range cannot be satisfied.")
            else:
                self._answer(206, data[int(begin) : int(end) + 1 if end else None], "application/octet-stream")

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        items, folders = [], set()
        with self.owner.lock:
            for in_bucket, name in sorted(self.owner.objects):
                if in_bucket != bucket or not name.startswith(prefix):
                    continue
                head, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
                if found:
                    folders.add(prefix + head + delimiter)
                else:
                    items.append(self.owner.describe(bucket, name))
        listing = {"kind": "storage#objects", "items": items, "prefixes": sorted(folders)}
        self._answer(200, json.dumps(listing).encode())

    def _refuse(self, status: int, message: str) -> None:
        self._answer(status, json.dumps({"error": {"code": status, "message": message}}).encode())

    def _answer(self, status: int, body: bytes, kind: str = "application/json; charset=UTF-8") -> None:
        self.send_response_only(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...
