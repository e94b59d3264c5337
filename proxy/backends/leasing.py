"""Keeps the keep-awake leases: remembers them across proxies and says when one has run out."""

import asyncio
import secrets
from typing import Final

from proxy import logs
from proxy.backends.leases import Lease, LeaseBook, TooManyLeases, decode, encode
from proxy.backends.ports import LeaseChanged, Listener
from proxy.clock import Clock, boot_id, wall
from proxy.errors import ErrorCode, ProxyError
from proxy.metrics import Metrics
from proxy.state import StateDir
from proxy.types import Audit

FILE: Final = "leases.json"
_log = logs.get("backends")


class Leasing:
    """All leases of this proxy."""

    def __init__(self, state: StateDir, clock: Clock, metrics: Metrics, tell: Listener) -> None:
        self._book = LeaseBook()
        self._state = state
        self._clock = clock
        self._metrics = metrics
        self._tell = tell
        self._saving = asyncio.Lock()
        self._savers: set[asyncio.Task[str]] = set()
        metrics.on_render(self.expire)
        self._count()

    def restore(self) -> None:
        """Take the leases that an earlier proxy granted and that are still held."""
        now, there = self._clock(), wall()
        found = self._state.read(FILE, lambda data: decode(data, boot_id(), now=now, wall=there))
        self._book.restore(found or ())
        self._count()

    async def grant(self, ttl_s: float, reason: str, audit: Audit) -> tuple[Lease, str]:
        """Hold everything awake for `ttl_s` seconds; return the lease, and why it will not survive the proxy, if so.

        Raises `ProxyError` (`invalid_request`) for a length out of bounds, or too many leases.
        """
        self.expire()
        try:
            lease = self._book.grant(
                secrets.token_hex(6), ttl_s, reason, audit, now=self._clock(), wall=wall()
            )
        except (ValueError, TooManyLeases) as error:
            param = "ttl_s" if isinstance(error, ValueError) else None
            raise ProxyError(ErrorCode.INVALID_REQUEST, str(error), param=param) from None
        self._say(lease, held=True)
        return lease, await self._save()

    async def release(self, lease_id: str) -> tuple[Lease, str] | None:
        """End a lease; return it, and why it would come back with the next proxy, if so.

        None: there is none of this id (any more).
        """
        self.expire()
        lease = self._book.release(lease_id)
        if lease is None:
            return None
        self._say(lease, held=False)
        return lease, await self._save()

    def held(self) -> tuple[Lease, ...]:
        """Return the leases held now, the first to expire first."""
        return self._book.held(self._clock())

    def awake(self) -> bool:
        """Whether anything is kept awake now."""
        return self._book.awake_until(self._clock()) is not None

    def left_s(self, lease: Lease) -> float:
        """Return the seconds a lease is still held."""
        return lease.left_s(self._clock())

    def expire(self) -> None:
        """Drop what has run out, and tell. The file needs no change: what it says has run out as well."""
        for lease in self._book.expire(self._clock()):
            self._say(lease, held=False)
        self._count()

    def _say(self, lease: Lease, *, held: bool) -> None:
        self._count()
        _log.info(
            "lease",
            lease=lease.id,
            held=held,
            ttl_s=lease.ttl_s,
            reason=lease.reason,
            key=lease.audit.key,
            address=lease.audit.address,
        )
        self._tell(LeaseChanged(lease, held))

    def _count(self) -> None:
        self._metrics.leases_held.set(len(self._book.held(self._clock())))

    def catch_up(self) -> None:
        """Try again to write what could not be written: the disk may have room by now."""
        if self._state.behind(FILE) and not self._savers:
            self._save_soon()

    async def close(self) -> None:
        """Finish writing."""
        if self._savers:
            await asyncio.wait(self._savers)

    async def _save(self) -> str:
        return await asyncio.shield(self._save_soon())

    def _save_soon(self) -> "asyncio.Task[str]":
        """Begin to write the leases down; whoever asked for it may leave."""
        saver = asyncio.create_task(self._written(), name="save-leases")
        self._savers.add(saver)
        saver.add_done_callback(self._savers.discard)
        return saver

    async def _written(self) -> str:
        async with self._saving:
            data = encode(self.held(), boot_id())
            return await asyncio.to_thread(self._state.write, FILE, data)
