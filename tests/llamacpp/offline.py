"""The conftest.py of a private copy of llama.cpp's server tests: no network, local models, free ports.

It takes the place of the one in the source package, which downloads every model first. It runs inside the copy,
where `utils` is llama.cpp's module, and is told by the environment:

- `SUITE_MODELS`: a JSON object, preset name -> arguments that load a local model in its place
- `SUITE_FILES`: a JSON object, file name of a download -> local file in its place
- `SUITE_REPORT`: a file that gets one JSON line per test: id, outcome, seconds, reason
"""

import ctypes
import functools
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import types
import zlib
from pathlib import Path

import pytest
import requests

PR_SET_PDEATHSIG = 1
PICTURE_PX = 32
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
FILES = json.loads(os.environ["SUITE_FILES"])
MODELS = json.loads(os.environ["SUITE_MODELS"])
REPORT = Path(os.environ["SUITE_REPORT"])


def _copy_for_download(url, out):
    if (name := url.rsplit("/", 1)[-1]) not in FILES:
        raise OSError(f"this run has no network, and no file in the place of {url}")
    Path(out).parent.mkdir(exist_ok=True)
    shutil.copyfile(FILES[name], out)


# llama.cpp's helpers import it at the top and use it for downloads only
sys.modules["wget"] = types.SimpleNamespace(download=_copy_for_download)

import utils  # noqa: E402


def _png(seed: int) -> bytes:
    """A picture of coloured stripes, another one for each seed."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    pixels = (
        (x * seed % 256, y * 7 % 256, (x + y) * seed % 256)
        for y in range(PICTURE_PX)
        for x in range(PICTURE_PX)
    )
    flat = b"".join(bytes(pixel) for pixel in pixels)
    width = 3 * PICTURE_PX
    lines = b"".join(b"\0" + flat[at : at + width] for at in range(0, len(flat), width))
    header = struct.pack(">IIBBBBB", PICTURE_PX, PICTURE_PX, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(lines))
        + chunk(b"IEND", b"")
    )


_send = requests.Session.request


def _request(self, method, url, **options):
    """Answer pictures of the hub with one of ours; refuse what is not on this machine."""
    if url.split("//", 1)[-1].startswith(LOOPBACK):
        return _send(self, method, url, **options)
    if not url.endswith(".png"):
        raise requests.ConnectionError(f"this run has no network: {url}")
    response = requests.Response()
    response.status_code = 200
    response._content = _png(sum(url.encode()))
    return response


requests.Session.request = _request

_reserved: list[socket.socket] = []


def _free_port() -> int:
    """A port that stays ours: bound, never listened on; SO_REUSEADDR lets the server listen on it."""
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _reserved.append(holder)
    return int(holder.getsockname()[1])


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


class _Popen(subprocess.Popen):
    """A server that ends with this run, however that ends, and takes the arguments of its local model."""

    extra: tuple[str, ...] = ()

    def __init__(self, args, **kwargs):
        super().__init__([*args, *_Popen.extra], preexec_fn=_die_with_parent, **kwargs)


_starting = types.ModuleType("subprocess")
_starting.__dict__.update(subprocess.__dict__)
_starting.Popen = _Popen
utils.subprocess = _starting

_init, _start = utils.ServerProcess.__init__, utils.ServerProcess.start


@functools.wraps(_init)
def _init_on_free_port(self):
    _init(self)
    self.server_port = _free_port()


@functools.wraps(_start)
def _start_locally(self, *args, **kwargs):
    extra = tuple(getattr(self, "suite_arguments", ()))
    if self.no_mmproj and "--mmproj" in extra:
        extra = extra[: extra.index("--mmproj")]
    _Popen.extra = extra
    try:
        return _start(self, *args, **kwargs)
    finally:
        _Popen.extra = ()


utils.ServerProcess.__init__ = _init_on_free_port
utils.ServerProcess.start = _start_locally


def _local(preset, arguments):
    def make():
        server = preset()
        server.model_hf_repo = server.model_hf_file = None
        server.suite_arguments = arguments
        return server

    return staticmethod(make)


for _name, _arguments in MODELS.items():
    setattr(utils.ServerPreset, _name, _local(getattr(utils.ServerPreset, _name), _arguments))


@pytest.fixture(autouse=True)
def stop_server_after_each_test():
    """End every server a test left running, as llama.cpp's own conftest does."""
    yield
    for server in set(utils.server_instances):
        server.stop()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Write one line per test: what failed it or kept it from running, else that it passed."""
    report = (yield).get_result()
    if report.when == "setup":
        item.suite_outcome, item.suite_reason, item.suite_seconds = "passed", "", 0.0
    item.suite_seconds += report.duration
    if report.outcome != "passed" and item.suite_outcome == "passed":
        item.suite_outcome = report.outcome
        crash = getattr(report.longrepr, "reprcrash", None)
        item.suite_reason = crash.message if crash else str(report.longrepr)
    if report.when == "teardown":
        line = {
            "id": item.nodeid,
            "outcome": item.suite_outcome,
            "seconds": round(item.suite_seconds, 3),
            "reason": item.suite_reason[-600:],
        }
        with REPORT.open("a") as out:
            out.write(json.dumps(line) + "\n")
