"""The model zoo generator."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

ZOO = Path(__file__).resolve().parents[2] / "native-patch" / "tests" / "zoo" / "make_models.py"


def _make(out: Path, *names: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ZOO), str(out), *names]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def _digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def test_all_models_are_byte_identical_on_each_run(tmp_path: Path) -> None:
    """Two runs, into different folders, write the same files and nothing else."""
    for name in ("first", "second"):
        done = _make(tmp_path / name)
        assert done.returncode == 0, done.stderr
    first = _digests(tmp_path / "first")
    assert first == _digests(tmp_path / "second")
    assert all(name.endswith(".gguf") for name in first)
    assert {"llama.gguf", "llama-mid.gguf", "lora-a.gguf", "bert-embed.gguf"} <= set(first)


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    """The error says what was wrong and what there is; nothing is written."""
    done = _make(tmp_path / "out", "llama", "lama")
    assert done.returncode == 2
    assert "unknown model lama" in done.stderr
    assert "llama-mid" in done.stderr
    assert not (tmp_path / "out").exists()
