"""The state folder: whole files or none, and trouble that is said and never raised."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.state import StateDir, default_dir, file_name


def test_what_was_written_is_read_back_with_private_modes(tmp_path):
    state = StateDir.open(tmp_path / "a" / "b")
    assert state.kept and state.problem == ""
    assert state.read("x.json", dict) is None
    assert state.write("x.json", {"a": "ü"}) == ""
    assert state.read("x.json", dict) == {"a": "ü"}
    assert stat.S_IMODE((tmp_path / "a/b/x.json").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "a/b").stat().st_mode) == 0o700
    assert sorted(os.listdir(tmp_path / "a/b")) == ["lock", "x.json"]
    state.remove("x.json")
    state.remove("x.json")
    assert state.read("x.json", dict) is None
    state.close()
    state.close()


def test_one_proxy_owns_a_folder_and_the_other_goes_without(tmp_path):
    first, second = StateDir.open(tmp_path), StateDir.open(tmp_path)
    assert (
        not second.kept and f"(pid {os.getpid()})" in second.problem and "server.state_dir" in second.problem
    )
    assert second.write("x.json", 1) == second.problem and second.read("x.json", int) is None
    assert second.names("runs") == () and second.folder("runs") is None
    second.remove("x.json")
    first.close()
    third = StateDir.open(tmp_path)
    assert third.kept
    third.close()


def test_a_killed_owner_lets_go(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from proxy.state import StateDir\n"
        "s = StateDir.open(Path(sys.argv[1])); print(s.kept, flush=True); time.sleep(600)"
    )
    root = Path(__file__).resolve().parents[1]
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=root
    ) as owner:
        assert owner.stdout.readline().strip() == "True"
        assert not StateDir.open(tmp_path).kept
        owner.kill()
    again = StateDir.open(tmp_path)
    assert again.kept
    again.close()


def test_the_lock_of_a_dead_owner_is_waited_for(tmp_path, monkeypatch):
    """A proxy that was killed while it started a process: the child has the lock until it is another program."""
    code = (
        "import os, sys; from pathlib import Path; from proxy.state import StateDir\n"
        "s = StateDir.open(Path(sys.argv[1]))\n"
        "if os.fork(): os._exit(0)\n"
        "print(s.kept, flush=True); sys.stdin.readline()"
    )
    root = Path(__file__).resolve().parents[1]
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root,
    ) as owner:  # fmt: skip
        assert owner.stdout.readline().strip() == "True"
        owner.wait(20)
        waits = []

        def instead(seconds):
            waits.append(seconds)
            if not owner.stdin.closed:
                owner.stdin.close()

        monkeypatch.setattr("proxy.state.time.sleep", instead)
        state = StateDir.open(tmp_path)
        assert state.kept and waits
        state.close()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b'{"version": 1}', b'{"version": 1, "data": []}', b"\xff\xfe"]
)
def test_a_corrupt_file_is_set_aside_and_named(tmp_path, content, capsys):
    (tmp_path / "gates.json").write_bytes(content)
    state = StateDir.open(tmp_path)
    assert state.read("gates.json", lambda data: data["models"]) is None
    assert (tmp_path / "gates.json.corrupt").read_bytes() == content
    assert state.write("gates.json", {"models": {}}) == ""
    assert state.read("gates.json", lambda data: data["models"]) == {}
    state.close()


def test_a_newer_version_is_kept_aside(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps({"version": 7, "data": {}}))
    state = StateDir.open(tmp_path)
    assert state.read("x.json", dict) is None
    assert (tmp_path / "x.json.v7").exists()
    state.close()


def test_a_folder_that_cannot_be_made_is_a_problem_not_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    state = StateDir.open(tmp_path / "file" / "state")
    assert not state.kept and "Not a directory" in state.problem and str(tmp_path) in state.problem


def test_a_full_disk_is_said_with_the_file_and_leaves_the_old_one():
    """/dev/full has no folder, so a tiny file size limit stands for the full disk, in a process of its own."""
    code = """
import resource, signal, sys, tempfile
from pathlib import Path
from proxy.state import StateDir
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = Path(tempfile.mkdtemp())
state = StateDir.open(folder)
assert state.write("x.json", {"a": 1}) == ""
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
problem = state.write("x.json", {"a": "x" * 1000})
assert "x.json cannot be written: File too large" in problem, problem
assert state.read("x.json", dict) == {"a": 1}
assert sorted(p.name for p in folder.iterdir()) == ["lock", "x.json"]
assert state.write("y.json", 1) == ""
"""
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("state is not kept") <= 1


def test_what_could_not_be_written_is_a_problem_until_it_is(tmp_path):
    """Not only at the start: whoever asks later sees which file is behind, and no longer than it is."""
    state = StateDir.open(tmp_path)
    assert state.write("gates.json", {}) == "" and state.problem == ""
    (tmp_path / "gates.json").unlink()
    (tmp_path / "gates.json").mkdir()
    (tmp_path / "gates.json" / "in the way").write_text("")
    words = state.write("gates.json", {})
    assert "gates.json cannot be written" in words and state.kept
    assert state.problem.startswith(words) and "make room" in state.problem
    assert state.behind("gates.json") and not state.behind("leases.json")
    (tmp_path / "gates.json" / "in the way").unlink()
    (tmp_path / "gates.json").rmdir()
    assert state.write("gates.json", {}) == "" and state.problem == "" and not state.behind("gates.json")
    state.close()


def test_a_folder_that_takes_nothing_any_more_is_said_at_the_start():
    """Its lock is there from better days, and what it holds can be read; a file size of nothing stands for the full disk."""
    code = """
import resource, signal, tempfile
from pathlib import Path
from proxy.state import StateDir
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = Path(tempfile.mkdtemp())
before = StateDir.open(folder)
assert before.problem == "" and before.write("x.json", {"a": 1}) == ""
before.close()
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
state = StateDir.open(folder)
assert state.kept and "cannot be written" in state.problem, state.problem
assert state.read("x.json", dict) == {"a": 1}
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert state.write("y.json", 1) == "" and state.problem == ""
assert sorted(p.name for p in folder.iterdir()) == ["lock", "x.json", "y.json"]
"""
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("folder", ["/proc/llama-proxy", "/sys/llama-proxy"])
def test_a_file_system_that_takes_nothing_is_a_problem(folder):
    """Whoever runs the proxy, root included."""
    state = StateDir.open(Path(folder))
    assert not state.kept and folder in state.problem and "server.state_dir" in state.problem
    assert state.write("gates.json", {}) == state.problem and state.read("gates.json", dict) is None


def test_a_read_only_folder_is_a_problem(tmp_path):
    """Except for root, who may write anywhere."""
    tmp_path.chmod(0o500)
    assert ("cannot be written" in StateDir.open(tmp_path).problem) == (os.geteuid() != 0)


def test_no_folder_is_no_problem():
    state = StateDir.open(None)
    assert not state.kept and state.problem == "" and state.write("x", 1) == ""


@given(st.text(min_size=1, max_size=300), st.text(min_size=1, max_size=300))
def test_file_names_are_distinct_and_fit(a, b):
    for name in (file_name(a), file_name(b)):
        assert "/" not in name and "\0" not in name and not name.startswith(".") and len(name) <= 120
    assert (file_name(a) == file_name(b)) == (a == b)


def test_the_default_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_dir() == tmp_path / "llama-proxy"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_dir() == tmp_path / ".local/state/llama-proxy"
