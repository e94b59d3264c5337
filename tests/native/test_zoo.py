"""The model zoo generator."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import gguf

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
    described = re.findall(r"`([\w-]+)`", "".join(_first_cells()))
    assert {name.removesuffix(".gguf") for name in first} == set(described)


def _first_cells() -> list[str]:
    """Return the first cell of each row of the README's table of models."""
    lines = (ZOO.parent / "README.md").read_text().splitlines()
    return [line.split("|")[1] for line in lines if line.startswith("| `")]


def test_matrices_are_stored_in_the_type_that_is_named(tmp_path: Path) -> None:
    """Half precision and 8-bit blocks hold the same matrices; vectors stay F32."""
    kinds = {"llama": "F32", "llama-f16": "F16", "llama-q8_0": "Q8_0"}
    assert _make(tmp_path, *kinds).returncode == 0
    for name, kind in kinds.items():
        tensors = gguf.GGUFReader(tmp_path / f"{name}.gguf").tensors
        assert {t.tensor_type.name for t in tensors if len(t.shape) > 1} == {kind}
        assert {t.tensor_type.name for t in tensors if len(t.shape) == 1} == {"F32"}


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    """The error says what was wrong and what there is; nothing is written."""
    done = _make(tmp_path / "out", "llama", "lama")
    assert done.returncode == 2
    assert "unknown model lama" in done.stderr
    assert "llama-mid" in done.stderr
    assert not (tmp_path / "out").exists()
