"""Following a log: rotation, truncation, floods, absence."""

import asyncio
import os
from pathlib import Path

import pytest

from proxy.observe.logfile import LogFollower
from proxy.observe.records import LogLine, LogNote, Record


class Followed:
    def __init__(self, path: Path) -> None:
        self.records: list[Record] = []
        self.now = 0.0
        self.follower = LogFollower(0, path, lambda: self.now, self.records.append)

    def read(self, *, first: bool = False) -> list[str]:
        before = len(self.records)
        self.now += 1
        self.follower.read(first=first)
        new = self.records[before:]
        return [
            r.line if isinstance(r, LogLine) else f"({r.note})"
            for r in new
            if isinstance(r, LogLine | LogNote)
        ]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "engine.log"


def add(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_only_what_is_new_with_the_time_it_was_read(log: Path) -> None:
    add(log, "old\n")
    followed = Followed(log)
    assert followed.read(first=True) == []
    add(log, "a\nb\r\nhalf")
    assert followed.read() == ["a", "b"]
    add(log, " line\n")
    assert followed.read() == ["half line"]
    assert [r.read_s for r in followed.records if isinstance(r, LogLine)] == [2.0, 2.0, 3.0]
    followed.follower.close()


def test_a_log_may_come_later(log: Path) -> None:
    """Said once that it is missing; when it comes, it is read from its begin."""
    followed = Followed(log)
    assert followed.read(first=True) == ["(No such file or directory)"]
    assert followed.read() == []
    add(log, "first\n")
    assert followed.read() == ["first"]
    log.unlink()
    assert followed.read() == ["(No such file or directory)"]


def test_rotation_and_truncation(log: Path) -> None:
    """The last lines of the old file are read, then the new file from its begin."""
    add(log, "old\n")
    followed = Followed(log)
    followed.read(first=True)
    add(log, "last\n")
    log.rename(log.with_suffix(".1"))
    add(log, "new\n")
    assert followed.read() == ["last", "(the file was replaced)", "new"]
    log.write_text("x\n")
    assert followed.read() == ["(the file was truncated)", "x"]
    followed.follower.close()


def test_a_flood_is_bounded(log: Path) -> None:
    add(log, "")
    followed = Followed(log)
    followed.read(first=True)
    add(log, "y" * 20_000 + "\n" + "z" * 9 + "\n" + "x\n" * 3_000_000)
    found = followed.read()
    assert "bytes left out" in found[0]
    assert len(found) < 300_000
    add(log, "y" * 20_000 + "\nend\n")
    found = followed.read()
    assert [len(found[-2]), found[-1]] == [4096, "end"]
    add(log, "y" * 500_000)
    assert [len(line) for line in followed.read()] == [4096]
    followed.follower.close()


def test_a_pipe_is_not_waited_for(log: Path) -> None:
    os.mkfifo(log)
    assert Followed(log).read(first=True) == ["(is no regular file)"]


async def test_what_came_last_is_read_at_the_end(log: Path) -> None:
    """Lines of the moment before the stop are not lost."""
    add(log, "")
    followed = Followed(log)
    task = asyncio.create_task(followed.follower.run(3600))
    await asyncio.sleep(0)
    add(log, "last words\n")
    task.cancel()
    await asyncio.wait((task,))
    assert [r.line for r in followed.records if isinstance(r, LogLine)] == ["last words"]
