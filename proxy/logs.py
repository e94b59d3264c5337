"""Structured logs: JSON when standard error is not a terminal, readable lines when it is.

One canonical line per request and one per transition; never a prompt, a completion or a key.
"""

import logging
import sys
from typing import Any, Literal

import structlog

Log = structlog.typing.FilteringBoundLogger

_WITHOUT_VALUES = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
"""Tracebacks without the frames' variables: those hold bodies and keys."""
_QUOTED = frozenset(" \t=\r\n\"'")
"""A value with one of these is quoted, and escaped, by the renderer."""


def configure(level: str = "info", fmt: Literal["auto", "json", "console"] = "auto") -> None:
    """Set up structlog and the standard library's root logger to write to standard error."""
    number = logging.getLevelNamesMapping()[level.upper()]
    as_json = fmt == "json" or (fmt == "auto" and not sys.stderr.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    tail: list[structlog.typing.Processor] = (
        [structlog.processors.ExceptionRenderer(_WITHOUT_VALUES), structlog.processors.JSONRenderer()]
        if as_json
        else [
            _printable,
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
            ),
        ]
    )
    structlog.configure(
        processors=[*shared, *tail],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *tail],
        )
    )
    logging.basicConfig(level=max(number, logging.WARNING), handlers=[handler], force=True)


def _printable(_log: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Escape what a terminal acts on: paths and names come from whoever sends them."""
    return {key: _escaped(key, value) if isinstance(value, str) else value for key, value in event.items()}


def _escaped(key: str, text: str) -> str:
    if text.isprintable() or (key != "event" and _QUOTED & set(text)):
        return text
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


def get(name: str) -> Log:
    """Return a logger bound to a subject, for example `admission`."""
    log: Log = structlog.get_logger(subject=name)
    return log
