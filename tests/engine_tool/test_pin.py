"""The pin: read strictly, found in a checkout and in a wheel's layout."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from proxy.engine.errors import EngineToolError
from proxy.engine.pin import find_native_patch, parse_upstream, read_upstream

GOOD = f"package: p\nversion: 1.0\nsha256: {'a' * 64}\nsize_bytes: 5\nbuild_number: 1\n"
ROOT = Path(__file__).resolve().parents[2]


def test_reads_every_field_and_skips_comments() -> None:
    pin = parse_upstream(f"# note\n\n{GOOD}")
    assert (pin.package, pin.version, pin.size_bytes, pin.build_number) == ("p", "1.0", 5, 1)
    assert pin.identity == "p-1.0"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (GOOD.replace("version: 1.0\n", ""), "version"),
        (GOOD + "version: 2\n", "UPSTREAM:6"),
        (GOOD + "branch: main\n", "UPSTREAM:6"),
        (GOOD.replace("a" * 64, "A" * 64), "sha256"),
        (GOOD.replace("a" * 64, "a" * 63), "sha256"),
        (GOOD.replace("size_bytes: 5", "size_bytes: -5"), "size_bytes"),
        (GOOD.replace("build_number: 1", "build_number: one"), "build_number"),
        (GOOD.replace("package: p", "package p"), "UPSTREAM:1"),
    ],
)
def test_names_the_line_or_key_that_is_wrong(text: str, named: str) -> None:
    with pytest.raises(EngineToolError, match=named):
        parse_upstream(text)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineToolError, match="UPSTREAM"):
        read_upstream(tmp_path)


def test_the_pin_is_written_in_one_place_only() -> None:
    """Whoever moves the pin edits UPSTREAM; a second copy would go stale."""
    pin = read_upstream(ROOT / "native-patch")
    for file in [*(ROOT / "proxy").rglob("*.py"), *(ROOT / "native-patch").glob("*.md")]:
        text = file.read_text(encoding="utf-8")
        assert pin.sha256 not in text, file
        assert pin.version not in text, file


def test_checkout_comes_before_package_data() -> None:
    assert find_native_patch() == ROOT / "native-patch"


def test_package_data_is_found_without_a_checkout(tmp_path: Path) -> None:
    """As in an installed wheel: the package in one place, the patch directory inside it."""
    shutil.copytree(ROOT / "proxy" / "engine", tmp_path / "proxy" / "engine")
    (tmp_path / "proxy" / "__init__.py").write_text("")
    shutil.copytree(ROOT / "native-patch", tmp_path / "proxy" / "_native_patch")
    code = "from proxy.engine.pin import find_native_patch as f; print(f())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == str(tmp_path / "proxy" / "_native_patch"), done.stderr
