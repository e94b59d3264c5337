"""What is written down of every engine process, and what the next proxy makes of it. Pure.

A record is made before its process is (`pid` 0, only a token that the process carries in its environment), so that
whenever the proxy is killed, nothing it started can be lost sight of: the token finds it. A process is the recorded
one if its id, start time, boot and token agree; a process that has the id only is a stranger's and is left alone.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

from proxy.settings import Engine, Model

TOKEN_VARIABLE: Final = "LLAMA_PROXY_RUN"  # noqa: S105 - a name, not a secret


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One start of one model. `born` is the kernel's start time in clock ticks since the boot.

    `exe` is (device, inode) of the executable and, like `port` and `build`, only known once it was ready. `recipe` tells
    whether the configuration that it was started from is still the same, `files` whether the model's files are (empty:
    they were not looked at). `api_key` is a secret: mode 0600.
    """

    model: str
    token: str
    keep: bool
    boot: str
    recipe: str
    api_key: str
    started_wall: float
    pid: int = 0
    born: int = 0
    port: int = 0
    exe: tuple[int, int] | None = None
    build: str = ""
    output: str = ""
    files: str = ""

    @property
    def complete(self) -> bool:
        """Whether the process had become ready, so that it can be taken over."""
        return bool(self.pid and self.born and self.port and self.exe and self.output)


@dataclass(frozen=True, slots=True)
class Seen:
    """One live process as the kernel shows it. `token` is empty where its environment has none or is not ours to see."""

    pid: int
    born: int
    token: str = ""
    exe: tuple[int, int] | None = None


class Fate(StrEnum):
    """What becomes of a recorded process."""

    GONE = "gone"
    ADOPT = "adopt"
    REAP = "reap"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do: `reap` are process ids to end, `why` is for the log; a stranger on the id is never among them."""

    fate: Fate
    why: str
    reap: tuple[int, ...] = ()


def judge(
    record: RunRecord, seen: Mapping[int, Seen], *, boot: str, recipe: str | None, wanted: bool
) -> Verdict:
    """Decide on one record. `recipe` is the model's present one (None: no such model), `wanted` that it is kept."""
    if record.boot != boot:
        return Verdict(Fate.GONE, "the machine was started anew")
    bearers = tuple(sorted(pid for pid, process in seen.items() if process.token == record.token))
    at = seen.get(record.pid)
    if not bearers:
        if at is None or not record.pid:
            return Verdict(Fate.GONE, "its process has ended")
        return Verdict(Fate.GONE, f"process {record.pid} is another one now and is left alone")
    if not record.keep or record.pid not in bearers:
        return Verdict(Fate.REAP, "it outlived the proxy that it belonged to", bearers)
    if not wanted or recipe is None:
        return Verdict(Fate.REAP, "its model is not configured to be kept any more", bearers)
    if not record.complete or at is None or at.born != record.born:
        return Verdict(Fate.REAP, "the proxy ended before it was ready", bearers)
    if at.exe != record.exe:
        return Verdict(Fate.REAP, "it runs another executable than the one recorded", bearers)
    if recipe != record.recipe:
        return Verdict(Fate.REAP, "its model's configuration has changed", bearers)
    return Verdict(Fate.ADOPT, "its model is kept", bearers)


def recipe_of(model: Model, defaults: Engine) -> str:
    """Return a fingerprint of everything in the configuration that shapes the model's process."""
    shape = {
        "model": model.model_dump(
            mode="json",
            include={"path", "cmd", "cwd", "args", "env", "engine", "phase_policy", "phase_yield_ms", "phase_admit_ms"},
        ),
        "engine": defaults.model_dump(mode="json"),
        "key": model.upstream_key.get_secret_value() if model.upstream_key else "",
    }  # fmt: skip
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()


def encode(record: RunRecord) -> dict[str, Any]:
    """Return a record as JSON values."""
    return asdict(record)


def decode(data: Any) -> RunRecord:
    """Return a record from what `encode` made. Raises `ValueError`, `KeyError` or `TypeError` for anything else."""
    exe = data["exe"]
    return RunRecord(
        model=str(data["model"]),
        token=_token(data["token"]),
        keep=bool(data["keep"]),
        boot=str(data["boot"]),
        recipe=str(data["recipe"]),
        api_key=str(data["api_key"]),
        started_wall=float(data["started_wall"]),
        pid=int(data["pid"]),
        born=int(data["born"]),
        port=int(data["port"]),
        exe=None if exe is None else (int(exe[0]), int(exe[1])),
        build=str(data["build"]),
        output=str(data["output"]),
        # not in records of proxies before it
        files=str(data.get("files", "")),
    )


def _token(value: Any) -> str:
    # an empty one would be "found" in every process that has none
    if not isinstance(value, str) or len(value) < 16:
        raise ValueError("the token is missing")
    return value
