"""The floor plan as tests: which layer may import which, and who may touch which third party.

The tables are CONTRIBUTING.md's; a change of either is a change of both.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "proxy"

LEAVES = {
    "fields",
    *("types", "errors", "settings", "metrics", "logs", "clock", "headers", "sse", "timeline", "catalog"),
    "state",
    "config",
    "upstream",
}
SUBJECTS = {"admission", "backends", "engine", "bench"}
LAYER_OF = {
    **dict.fromkeys(LEAVES, 1),
    **dict.fromkeys(SUBJECTS, 2),
    "observe": 3,
    "http": 3,
    "app": 4,
    "cli": 5,
    "__main__": 6,
}

THIRD_PARTY_ROOMS = {
    "pydantic": {"fields", "settings", "config", "http.orders"},
    "pydantic_settings": {"settings", "config"},
    "yaml": {"config"},
    "prometheus_client": {"metrics"},
    "psutil": {"backends"},
    "aiohttp": {"http", "app"},
    "multidict": {"http"},
    "yarl": {"http"},
    "httptools": {"backends.wire"},
    "structlog": {"logs"},
    "orjson": {"http", "backends", "sse"},
    "uvloop": {"cli", "app"},
    "click": {"cli"},
    "rich": {"cli"},
}

PURE = {
    *("types", "errors", "headers", "sse", "catalog"),
    *("backends.lifecycle", "backends.command", "backends.slots", "backends.backoff"),
    *(
        "backends.watchdog",
        "backends.jobs",
        "backends.hosts",
        "backends.gates",
        "backends.leases",
        "backends.memory",
        "backends.runrecord",
        "backends.words",
    ),
    *("backends.reconcile", "backends.phases"),
    *(
        "observe.records",
        "observe.target",
        "observe.clocks",
        "observe.tally",
        "observe.tasks",
        "observe.frames",
    ),
    *("observe.account", "observe.summary"),
    *("bench.matrix", "bench.evidence", "bench.stats", "bench.summary", "bench.plots", "bench.svg"),
    *("admission.accounts", "admission.core", "admission.cost", "admission.decide", "admission.door"),
    *("admission.fair", "admission.ledger", "admission.life", "admission.mirror", "admission.order"),
    *(
        "admission.entry",
        "admission.estimate",
        "admission.pace",
        "admission.place",
        "admission.recall",
        "admission.records",
    ),
    *("admission.retry", "admission.shape", "admission.state", "admission.views", "admission.waiting"),
}
IMPURE_IMPORTS = {"asyncio", "socket", "subprocess", "time", "logging", "threading", "aiohttp", "os"}


def modules() -> list[tuple[str, Path]]:
    """All modules of the package as (dotted name without `proxy.`, file)."""
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = list(file.relative_to(PACKAGE).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        if parts:
            found.append((".".join(parts), file))
    return found


def imports(file: Path) -> set[str]:
    """Every absolute module name a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            assert node.module is not None
            names.add(node.module)
            if node.module == "proxy":
                names.update(f"proxy.{alias.name}" for alias in node.names)
    return names


MODULES = modules()


@pytest.mark.parametrize(("name", "file"), MODULES, ids=[name for name, _ in MODULES])
def test_imports_point_downward(name: str, file: Path) -> None:
    """No module imports from its own layer's siblings or from above."""
    room = name.split(".")[0]
    assert room in LAYER_OF, f"proxy/{room} has no place in the layer table"
    for imported in imports(file):
        parts = imported.split(".")
        if parts[0] != "proxy" or len(parts) == 1 or parts[1] not in LAYER_OF:
            continue
        other = parts[1]
        if other == room:
            continue
        if LAYER_OF[room] == 1:
            assert LAYER_OF[other] == 1, f"{name} (a leaf) imports {imported}"
            continue
        assert LAYER_OF[other] < LAYER_OF[room], f"{name} imports {imported}, which is not below it"


@pytest.mark.parametrize(("name", "file"), MODULES, ids=[name for name, _ in MODULES])
def test_http_does_not_know_backends(name: str, file: Path) -> None:
    """Only the composition root knows both admission and backends."""
    if name.split(".")[0] == "http":
        assert not {i for i in imports(file) if i.startswith(("proxy.backends", "proxy.engine"))}


@pytest.mark.parametrize(("name", "file"), MODULES, ids=[name for name, _ in MODULES])
def test_observation_knows_only_how_to_ask(name: str, file: Path) -> None:
    """The observer reuses the client, the probes and their pure parsers, and none of what runs engines."""
    if name.split(".")[0] == "observe":
        used = {".".join(i.split(".")[:3]) for i in imports(file) if i.startswith("proxy.")}
        asked = {"proxy.backends.client", "proxy.backends.probes"}
        pure = {"proxy.backends.slots", "proxy.backends.phases"}
        mine = {i for i in used if i.startswith("proxy.observe")}
        leaves = {i for i in used if i.split(".")[1] in LEAVES}
        assert used - mine - leaves - {"proxy.__version__"} <= asked | pure


@pytest.mark.parametrize(("name", "file"), MODULES, ids=[name for name, _ in MODULES])
def test_third_parties_are_confined(name: str, file: Path) -> None:
    """Each third-party library stays in its rooms."""
    for imported in imports(file):
        rooms = THIRD_PARTY_ROOMS.get(imported.split(".")[0])
        if rooms is not None:
            assert any(name == room or name.startswith(room + ".") for room in rooms), (
                f"{name} imports {imported}"
            )


@pytest.mark.parametrize(("name", "file"), MODULES, ids=[name for name, _ in MODULES])
def test_pure_files_stay_pure(name: str, file: Path) -> None:
    """Pure modules do no I/O, read no clock, log nothing."""
    if name in PURE:
        assert not {i.split(".")[0] for i in imports(file)} & IMPURE_IMPORTS


def test_patch_and_deploy_do_not_import_the_package() -> None:
    """`native-patch/` and `deploy/` stand alone."""
    for folder in ("native-patch", "deploy"):
        for file in (ROOT / folder).rglob("*.py"):
            assert not {i for i in imports(file) if i.split(".")[0] == "proxy"}, file


FORKS = """
import importlib, os, sys, traceback
# what is not ours is loaded once; each module of ours is then loaded by a process that has seen none of them
for library in sys.argv[1].split(","):
    importlib.import_module(library)
assert not [name for name in sys.modules if name.split(".")[0] == "proxy"]
for name in sys.argv[2].split(","):
    if os.fork() == 0:
        os.dup2(1, 2)
        try:
            importlib.import_module("proxy." + name)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print("==", name, os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[int, str]]:
    """Import every module in a process of its own: its exit code and what it said, by name."""
    names = [name for name, _ in MODULES if name != "__main__"]
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-c",
            FORKS,
            "aiohttp.web,pydantic_settings,rich.console",
            ",".join(names),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[int, str]] = {}
    said: list[str] = []
    for line in done.stdout.splitlines():
        if line.startswith("== "):
            _, name, code = line.split()
            found[name] = (int(code), "\n".join(said))
            said = []
        else:
            said.append(line)
    return found


@pytest.mark.parametrize("name", [name for name, _ in MODULES if name != "__main__"])
def test_each_module_imports_alone(name: str, alone: dict[str, tuple[int, str]]) -> None:
    """A module imports by itself, without a warning and without starting anything."""
    code, said = alone[name]
    assert code == 0, said
    assert said == ""
