"""Logs: what a traceback may show."""

import io
import json
import sys
from collections.abc import Iterator

import pytest
import structlog

from proxy import logs


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    structlog.reset_defaults()


@pytest.mark.parametrize("fmt", ["json", "console"])
def test_a_traceback_names_places_and_holds_no_values(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure's frames hold bodies and keys; none of their variables may reach the log."""
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    logs.configure("info", fmt)  # type: ignore[arg-type]

    def handler(body: bytes, key: str) -> float:
        assert body and key
        return 1 / 0

    try:
        handler(b"private words", "very-secret")
    except ZeroDivisionError:
        structlog.get_logger().exception("handler failed", id="abc")
    text = out.getvalue()
    assert "ZeroDivisionError" in text and "handler" in text and __file__ in text
    lines = [line for line in text.splitlines() if "handler(b" not in line]
    assert "private words" not in "".join(lines)
    assert "very-secret" not in "".join(lines)
    if fmt == "json":
        assert json.loads(text)["id"] == "abc"
        assert "locals" not in text


@pytest.mark.parametrize("path", ["/\x1b]0;x\x07", "/\x1b[2J blank", "/\x9b31m"])
def test_no_caller_writes_to_the_operators_terminal(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path is what anybody sends; escape sequences in it are shown, not obeyed."""
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    logs.configure("info", "console")
    structlog.get_logger().info("request", path=path)
    structlog.get_logger().info(path)
    lines = out.getvalue().splitlines()
    assert len(lines) == 2 and all(line.isprintable() for line in lines)
    assert all(repr(path[1])[1:-1] in line for line in lines)
