"""A signal ends the engine whatever its main thread was doing."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.engine.enginekit.models import zoo
from tests.engine.enginekit.server import Server, greedy

SHIM = Path(__file__).parent / "enginekit" / "term_in_lock.c"
UNLOCKS = range(1, 7)
ANSWER_S, END_S = 5.0, 15.0


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the library that sends SIGTERM at the worst moment."""
    library = tmp_path_factory.mktemp("shim") / "term_in_lock.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SHIM), "-ldl"], check=True, timeout=60
    )
    return library


def _ends(binary: Path, shim: Path, unlock: int, folder: Path) -> bool:
    """Tell whether an engine ends that gets SIGTERM while its main thread holds a lock."""
    env = {"LD_PRELOAD": str(shim), "TERM_AT_UNLOCK": str(unlock)}
    with Server(binary, zoo("llama"), ("-np", "2", "-c", "1024"), folder, env=env) as server:
        assert server.complete("warm", 2)["tokens_predicted"] == 2
        server.send_signal(signal.SIGUSR1)
        # an engine that ends answers it or drops it, one that is locked up does neither
        asked = server.start(greedy("a", 3))
        asked.wait_done(ANSWER_S)
        asked.close()
        return server.exit_code(END_S) == 0


def test_a_signal_may_find_the_main_thread_in_any_lock(
    engine_binary: Path, shim: Path, tmp_path: Path
) -> None:
    """SIGTERM in each of the first moments of a request in which the main thread holds a lock."""
    stuck = [n for n in UNLOCKS if not _ends(engine_binary, shim, n, tmp_path / str(n))]
    assert not stuck, f"locked up in unlock {stuck}"
