"""A model goes to the Hub with its card: against a server that answers as the Hub does."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("huggingface_hub")

from moe_replay.report.model_card import HubPushError, push_folder


class FakeHub(ThreadingHTTPServer):
    """Creates repositories and takes commits of small files."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.validated = ""
        self.refuses = False


class _Answers(BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, *_: object) -> None:
        """Nothing on the console."""

    def do_GET(self) -> None:
        self._send({"sha": "0" * 40, "siblings": [], "id": "me/model"})

    def do_POST(self) -> None:
        body = self._body()
        if self.server.refuses:
            self._send({"error": "Invalid username or password."}, 401)
        elif self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self._send({"url": f"{self.server.url}/me/model"})
        elif self.path == "/api/validate-yaml":
            self.server.validated = json.loads(body)["content"]
            self._send({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            paths = [one["path"] for one in json.loads(body)["files"]]
            told = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            self._send({"files": [{"path": path, **told} for path in paths]})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            oid = "1" * 40
            self._send({"commitUrl": f"{self.server.url}/me/model/commit/{oid}", "commitOid": oid, "success": True})
        else:
            self._send({"error": self.path}, 404)

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        return b"".join(parts)

    def _send(self, content: dict[str, Any], status: int = 200) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub() as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_only_this_test_knows_it")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def exported(folder: Path) -> Path:
    export = folder / "checkpoints/step-00000040/hf"
    export.mkdir(parents=True)
    (export / "config.json").write_text("{}")
    (export / "README.md").write_text("# card")
    return export


@pytest.mark.parametrize("private", [True, False])
def test_every_file_of_the_export_is_pushed(hub: FakeHub, tmp_path: Path, private: bool) -> None:
    address = push_folder(exported(tmp_path), "me/model", private=private)
    assert address == f"{hub.url}/me/model"
    assert hub.files == {"config.json": b"{}", "README.md": b"# card"}
    (created,) = hub.created
    assert created["name"] == "model"
    assert created["organization"] == "me"
    assert (created.get("visibility") == "private" or created.get("private") is True) == private
    assert hub.validated == "# card"


def test_a_refused_push_names_the_folder_and_the_command(hub: FakeHub, tmp_path: Path) -> None:
    hub.refuses = True
    export = exported(tmp_path)
    with pytest.raises(HubPushError, match=r"pushing the model to me/model failed: .*401") as caught:
        push_folder(export, "me/model")
    assert f"hf upload me/model {export}" in str(caught.value)
    assert hub.files == {}
