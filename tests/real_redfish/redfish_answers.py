"""A BMC for tests: an HTTPS server with a dictionary of answers, its users, and what it was asked."""

from __future__ import annotations

import base64
import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from certificates import Authority

USER, PASSWORD = "doctor", "who"
ROOT = "/redfish/v1/"
SYSTEM, MANAGER = f"{ROOT}Systems/1", f"{ROOT}Managers/1"
_BASIC = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()


def healthy() -> dict[str, Any]:
    """Return the answers of a server that is on and well."""
    root: dict[str, Any] = {"@odata.id": ROOT, "Id": "Root", "Name": "Root", "RedfishVersion": "1.5.0"}
    answers: dict[str, Any] = {ROOT: root}
    for kind, one in (("Systems", SYSTEM), ("Managers", MANAGER)):
        root[kind] = {"@odata.id": f"{ROOT}{kind}"}
        answers[f"{ROOT}{kind}"] = {"@odata.id": f"{ROOT}{kind}", "Name": kind, "Members": [{"@odata.id": one}]}
        answers[one] = {"@odata.id": one, "Id": "1", "Name": kind, "Status": {"Health": "OK"}, "PowerState": "On"}
    return answers


class Bmc:
    """`answers`: path to a document, to bytes as they are, or to a number that is the status."""

    def __init__(self, answers: dict[str, Any], folder: Path) -> None:
        self.answers = answers
        self.asked: list[tuple[str, str, str]] = []
        """Method, path and authorization of each request."""
        self.drip_s = 0.0
        """Between two bytes of an answer."""
        authority = Authority(folder)

        bmc = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                bmc._note(self)
                found = bmc.answers.get(self.path, 404)
                if self.path != ROOT and not bmc._known(self):
                    found = 401
                bmc._answer(self, found)

            def log_message(self, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: Any) -> None:
                """Clients that break off are what the tests are about."""

        self._server = Server(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*authority.issue("bmc"))
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.url = f"https://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def running(self) -> Iterator[Bmc]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def _known(self, handler: BaseHTTPRequestHandler) -> bool:
        return handler.headers.get("Authorization") == _BASIC

    def _note(self, handler: BaseHTTPRequestHandler) -> None:
        self.asked.append((handler.command, handler.path, handler.headers.get("Authorization", "")))

    def _answer(self, handler: BaseHTTPRequestHandler, found: Any) -> None:
        if isinstance(found, str):  # a redirect
            handler.send_response(302)
            handler.send_header("Location", found)
            found = b""
        else:
            handler.send_response(found if isinstance(found, int) else 200)
        body = found if isinstance(found, bytes) else b"{}" if isinstance(found, int) else json.dumps(found).encode()
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        try:
            for i in range(0, len(body), 1 if self.drip_s else len(body) or 1):
                handler.wfile.write(body[i : i + (1 if self.drip_s else len(body))])
                time.sleep(self.drip_s)
        except OSError:
            pass  # the client has enough
