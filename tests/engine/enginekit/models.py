"""Test models: the zoo, made once per generator version, and optional downloaded files."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
ZOO = ROOT / "native-patch" / "tests" / "zoo"
EXTRA_ENV = "LLAMA_PROXY_TEST_MODELS"


def _cache() -> Path:
    """Return the zoo's cache folder; it is named after the generator's content."""
    digest = hashlib.sha256()
    for source in sorted(ZOO.glob("*.py")):
        digest.update(source.read_bytes())
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "llama-proxy" / "zoo" / digest.hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="zoo-"))
    return folder


def zoo(name: str) -> Path:
    """Return the path of zoo model ``name``, made when absent."""
    path = _cache() / f"{name}.gguf"
    if not path.exists():
        if str(ZOO) not in sys.path:
            sys.path.insert(0, str(ZOO))
        importlib.import_module("make_models").make(path.parent, [name])
    return path


def extra_model(name: str) -> Path | None:
    """Return an optional model file of that name, or ``None`` where it is absent."""
    folders = [Path(value)] if (value := os.environ.get(EXTRA_ENV)) else []
    folders.append(ROOT.parent / "shared" / "models")
    for folder in folders:
        path = folder / name
        if path.is_file():
            return path
    return None
