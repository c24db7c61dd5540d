"""A bucket of S3 on this machine: a folder, and what was asked of it."""

import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def bucket(root, monkeypatch):
    """Serve root/NAME/... as s3://NAME/...; yields the list of (path, bytes asked for or None)."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            file = root / self.path.lstrip("/")
            exists = file.is_file()
            body = file.read_bytes() if exists else b""
            size = self.headers.get("Range")
            first, last = map(int, re.findall(r"\d+", size)) if size else (0, len(body) - 1)
            part = body[first : last + 1]
            asked.append((self.path, len(part) if size else None))
            self.send_response(206 if size else 200 if exists else 404)
            self.send_header("Content-Length", str(len(part)))
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(body)}")
            self.send_header("ETag", '"1"')
            self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(part)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{server.server_port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    try:
        yield asked
    finally:
        server.shutdown()
        server.server_close()
