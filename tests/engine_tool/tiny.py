"""A llama.cpp in small: the same layout and cmake variables, compiled in a second. And archives and series of it."""

import io
import os
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

from proxy.engine.cache import Cache
from proxy.engine.fetch import sha256_of

PACKAGE = "tiny-engine"
VERSION = "42.0.0"

TREE = {
    "CMakeLists.txt": """\
cmake_minimum_required(VERSION 3.18)
project(tiny C CXX)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
add_library(llama-common SHARED common/sampling.cpp)
set_target_properties(llama-common PROPERTIES VERSION 0.1.0 SOVERSION 0)
add_subdirectory(tools/server)
""",
    "common/sampling.cpp": "int sample() { return 7; }\n",
    "tools/server/CMakeLists.txt": """\
# the server
#
# its core, then the program

add_library(server-context STATIC server-context.cpp)
target_link_libraries(server-context PUBLIC llama-common)

configure_file(version.h.in ${CMAKE_CURRENT_BINARY_DIR}/version.h)
add_executable(llama-server main.cpp)
target_include_directories(llama-server PRIVATE ${CMAKE_CURRENT_BINARY_DIR})
target_link_libraries(llama-server PRIVATE server-context)
""",
    "tools/server/version.h.in": '#define TINY_VERSION "build @LLAMA_BUILD_NUMBER@, commit @LLAMA_BUILD_COMMIT@"\n',
    "tools/server/server-context.cpp": """\
int sample();

int context() {
    return sample();
}
""",
    "tools/server/main.cpp": """\
#include "version.h"
#include <cstdio>
#include <cstring>

int context();

int main(int argc, char ** argv) {
    if (argc > 1 && std::strcmp(argv[1], "--version") == 0) {
        std::printf("version: tiny (%s)\\n", TINY_VERSION);
        return context() == 0;
    }
    return std::getchar();
}
""",
    "docs/notes.md": "nothing a build needs\n",
}

HOOKED = TREE["tools/server/CMakeLists.txt"].replace(
    "PUBLIC llama-common)\n", "PUBLIC llama-common)\ninclude(${CMAKE_CURRENT_SOURCE_DIR}/phase/phase.cmake)\n"
)

OVERLAY = {
    "phase.cmake": "target_sources(server-context PRIVATE ${CMAKE_CURRENT_LIST_DIR}/machine.cpp)\n",
    "machine.cpp": "int machine() { return 1; }\n",
}


def write_files(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def write_archive(path: Path, members: dict[str, str], top: str = f"tiny_engine-{VERSION}") -> Path:
    """A source archive with `members` below its top folder, and a build backend that needs nothing."""
    extra = {
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\n",
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
        "backend.py": BACKEND,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, text in (members | extra).items():
            data = text.encode()
            info = tarfile.TarInfo(f"{top}/{name}")
            info.size, info.mode = len(data), 0o644
            tar.addfile(info, io.BytesIO(data))
    return path


BACKEND = f"""\
import os

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    name = "tiny_engine-{VERSION}.dist-info"
    os.makedirs(os.path.join(folder, name))
    with open(os.path.join(folder, name, "METADATA"), "w") as stream:
        stream.write("Metadata-Version: 2.1\\nName: {PACKAGE}\\nVersion: {VERSION}\\n")
    return name

def build_wheel(folder, config_settings=None, metadata_directory=None):
    raise NotImplementedError
"""


@dataclass(frozen=True)
class Tiny:
    """A patch directory for the small tree, and a cache that already holds its archive."""

    native_patch: Path
    cache: Cache
    archive: Path


def write_upstream(native_patch: Path, archive: Path) -> None:
    (native_patch / "UPSTREAM").write_text(
        f"package: {PACKAGE}\nversion: {VERSION}\nsha256: {sha256_of(archive)}\n"
        f"size_bytes: {archive.stat().st_size}\nbuild_number: 42\n"
    )


def git(tree: Path, *arguments: str) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    identity = ("-c", "user.name=Dev Eloper", "-c", "user.email=dev@example.org")
    done = subprocess.run(
        ["git", *identity, *arguments],
        cwd=tree,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def commit(tree: Path, message: str) -> None:
    git(tree, "add", "-A")
    git(tree, "commit", "-q", "-m", message)


HARNESS = {
    "harness.cmake": """\
add_executable(llama-phase-harness tools/phase-harness/main.cpp)
target_link_libraries(llama-phase-harness PRIVATE llama-common)
""",
    "main.cpp": "int sample();\n\nint main() { return sample() == 7 ? 0 : 1; }\n",
}
