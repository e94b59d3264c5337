"""The clients; those in JavaScript are installed once per lock file, outside the checkout."""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.interop.clients import CLIENTS

HERE = Path(__file__).resolve().parent
FILES = ("package.json", "package-lock.json", "read.mjs")
INSTALL_S = 240


@pytest.fixture(scope="session")
def node_client() -> list[str]:
    """The command that runs `read.mjs` with its packages; skips where there is no Node.js or no registry."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("no Node.js: install nodejs and npm (Node.js 18 or newer)")
    digest = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in FILES)).hexdigest()[:16]
    cache = os.environ.get("LLAMA_PROXY_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    base = Path(cache) if cache else home / "llama-proxy"
    folder = base / f"interop-{digest}"
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            shutil.copy(HERE / name, folder / name)
        done = subprocess.run(
            [npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=INSTALL_S,
            check=False,
        )
        if done.returncode != 0:
            pytest.skip(f"npm cannot install eventsource-parser: {done.stderr.strip()[-300:]}")
        (folder / "done").touch()
    return [node, str(folder / "read.mjs")]


@pytest.fixture(params=list(CLIENTS))
def reads(request: pytest.FixtureRequest) -> Callable[[str, dict[str, Any]], Awaitable[str]]:
    """One client after the other: posts a chat to a base address and returns the text of its stream."""
    client: Any = CLIENTS[request.param]
    if request.param == "eventsource_parser":
        return partial(client, request.getfixturevalue("node_client"))
    return client
