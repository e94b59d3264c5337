"""Fixtures shared by all suites: engines, models, where they come from and why a test skips."""

import atexit
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        # nohup and background jobs ignore these and hand that on to every child; a handler of our own is
        # not handed on, so programs under test can be interrupted while this run still cannot
        signal.signal(_number, lambda *_: None)

# gates, leases and run records of proxies under test are nobody's but theirs
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="llama-proxy-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

# a machine that stands still for a moment is no finding
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("here")

ROOT = Path(__file__).resolve().parent.parent
ZOO_SCRIPT = ROOT / "native-patch" / "tests" / "zoo" / "make_models.py"


@pytest.fixture(scope="module", autouse=True)
def _what_a_module_leaves_is_its_own() -> Iterator[None]:
    """Find sockets and processes that nobody closed here, not in whatever test the collector happens to run."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def engine_binary() -> Path:
    """The patched llama-server: `LLAMA_SERVER_BIN`, else the one in the user's cache."""
    named = os.environ.get("LLAMA_SERVER_BIN")
    if named:
        return Path(named)
    done = subprocess.run(
        [sys.executable, "-m", "proxy", "engine", "path"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip("no patched engine: run `llama-proxy engine build` or set LLAMA_SERVER_BIN")
    return Path(done.stdout.strip())


@pytest.fixture(scope="session")
def stock_binary() -> Path:
    """A llama-server built from the pristine source: `LLAMA_SERVER_STOCK`."""
    named = os.environ.get("LLAMA_SERVER_STOCK")
    if not named:
        pytest.skip("no pristine engine: set LLAMA_SERVER_STOCK (make test builds one)")
    return Path(named)


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Random-weight models by name, made once per run."""
    folder = tmp_path_factory.mktemp("zoo")

    def get(name: str) -> Path:
        file = folder / f"{name}.gguf"
        if not file.exists():
            subprocess.run(
                [sys.executable, str(ZOO_SCRIPT), str(folder), name],
                check=True,
                timeout=120,
                stdout=subprocess.DEVNULL,
            )
        return file

    return get


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """SmolLM2-135M: slow enough on one core to watch a prefill."""
    named = os.environ.get("LLAMA_PROXY_DEMO_MODEL")
    if named:
        return Path(named)
    done = subprocess.run(
        [sys.executable, "-m", "proxy", "engine", "model"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(f"the demo model cannot be had: {done.stderr.strip()[-200:]}")
    return Path(done.stdout.strip().splitlines()[-1])
