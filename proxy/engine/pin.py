"""What the engine is made from: the pinned source and the patch directory that goes with it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from proxy.engine.errors import EngineToolError

_SHA256 = re.compile(r"[0-9a-f]{64}")
_KEYS = frozenset({"package", "version", "sha256", "size_bytes", "build_number"})


@dataclass(frozen=True, slots=True)
class Upstream:
    """The pin, as ``native-patch/UPSTREAM`` states it: a source package whose archive holds ``llama.cpp/``."""

    package: str
    version: str
    sha256: str
    size_bytes: int
    build_number: int

    @property
    def identity(self) -> str:
        """The pin in one word, as shown by ``/props`` and the manifest."""
        return f"{self.package}-{self.version}"


def parse_upstream(text: str, origin: str = "UPSTREAM") -> Upstream:
    """Read ``key: value`` lines; ``#`` starts a comment line. Raises EngineToolError naming ``origin`` and the key."""
    values: dict[str, str] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        key, colon, value = line.partition(":")
        key, value = key.strip(), value.strip()
        if not colon or key not in _KEYS or not value or key in values:
            expected = ", ".join(sorted(_KEYS))
            raise EngineToolError(
                f"{origin}:{number}: expected each of {expected} once, as 'key: value'; got {raw!r}"
            )
        values[key] = value
    if missing := sorted(_KEYS - values.keys()):
        raise EngineToolError(f"{origin}: missing {', '.join(missing)}")
    if not _SHA256.fullmatch(values["sha256"]):
        raise EngineToolError(f"{origin}: sha256 must be 64 lower-case hex digits, got {values['sha256']!r}")
    for key in ("size_bytes", "build_number"):
        if not values[key].isascii() or not values[key].isdigit():
            raise EngineToolError(f"{origin}: {key} must be a whole number, got {values[key]!r}")
    return Upstream(
        package=values["package"],
        version=values["version"],
        sha256=values["sha256"],
        size_bytes=int(values["size_bytes"]),
        build_number=int(values["build_number"]),
    )


def read_upstream(native_patch: Path) -> Upstream:
    """Read the pin of the patch directory ``native_patch``."""
    path = native_patch / "UPSTREAM"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise EngineToolError(f"cannot read the pin {path}: {error.strerror or error}") from error
    return parse_upstream(text, str(path))


def find_native_patch() -> Path:
    """The patch directory: ``native-patch/`` beside the package in a checkout, else the copy inside the package."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package.parent / "native-patch", package / "_native_patch"):
        if (candidate / "UPSTREAM").is_file():
            return candidate
    raise EngineToolError(
        f"no patch series found: neither {package.parent / 'native-patch'} nor {package / '_native_patch'} "
        "holds UPSTREAM; install llama-proxy again"
    )
