"""Time as a dependency: pure code receives it, shells read it here."""

import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final

Clock = Callable[[], float]
"""Returns monotonic seconds; only differences mean anything."""

monotonic: Clock = time.monotonic
wall: Clock = time.time
"""Seconds since 1970: for people to read, and for deadlines that must outlive a boot."""

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


@cache
def boot_id() -> str:
    """Return what tells this boot from others, empty where the system does not say.

    Within one boot the monotonic clock of two processes is the same, whatever happens to the wall clock.
    """
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
