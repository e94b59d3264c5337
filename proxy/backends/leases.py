"""Keep-awake leases: while one is held, no model is unloaded for being idle and no host is put to sleep. Pure.

A lease ends at a monotonic time, so that a step of the wall clock changes nothing. Across proxies of one boot
the monotonic clock goes on; after a reboot the wall clock decides, and never gives more than the lease's own length.
"""

from dataclasses import dataclass
from typing import Any, Final

from proxy.types import NOBODY, Audit

MAX_LEASES: Final = 1000
MAX_TTL_S: Final = 366 * 86400.0
MAX_REASON: Final = 500


@dataclass(frozen=True, slots=True)
class Lease:
    """One lease. `expires_at` is monotonic; `expires_wall` is for people, and for after a reboot."""

    id: str
    reason: str
    ttl_s: float
    expires_at: float
    expires_wall: float
    audit: Audit = NOBODY

    def left_s(self, now: float) -> float:
        """Return the seconds it is still held."""
        return max(0.0, self.expires_at - now)


class TooManyLeases(Exception):  # noqa: N818 - names what happened
    """More leases than anybody can mean."""


class LeaseBook:
    """All leases held. Expired ones go with `expire`, which every reader's shell calls first."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}

    def grant(
        self, lease_id: str, ttl_s: float, reason: str, audit: Audit, *, now: float, wall: float
    ) -> Lease:
        """Add a lease, or replace the one of this id. Raises `ValueError` for a length out of bounds."""
        if not 0 < ttl_s <= MAX_TTL_S:
            raise ValueError(
                f"ttl_s: expected more than 0 and at most {MAX_TTL_S:g} seconds, found {ttl_s:g}"
            )
        if lease_id not in self._leases and len(self._leases) >= MAX_LEASES:
            raise TooManyLeases(f"{MAX_LEASES} leases are held; release some first")
        lease = Lease(lease_id, reason[:MAX_REASON], ttl_s, now + ttl_s, wall + ttl_s, audit)
        self._leases[lease_id] = lease
        return lease

    def release(self, lease_id: str) -> Lease | None:
        """Remove a lease; return it, None when there was none."""
        return self._leases.pop(lease_id, None)

    def expire(self, now: float) -> tuple[Lease, ...]:
        """Remove and return what has run out."""
        gone = tuple(lease for lease in self._leases.values() if lease.expires_at <= now)
        for lease in gone:
            del self._leases[lease.id]
        return gone

    def held(self, now: float) -> tuple[Lease, ...]:
        """Return what is held, the first to expire first."""
        live = (lease for lease in self._leases.values() if lease.expires_at > now)
        return tuple(sorted(live, key=lambda lease: (lease.expires_at, lease.id)))

    def awake_until(self, now: float) -> float | None:
        """Return the time until which something is kept awake, None when nothing is."""
        return max((lease.expires_at for lease in self.held(now)), default=None)

    def restore(self, leases: tuple[Lease, ...]) -> None:
        """Take leases of a former proxy."""
        self._leases.update((lease.id, lease) for lease in leases[:MAX_LEASES])


def encode(leases: tuple[Lease, ...], boot: str) -> dict[str, Any]:
    """Return leases as JSON values, with the boot on whose clock they end."""
    return {
        "boot": boot,
        "leases": [
            {
                "id": lease.id,
                "reason": lease.reason,
                "ttl_s": lease.ttl_s,
                "expires_at": lease.expires_at,
                "expires_wall": lease.expires_wall,
                "key": lease.audit.key,
                "address": lease.audit.address,
            }
            for lease in leases
        ],
    }


def decode(data: Any, boot: str, *, now: float, wall: float) -> tuple[Lease, ...]:
    """Return the leases that are still held. Raises `ValueError`, `KeyError` or `TypeError` for other data."""
    same_boot = bool(boot) and data["boot"] == boot
    found = []
    for item in data["leases"]:
        ttl_s = float(item["ttl_s"])
        until, until_wall = float(item["expires_at"]), float(item["expires_wall"])
        left_s = min(ttl_s, until - now if same_boot else until_wall - wall)
        if not 0 < ttl_s <= MAX_TTL_S:
            raise ValueError(f"ttl_s {ttl_s:g} is out of bounds")
        if left_s > 0:
            audit = Audit(str(item["key"]), str(item["address"]))
            found.append(
                Lease(str(item["id"]), str(item["reason"]), ttl_s, now + left_s, wall + left_s, audit)
            )
    return tuple(found)
