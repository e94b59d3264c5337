"""What a request will cost, from what is known before it ran: hints, never promises. Pure.

Bytes per token are learned per model from completed requests; what an engine still has of a conversation
is told by the digests of its messages.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

_BYTES_PER_TOKEN = 4.0
"""Before anything was learned: about what English text has with common vocabularies."""
_PRIOR_TOKENS = 64.0
"""How many tokens' worth of evidence that guess stands for."""
_MEMORY_TOKENS = 200_000.0
"""Older evidence fades once this many tokens were counted, so that a change of language is followed."""
_MEMORY_REQUESTS = 0.05
"""Weight of the newest request in the moving mean of weighted tokens."""
_PREFIXES = 4096
"""Message digests remembered per engine process."""


@dataclass(slots=True)
class Lengths:
    """Learned lengths of one model's requests."""

    seen_bytes: float = _BYTES_PER_TOKEN * _PRIOR_TOKENS
    seen_tokens: float = _PRIOR_TOKENS
    request_tokens: float | None = None
    """Moving mean of a request's weighted tokens, None before the first report."""

    @property
    def bytes_per_token(self) -> float:
        """Prompt bytes per prompt token."""
        return self.seen_bytes / self.seen_tokens

    def prompt_tokens(self, size: int) -> float:
        """Estimate the tokens of `size` prompt bytes."""
        return size / self.bytes_per_token

    def learn(self, size: int, tokens: int, weighted: float) -> None:
        """Take one completed request: prompt bytes, prompt tokens, weighted tokens of work in all."""
        if size > 0 and tokens > 0:
            self.seen_bytes += size
            self.seen_tokens += tokens
            if self.seen_tokens > _MEMORY_TOKENS:
                fade = _MEMORY_TOKENS / self.seen_tokens
                self.seen_bytes *= fade
                self.seen_tokens *= fade
        known = self.request_tokens
        self.request_tokens = weighted if known is None else known + _MEMORY_REQUESTS * (weighted - known)


@dataclass(slots=True)
class Prefixes:
    """Conversations that one engine process has read, by the digests of their messages."""

    known: OrderedDict[bytes, int | None] = field(default_factory=OrderedDict)
    """Digest of the messages up to one → tokens up to there; None where nobody said how many."""

    def cached(self, prefix: Sequence[bytes]) -> int:
        """Return how many tokens of a conversation may still be in the engine's cache."""
        for digest in reversed(prefix):
            tokens = self.known.get(digest, -1)
            if tokens is None:
                return 0
            if tokens >= 0:
                return tokens
        return 0

    def depth(self, prefix: Sequence[bytes]) -> int:
        """Return how many messages of a conversation the engine has read before."""
        for index in range(len(prefix), 0, -1):
            if prefix[index - 1] in self.known:
                return index
        return 0

    def learn(self, prefix: Sequence[bytes], prompt_tokens: int, cached_tokens: int) -> None:
        """Take one completed request; what it found in the cache measures what was known of it."""
        shared = self.depth(prefix)
        if 0 < shared < len(prefix) and 0 < cached_tokens < prompt_tokens:
            self.known[prefix[shared - 1]] = cached_tokens
        for digest in prefix:
            self.known.setdefault(digest, None)
            self.known.move_to_end(digest)
        if prefix:
            self.known[prefix[-1]] = prompt_tokens
        while len(self.known) > _PREFIXES:
            self.known.popitem(last=False)
