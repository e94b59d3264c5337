"""Fair share between client keys: one virtual counter of weighted tokens per key. Pure.

The counter and its lift are those of the virtual token counter (Sheng et al., "Fairness in Serving Large
Language Models", OSDI 2024): who has the smallest counter among those who wait goes next; a key that
comes back is lifted to the smallest counter of those who wait, so that it neither owes for nor saves up
time in which it asked for nothing. Counters are kept per class, because a class that is starved by a
higher one would otherwise drag the lift of the higher one's keys down.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

_IDLE_ACCOUNTS = 1024
"""Accounts of absent keys that are kept because they are ahead; the longest absent are forgotten first."""


@dataclass(slots=True, eq=False)
class Account:
    """One key in one class. `counter` is weighted tokens divided by `weight`.

    `waiting` and `alive` count its tickets in the queue and altogether.
    """

    key: str
    rank: int
    weight: float = 1.0
    counter: float = 0.0
    waiting: int = 0
    alive: int = 0

    def charge(self, tokens: float) -> None:
        """Add weighted tokens (negative: give them back)."""
        self.counter += tokens / self.weight


@dataclass(slots=True)
class Shares:
    """The accounts of one class on one model. `floor` is the greatest smallest counter seen so far."""

    rank: int
    accounts: dict[str, Account] = field(default_factory=dict)
    floor: float = 0.0

    def enter(self, key: str, weight: float) -> Account:
        """Count a new ticket of a key in; a key that had nothing waiting is lifted."""
        account = self.accounts.pop(key, None) or Account(key, self.rank, counter=self.floor)
        self.accounts[key] = account  # the longest absent stay in front
        account.weight = weight
        account.alive += 1
        if account.waiting == 0:
            account.counter = max(account.counter, self._smallest(self.floor))
        account.waiting += 1
        return account

    def come_back(self, account: Account) -> None:
        """A ticket stands in the queue again."""
        account.waiting += 1

    def go(self, account: Account) -> None:
        """A ticket leaves the queue, whereto ever."""
        self.floor = max(self.floor, self._smallest(account.counter))
        account.waiting -= 1

    def leave(self, account: Account) -> None:
        """A ticket is gone; forget keys that a return would not find ahead."""
        account.alive -= 1
        if account.alive > 0:
            return
        if account.counter <= self.floor:
            self.accounts.pop(account.key, None)
        elif len(self.accounts) > _IDLE_ACCOUNTS:
            longest = next((a.key for a in self.accounts.values() if a.alive == 0), None)
            if longest is not None:
                del self.accounts[longest]

    def _smallest(self, default: float) -> float:
        return min((a.counter for a in self.accounts.values() if a.waiting > 0), default=default)


@dataclass(slots=True)
class Book:
    """All shares of one model, by class."""

    shares: dict[int, Shares] = field(default_factory=dict)

    def enter(self, key: str, rank: int, weight: float) -> Account:
        """Count a new ticket in."""
        found = self.shares.get(rank)
        if found is None:
            found = self.shares[rank] = Shares(rank)
        return found.enter(key, weight)

    def of(self, account: Account) -> Shares:
        """Return the shares an account belongs to."""
        return self.shares[account.rank]

    def accounts(self) -> Iterator[Account]:
        """All accounts of all classes."""
        for shares in self.shares.values():
            yield from shares.accounts.values()
