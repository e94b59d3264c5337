"""Tells an engine that works slowly from one that will never answer again. Pure: polls in, a verdict out.

An engine is wedged when its process lives and one of these holds:

a. `/slots` was silent for `SILENT_POLLS` whole probe timeouts in a row. An engine answers it in milliseconds even
   during a long decode call, so silence means a stopped or deadlocked process. A poll that took much longer than
   its timeout says that *we* were held up, and does not count.
b. one decode call runs for longer than `wedge_after_s` and than 10 times the longest call of this generation,
   scaled by the tokens at stake. Before the first call has ended, its length is guessed from the model's size.
   A call is seen at polls only, so its length is taken at the most it can have been.
c. slots are busy, no decode call runs, and for `wedge_after_s` none was seen to have run: no slot's counts moved
   and no phase event came. An idle engine may wait for companions of what is queued, by its admit window or as
   a request's `x-phase-gather-ms` says: that wait comes on top. All other waiting (at the barrier, paused, queued
   behind a cohort) is for members that decode.

(b) and (c) need an engine that says `decode_running_ms`; a stock one is only watched for silence.
"""

from dataclasses import dataclass
from typing import Final

from proxy.types import EnginePhase, MemberState, Snapshot

SILENT_POLLS: Final = 3
HELD_UP_S: Final = 1.0
"""A timeout that fired this much late was our own stall, not the engine's silence."""
TIMES_LONGEST: Final = 10.0
UNSEEN_S: Final = 0.25
"""What a call can have gone on after it was last seen; busy engines are looked at every 50 ms."""
GATHER_S: Final = 1.0
"""The longest wait for companions that a request can ask an engine for (`x-phase-gather-ms`)."""
UNKNOWN_FIRST_S: Final = 60.0
"""Guess for the first decode call of a model of unknown size."""
GUESS_FLOP_PER_S: Final = 100e9
GUESS_READ_BYTES_PER_S: Final = 0.5e9
LONGEST_GUESS_S: Final = 180.0
"""A slow processor and a cold disk; times 10 this is at most half an hour, once per generation."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What a watchdog goes by. Sizes of 0 are unknown; `batch_tokens` is the most one decode call takes.

    `admit_s` is the engine's own window for companions (`--phase-admit-ms`).
    """

    wedge_after_s: float
    probe_timeout_s: float
    model_bytes: int = 0
    batch_tokens: int = 2048
    admit_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Wedged:
    """The verdict: which of the three rules (`silent`, `decode`, `stuck`), and its words for people."""

    rule: str
    words: str


def first_decode_s(model_bytes: int, tokens: int) -> float:
    """Guess the length of a first decode call in seconds.

    Weights are read once, and about 4 operations are done per byte of weights and token (2 per weight at 4 bits).
    """
    if not model_bytes:
        return UNKNOWN_FIRST_S
    guess = model_bytes / GUESS_READ_BYTES_PER_S + 4.0 * model_bytes * max(1, tokens) / GUESS_FLOP_PER_S
    return min(LONGEST_GUESS_S, guess)


def tokens_at_stake(snapshot: Snapshot, batch_tokens: int) -> int:
    """Return an upper bound of the tokens in the decode call that runs, at least 1."""
    prompts = generating = 0
    for slot in snapshot.slots:
        if not slot.busy:
            continue
        if slot.member in (MemberState.GENERATE, MemberState.READY) or (slot.decoded_tokens or 0) > 0:
            generating += 1
        else:
            prompts += slot.prompt_tokens or batch_tokens
    return max(1, min(batch_tokens, prompts) + generating)


class Watchdog:
    """Watches one generation of one engine."""

    def __init__(self, rules: Rules, now: float) -> None:
        self._rules = rules
        self._silent = 0
        self._answered_at = now
        self._signature: tuple[object, ...] = ()
        self._moved_at = now
        self._running_s = 0.0
        self._running_at = now
        self._running_tokens = 1
        self.longest_s = 0.0
        self.longest_tokens = 1

    def go_by(self, rules: Rules) -> None:
        """Judge by other rules from now on; what was seen so far counts."""
        self._rules = rules

    def silent(self, asked_at: float, now: float) -> Wedged | None:
        """Take a poll that timed out."""
        if now - asked_at > self._rules.probe_timeout_s + HELD_UP_S:
            self._silent = 0
            return None
        self._silent += 1
        if self._silent < SILENT_POLLS:
            return None
        return Wedged(
            "silent",
            f"its /slots gave no answer for {now - self._answered_at:.1f} s although its process lives",
        )

    def refused(self) -> None:
        """Take a poll that failed otherwise: not silence."""
        self._silent = 0

    def seen(self, snapshot: Snapshot) -> Wedged | None:
        """Take an answer of `/slots`."""
        now = snapshot.taken_at
        self._silent, self._answered_at = 0, now
        if not snapshot.native:
            return None
        self._learn(snapshot)
        if snapshot.busy == 0 or snapshot.decode_running_ms > 0 or self._moved(snapshot):
            self._moved_at = now
        if snapshot.busy == 0:
            return None
        running_s = snapshot.decode_running_ms / 1000
        if running_s > self._limit_s(snapshot):
            longest = (
                f"the longest before took at most {self.longest_s:.2f} s"
                if self.longest_s
                else "no other was seen"
            )
            return Wedged("decode", f"one decode call runs for {running_s:.1f} s ({longest})")
        still_s = now - self._moved_at
        if still_s > self._rules.wedge_after_s + self._window_s(snapshot):
            return Wedged(
                "stuck",
                f"{snapshot.busy} of its slots are busy and it decoded nothing for {still_s:.1f} s",
            )
        return None

    def _window_s(self, snapshot: Snapshot) -> float:
        """Return for how long an engine that could begin may wait for companions: only an idle one does."""
        return max(self._rules.admit_s, GATHER_S) if snapshot.phase is EnginePhase.IDLE else 0.0

    def _limit_s(self, snapshot: Snapshot) -> float:
        tokens = tokens_at_stake(snapshot, self._rules.batch_tokens)
        if self.longest_s > 0:
            # never below the longest: a small batch over a long context may take as long as a large one
            longest_s = self.longest_s * max(1.0, tokens / self.longest_tokens)
        else:
            longest_s = first_decode_s(self._rules.model_bytes, tokens)
        return max(self._rules.wedge_after_s, TIMES_LONGEST * longest_s)

    def _learn(self, snapshot: Snapshot) -> None:
        """Note the length of a call once a later answer shows that it is over.

        It ended somewhere between the answers, at the latest when the call that runs now began. A gap much longer
        than that between polls says that we were held up, and nothing of the call.
        """
        now, running_s = snapshot.taken_at, snapshot.decode_running_ms / 1000
        if self._running_s > 0 and running_s < self._running_s:
            unseen_s = now - running_s - self._running_at
            length_s = self._running_s + min(UNSEEN_S, max(0.0, unseen_s))
            if length_s > self.longest_s:
                self.longest_s, self.longest_tokens = length_s, self._running_tokens
            self._running_s = 0.0
        if running_s > 0:
            if self._running_s == 0:
                self._running_tokens = tokens_at_stake(snapshot, self._rules.batch_tokens)
            self._running_s, self._running_at = running_s, now

    def _moved(self, snapshot: Snapshot) -> bool:
        signature = (
            snapshot.seq,
            *(
                (slot.id, slot.task, slot.processed_tokens, slot.held_tokens, slot.decoded_tokens)
                for slot in snapshot.slots
                if slot.busy
            ),
        )
        before, self._signature = self._signature, signature
        return signature != before
