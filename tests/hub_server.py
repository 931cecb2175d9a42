"""A hub on this machine, for the real client: one repository, and a note of all that was asked."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c" * 40


@dataclass
class Hub:
    """Where it listens, and the bytes of each file that were sent."""

    url: str
    sent: dict[str, int] = field(default_factory=dict)
    revisions: set[str] = field(default_factory=set)


@contextlib.contextmanager
def serve(directory: Path, repo: str = "acme/reader") -> Iterator[Hub]:
    """Serve a directory as the repository's only commit, under the names `main` and `v1`."""
    hub = Hub("")

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._file(body=False)

        def do_GET(self) -> None:
            if not self.path.startswith("/api/"):
                self._file(body=True)
            elif "/tree/" in self.path:
                self._json([_entry(path) for path in _files(directory)])
            else:
                self._revision(self.path.rpartition("/")[2].partition("?")[0])

        def _revision(self, name: str) -> None:
            if name not in ("main", "v1", COMMIT):
                self.send_response(404)
                self.send_header("X-Error-Code", "RevisionNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            siblings = [{"rfilename": path.name} for path in _files(directory)]
            self._json({"id": repo, "sha": COMMIT, "siblings": siblings, "tags": []})

        def _json(self, value: object) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _file(self, *, body: bool) -> None:
            revision, _, name = self.path.removeprefix(f"/{repo}/resolve/").partition("/")
            hub.revisions.add(revision)
            path = directory / name
            if not path.is_file():
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            data = path.read_bytes()
            asked = self.headers.get("Range", "")
            if asked.startswith("bytes="):
                first, _, last = asked.removeprefix("bytes=").partition("-")
                part = data[int(first) : int(last or len(data)) + 1]
                self.send_response(206)
                self.send_header(
                    "Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
                )
            else:
                part = data
                self.send_response(200)
            self.send_header("Content-Length", str(len(part)))
            self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if body:
                hub.sent[name] = hub.sent.get(name, 0) + len(part)
                self.wfile.write(part)

        def log_message(self, *_: object) -> None:
            """Nothing on stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.is_file())


def _entry(path: Path) -> dict[str, object]:
    oid = hashlib.sha1(path.read_bytes()).hexdigest()
    return {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": oid}
