"""Manifests, the ELF reader, and every way a file or a process can differ from what was built."""

import dataclasses
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from proxy.engine.elf import read_elf
from proxy.engine.errors import EngineToolError
from proxy.engine.finish import check_version, refuse_foreign_libraries
from proxy.engine.manifest import (
    FileKind,
    closure,
    describe_files,
    parse_manifest,
    read_manifest,
    to_json,
    write_manifest,
)
from proxy.engine.verify import HashCache, MismatchReason, parse_maps, verify_files, verify_process
from tests.engine_tool.conftest import make_manifest

LIBRARY = "libanswer.so.1.2"
LINK = "libanswer.so.1"


def test_elf_reader_knows_names(compiled: Path) -> None:
    library = read_elf(compiled / LIBRARY)
    assert library.soname == LINK
    program = read_elf(compiled / "llama-server")
    assert LINK in program.needed
    assert program.runpath == "$ORIGIN"


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs binutils' readelf")
def test_elf_reader_agrees_with_readelf(compiled: Path) -> None:
    for path in (compiled / LIBRARY, compiled / "llama-server", Path(shutil.which("git") or "/bin/ls")):
        text = subprocess.run(
            ["readelf", "-d", str(path)], capture_output=True, text=True, check=True, timeout=60
        ).stdout
        needed = tuple(line.split("[")[1].split("]")[0] for line in text.splitlines() if "(NEEDED)" in line)
        assert read_elf(path).needed == needed


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"", "is empty"), (b"#!/bin/sh\n", "not a 64-bit"), (b"\x7fELF\x02\x01", "damaged")],
)
def test_what_is_no_program_is_an_error(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "llama-server").write_bytes(data)
    with pytest.raises(EngineToolError, match=message):
        closure(tmp_path, "llama-server")


def test_a_truncated_program_is_an_error(engine_dir: Path) -> None:
    path = engine_dir / LIBRARY
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(EngineToolError, match="damaged"):
        closure(engine_dir, "llama-server")


def test_closure_follows_links_and_leaves_the_system_alone(engine_dir: Path) -> None:
    (engine_dir / "unrelated.so").write_bytes((engine_dir / LIBRARY).read_bytes())
    assert closure(engine_dir, "llama-server") == ("llama-server", LINK, LIBRARY)
    entries = {entry.path: entry for entry in describe_files(engine_dir, ["llama-server"], "llama-server")}
    assert entries[LINK].kind is FileKind.LINK
    assert entries[LINK].target == LIBRARY
    assert entries[LIBRARY].required
    assert not entries["unrelated.so"].required


def test_a_dangling_library_link_is_an_error(engine_dir: Path) -> None:
    (engine_dir / LIBRARY).unlink()
    with pytest.raises(EngineToolError, match=LIBRARY):
        closure(engine_dir, "llama-server")


def test_a_run_path_into_the_build_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.c").write_text("int main(void) { return 0; }\n")
    out = tmp_path / "out"
    out.mkdir()
    subprocess.run(
        ["cc", "-o", str(out / "llama-server"), "m.c", f"-Wl,-rpath,{tmp_path}"],
        cwd=tmp_path,
        check=True,
        timeout=60,
    )
    with pytest.raises(EngineToolError, match="looks for libraries"):
        refuse_foreign_libraries(out, tmp_path)


def test_version_must_name_this_source(engine_dir: Path) -> None:
    script = engine_dir / "llama-server"
    script.write_text("#!/bin/sh\necho 'version: 1 (build 42, commit abc)'\n")
    assert check_version(script, 42, "abc") == "version: 1 (build 42, commit abc)"
    with pytest.raises(EngineToolError, match="commit abd"):
        check_version(script, 42, "abd")
    script.write_text("#!/bin/sh\necho 'version: 1 (build 42, commit abc)'; exit 3\n")
    with pytest.raises(EngineToolError, match="exit status 3"):
        check_version(script, 42, "abc")


def test_manifest_survives_the_round_trip(compiled: Path) -> None:
    found = read_manifest(compiled)
    assert found == make_manifest(compiled)
    assert parse_manifest(json.loads(to_json(found)), "x") == found


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda raw: raw.pop("identity"), "identity must be a string"),
        (lambda raw: raw.update(format=2), "format 2"),
        (lambda raw: raw.update(build_number=True), "build_number"),
        (lambda raw: raw.update(cmake=[1]), "cmake"),
        (lambda raw: raw.update(files={}), "files must be a list"),
        (lambda raw: raw["files"].append(raw["files"][0]), "listed twice"),
        (lambda raw: raw["files"][0].update(path="../x"), "leaves the engine"),
        (lambda raw: raw["files"][0].update(kind="pipe"), "kind"),
        (lambda raw: raw["files"][1].update(sha256="abc"), "sha256"),
        (lambda raw: raw["files"][0].update(required="yes"), "required"),
    ],
)
def test_a_wrong_manifest_names_the_field(
    compiled: Path, change: Callable[[dict], object], named: str
) -> None:
    raw = json.loads((compiled / "manifest.json").read_text())
    change(raw)
    with pytest.raises(EngineToolError, match=named):
        parse_manifest(raw, "manifest.json")


def test_a_missing_or_broken_manifest_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineToolError, match=r"manifest\.json"):
        verify_files(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(EngineToolError, match="not JSON"):
        verify_files(tmp_path)


def test_an_untouched_engine_verifies(engine_dir: Path) -> None:
    assert verify_files(engine_dir, cache=HashCache()) == []


def flip_byte(engine: Path) -> None:
    path = engine / LIBRARY
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    status = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def relink(engine: Path) -> None:
    (engine / LINK).unlink()
    (engine / LINK).symlink_to("llama-server")


def link_to_file(engine: Path) -> None:
    (engine / LINK).unlink()
    shutil.copyfile(engine / LIBRARY, engine / LINK)


def file_to_link(engine: Path) -> None:
    (engine / LIBRARY).rename(engine.parent / "elsewhere.so")
    (engine / LIBRARY).symlink_to(engine.parent / "elsewhere.so")


@pytest.mark.parametrize(
    ("damage", "path", "reason"),
    [
        (flip_byte, LIBRARY, MismatchReason.SHA256),
        (lambda e: (e / LIBRARY).unlink(), LIBRARY, MismatchReason.MISSING),
        (lambda e: (e / "llama-server").chmod(0o777), "llama-server", MismatchReason.MODE),
        (relink, LINK, MismatchReason.TARGET),
        (link_to_file, LINK, MismatchReason.KIND),
        (file_to_link, LIBRARY, MismatchReason.KIND),
        (lambda e: (e / "libc.so.6").write_text("planted"), "libc.so.6", MismatchReason.UNLISTED),
    ],
)
def test_every_lie_about_a_file_is_found(
    engine_dir: Path, damage: Callable[[Path], None], path: str, reason: MismatchReason
) -> None:
    """With a cache that already knows the honest file: same size and same mtime must not hide a changed one."""
    cache = HashCache()
    assert verify_files(engine_dir, cache=cache) == []
    damage(engine_dir)
    found = verify_files(engine_dir, cache=cache)
    assert [(lie.path, lie.reason) for lie in found] == [(path, reason)]
    assert path in str(found[0])
    if reason is MismatchReason.SHA256:
        listed = read_manifest(engine_dir).entry(path)
        assert listed is not None
        assert listed.sha256 in str(found[0])
        assert found[0].actual in str(found[0])


def test_the_hash_cache_reads_a_file_once(engine_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Path] = []
    from proxy.engine import verify

    real = verify.sha256_of
    monkeypatch.setattr(verify, "sha256_of", lambda path: reads.append(path) or real(path))
    cache = HashCache(entries=1)
    cache.sha256(engine_dir / LIBRARY)
    cache.sha256(engine_dir / LIBRARY)
    assert len(reads) == 1
    cache.sha256(engine_dir / "llama-server")
    cache.sha256(engine_dir / LIBRARY)
    assert len(reads) == 3


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a program and wait until it runs its own code, libraries mapped; end it afterwards."""
    started: list[subprocess.Popen[str]] = []

    def run(program: Path, **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | env
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "42\n"
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


Start = Callable[..., "subprocess.Popen[str]"]


def reasons(pid: int, engine: Path) -> list[tuple[str, MismatchReason]]:
    return [(lie.path, lie.reason) for lie in verify_process(pid, engine, cache=HashCache())]


def test_the_running_engine_verifies(engine_dir: Path, start: Start) -> None:
    assert reasons(start(engine_dir / "llama-server").pid, engine_dir) == []


def test_reached_through_a_link_it_verifies_too(engine_dir: Path, start: Start, tmp_path: Path) -> None:
    link = tmp_path / "current"
    link.symlink_to(engine_dir)
    assert reasons(start(link / "llama-server").pid, link) == []


def test_a_library_from_elsewhere_is_found(engine_dir: Path, start: Start, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(engine_dir, other, symlinks=True)
    process = start(engine_dir / "llama-server", LD_PRELOAD=str(other / LIBRARY))
    assert (LIBRARY, MismatchReason.ELSEWHERE) in reasons(process.pid, engine_dir)


def test_a_replaced_library_is_found(engine_dir: Path, start: Start) -> None:
    """The same bytes under a new inode: what runs is no longer what lies there."""
    process = start(engine_dir / "llama-server")
    shutil.copyfile(engine_dir / LIBRARY, engine_dir / "new")
    shutil.copymode(engine_dir / LIBRARY, engine_dir / "new")
    (engine_dir / "new").replace(engine_dir / LIBRARY)
    assert verify_files(engine_dir, cache=HashCache()) == []
    assert reasons(process.pid, engine_dir) == [(LIBRARY, MismatchReason.DELETED)]


def test_a_deleted_executable_is_found(engine_dir: Path, start: Start) -> None:
    process = start(engine_dir / "llama-server")
    (engine_dir / "llama-server").unlink()
    assert reasons(process.pid, engine_dir) == [("llama-server", MismatchReason.DELETED)]


def test_another_program_is_found(engine_dir: Path, start: Start, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(engine_dir, other, symlinks=True)
    process = start(other / "llama-server")
    assert reasons(process.pid, engine_dir) == [("llama-server", MismatchReason.EXECUTABLE)]


def test_a_file_changed_in_place_is_found(engine_dir: Path, start: Start) -> None:
    process = start(engine_dir / "llama-server")
    flip_byte(engine_dir)
    assert reasons(process.pid, engine_dir) == [(LIBRARY, MismatchReason.SHA256)]


def test_a_required_file_that_is_not_mapped_is_found(engine_dir: Path, start: Start) -> None:
    shutil.copyfile(engine_dir / LIBRARY, engine_dir / "libextra.so")
    found = make_manifest(engine_dir)
    files = tuple(
        dataclasses.replace(entry, used_by=("llama-server",)) if entry.path == "libextra.so" else entry
        for entry in found.files
    )
    write_manifest(engine_dir, dataclasses.replace(found, files=files))
    process = start(engine_dir / "llama-server")
    assert reasons(process.pid, engine_dir) == [("libextra.so", MismatchReason.NOT_MAPPED)]


def test_a_process_that_is_gone_is_an_error(engine_dir: Path, start: Start) -> None:
    process = start(engine_dir / "llama-server")
    process.communicate("")
    with pytest.raises(EngineToolError, match=str(process.pid)):
        verify_process(process.pid, engine_dir)


def test_maps_are_read_with_spaces_and_newlines() -> None:
    text = (
        "55d0-55d1 r-xp 00000000 fe:01 77 /opt/my engine/llama\\012server\n"
        "55d1-55d2 r--p 00001000 fe:01 77 /opt/my engine/llama\\012server\n"
        "7f00-7f01 rw-p 00000000 00:00 0 \n"
        "7f01-7f02 r-xp 00000000 00:00 0 [vdso]\n"
        "7f02-7f03 r-xp 00000000 08:01 9 /lib/x.so (deleted)\n"
    )
    found = parse_maps(text)
    assert [(m.device, m.inode, m.path) for m in found] == [
        (os.makedev(0xFE, 1), 77, "/opt/my engine/llama\nserver"),
        (os.makedev(8, 1), 9, "/lib/x.so (deleted)"),
    ]
