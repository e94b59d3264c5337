"""Starts the real proxy as a process, with the real engine behind it, and looks at both from outside."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import psutil
import yaml

from tests.support import processes
from tests.support.wait import until

ROOT = Path(__file__).resolve().parents[2]


class Proxy:
    """One `llama-proxy serve` process on a free port. Use as a context manager."""

    def __init__(
        self,
        config: Mapping[str, Any],
        folder: Path,
        env: Mapping[str, str] | None = None,
        *,
        traced: bool = False,
    ) -> None:
        """`traced`: keep what admission decides at every step (see `trace`)."""
        self.folder = folder
        self.module = "tests.e2e.traced" if traced else "proxy"
        self.config = json.loads(json.dumps(config, default=str))
        self.config.setdefault("server", {}).setdefault("port", 0)
        self.config["server"].setdefault("log_format", "json")
        self.config["server"].setdefault("state_dir", str(folder / "state"))
        self.env = {**os.environ, "ADMISSION_TRACE": str(folder / "trace.jsonl"), **(env or {})}
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.log = folder / "proxy.log"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_all()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self, timeout_s: float = 60.0) -> None:
        """Start and wait until the port answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "config.yaml"
        file.write_text(yaml.safe_dump(self.config))
        offset = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.module, "serve", "--config", str(file)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.env, cwd=ROOT,
            )  # fmt: skip

        def listening() -> str:
            assert self.process is not None
            if self.process.poll() is not None:
                raise AssertionError(f"the proxy ended with {self.process.returncode}:\n{self.tail()}")
            for line in self.log.read_bytes()[offset:].splitlines():
                if b'"listening"' in line:
                    return str(json.loads(line)["url"])
            return ""

        self.url = until("the proxy listens", listening, timeout_s).rstrip("/")

    def tail(self, n: int = 40) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-n:])

    def events(self) -> list[dict[str, Any]]:
        """Return the JSON log lines."""
        found = []
        for line in self.log.read_bytes().splitlines():
            if line.startswith(b"{"):
                found.append(json.loads(line))
        return found

    def trace(self) -> list[dict[str, Any]]:
        """Return every step of a traced proxy's admission so far."""
        lines = (self.folder / "trace.jsonl").read_bytes().split(b"\n")
        return [json.loads(line) for line in lines[:-1]]

    def children(self) -> list[psutil.Process]:
        """Return all living descendants."""
        return processes.below(self.pid)

    def engines(self) -> list[psutil.Process]:
        """Return the living llama-server processes below the proxy."""
        return [p for p in self.children() if "llama-server" in processes.name(p)]

    def stop(self, sig: int = signal.SIGTERM, timeout_s: float = 30.0) -> int:
        """Send a signal and wait for the end."""
        assert self.process is not None
        self.process.send_signal(sig)
        return self.process.wait(timeout_s)

    def kill_all(self) -> None:
        """End whatever of ours is left."""
        if self.process is None:
            return
        left = self.children()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        processes.kill(left)

    def get(self, path: str, timeout_s: float = 10.0, headers: Mapping[str, str] | None = None) -> Any:
        """GET a JSON document."""
        request = urllib.request.Request(self.url + path, headers=dict(headers or {}))
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return json.loads(answer.read())

    def text(self, path: str, timeout_s: float = 10.0) -> str:
        """GET a text."""
        with urllib.request.urlopen(self.url + path, timeout=timeout_s) as answer:
            return str(answer.read().decode())

    def post(
        self, path: str, body: Any, timeout_s: float = 60.0, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        """POST JSON; returns (status, decoded body)."""
        request = urllib.request.Request(
            self.url + path, data=json.dumps(body).encode(),
            headers={"content-type": "application/json", **(headers or {})}, method="POST",
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return answer.status, json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"null")

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples whose labels include `labels` (0.0 when absent)."""
        total = 0.0
        for line in self.text("/metrics").splitlines():
            if line.startswith("#") or not line.startswith(name):
                continue
            head, _, value = line.rpartition(" ")
            bare, _, rest = head.partition("{")
            if bare == name and all(f'{k}="{v}"' in rest for k, v in labels.items()):
                total += float(value)
        return total
