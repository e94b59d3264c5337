"""Time as a dependency: pure code receives it, shells read it here."""

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Returns monotonic seconds; only differences mean anything."""

monotonic: Clock = time.monotonic
