"""The one error the engine tool raises on purpose, and its exit codes."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What a script can tell apart; 2 is left to the command line's own usage errors."""

    OK = 0
    FAILED = 1
    MISMATCH = 3
    MISSING_TOOL = 4
    BUSY = 5
    INTERRUPTED = 130


class EngineToolError(Exception):
    """A step of the engine tool could not be done.

    ``message`` names the file, flag or program and says what to do next; it is meant for people and is
    shown without a traceback.
    """

    def __init__(self, message: str, *, exit_code: ExitCode = ExitCode.FAILED) -> None:
        """Keep ``message`` and the exit code that a command line should end with."""
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code


class CancelledByCallerError(EngineToolError):
    """The caller's cancel event was set; finished work is kept and the next run continues."""

    def __init__(self, what: str) -> None:
        """Name the work that was cut short."""
        super().__init__(f"{what}: cancelled; the next run continues", exit_code=ExitCode.INTERRUPTED)
