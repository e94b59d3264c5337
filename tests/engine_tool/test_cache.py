"""The cache's place and the lock: one builder at a time, never blocked by the dead."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from proxy.engine.cache import cache_from_environment, file_lock, make_dir
from proxy.engine.errors import EngineToolError, ExitCode

HOLDER = """
import sys
from pathlib import Path
from proxy.engine.cache import file_lock
with file_lock(Path(sys.argv[1]), "holding on"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Another process that holds `tmp_path/lock` until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait(10)
    process.stdout.close()
    process.stdin.close()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"LLAMA_PROXY_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/h"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/h"}, "/b/llama-proxy"),
        ({"HOME": "/h"}, "/h/.cache/llama-proxy"),
        ({"LLAMA_PROXY_CACHE": "", "HOME": "/h"}, "/h/.cache/llama-proxy"),
    ],
)
def test_where_the_cache_is(environ: dict[str, str], expected: str) -> None:
    assert cache_from_environment(environ).root == Path(expected)


def test_an_impossible_cache_names_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineToolError, match="LLAMA_PROXY_CACHE"):
        make_dir(tmp_path / "file" / "below")


def test_a_held_lock_names_its_holder(tmp_path: Path, holder, recorder) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(EngineToolError, match=rf"pid {holder.pid} \(holding on\)") as caught:
        with file_lock(tmp_path / "lock", "mine", recorder, timeout_s=0.3):
            pytest.fail("the lock is held")
    assert caught.value.exit_code is ExitCode.BUSY
    assert recorder.notes == [f"waiting for pid {holder.pid} (holding on), which works in the same place"]


def test_a_killed_holder_blocks_nobody(tmp_path: Path, holder) -> None:  # type: ignore[no-untyped-def]
    os.kill(holder.pid, signal.SIGKILL)
    with file_lock(tmp_path / "lock", "mine", timeout_s=10):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()} mine\n"
    assert (tmp_path / "lock").read_text() == ""


def test_a_waiter_gets_the_lock_when_it_is_free(tmp_path: Path, holder) -> None:  # type: ignore[no-untyped-def]
    got = threading.Event()

    def wait() -> None:
        with file_lock(tmp_path / "lock", "mine", timeout_s=30):
            got.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not got.is_set()
    holder.stdin.close()
    assert got.wait(10)
    thread.join(10)


def test_waiting_can_be_cancelled(tmp_path: Path, holder) -> None:  # type: ignore[no-untyped-def]
    cancel = threading.Event()
    cancel.set()
    before = time.monotonic()
    with pytest.raises(EngineToolError, match="cancelled") as caught:
        with file_lock(tmp_path / "lock", "mine", timeout_s=60, cancel=cancel):
            pytest.fail("the lock is held")
    assert caught.value.exit_code is ExitCode.INTERRUPTED
    assert time.monotonic() - before < 30
