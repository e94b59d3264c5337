"""What an engine will be, before anything is built: its inputs, the key they make, and whether the cache has it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.engine.cache import Cache, cache_from_environment
from proxy.engine.errors import EngineToolError
from proxy.engine.harness import HARNESS_BINARY, harness_digest, read_harness
from proxy.engine.manifest import MANIFEST_NAME, Manifest, read_manifest
from proxy.engine.options import SERVER_BINARY, BuildOptions
from proxy.engine.pin import Upstream, find_native_patch, read_upstream
from proxy.engine.series import OverlayFile, PatchSet, read_patch_set
from proxy.engine.source import identify_checkout
from proxy.engine.toolchain import Compiler, find_compiler
from proxy.engine.verify import verify_files

if TYPE_CHECKING:
    from pathlib import Path

# Part of every key: raise it when the same inputs would give another engine than before.
_RECIPE = 1
_STOCK = "stock"


@dataclass(frozen=True, slots=True)
class EnginePaths:
    """A finished, verified engine."""

    server: Path
    dir: Path
    manifest: Manifest

    @property
    def harness(self) -> Path | None:
        """The scheduling harness, where the engine was built with it."""
        path = self.dir / HARNESS_BINARY
        return path if self.manifest.entry(HARNESS_BINARY) else None


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that decides what the engine will be, and the key made of it."""

    options: BuildOptions
    upstream: Upstream
    patch_set: PatchSet
    compiler: Compiler
    pin: str
    build_number: int
    content: str
    harness: tuple[OverlayFile, ...] = ()

    @property
    def series(self) -> str:
        """The series hash, or ``stock`` for the unpatched source."""
        return _STOCK if self.options.stock else self.patch_set.series_hash

    @property
    def key(self) -> str:
        """Name of the finished engine's directory: the same inputs give the same key on the same kind of machine."""
        parts: dict[str, object] = {
            "recipe": _RECIPE,
            "content": self.content,
            "pin": self.pin,
            "series": self.patch_set.digest,
            "definitions": self.options.definitions(),
            "targets": self.options.targets,
            "flags": self.options.flags,
            "stock": self.options.stock,
            "compiler": self.compiler.version,
            "compiler_flags": self.compiler.definitions,
            "cpu": self.compiler.cpu_digest,
        }
        if self.harness:
            parts["harness"] = harness_digest(self.harness)
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
        return f"{self.options.flavour}-{digest}"

    @property
    def work_name(self) -> str:
        """Name of the tree and build folder: fixed per pin and flavour, so that a changed series is a small rebuild."""
        if self.options.llama_cpp_dir is None:
            return f"{self.pin}-{self.options.work_flavour}"
        place = hashlib.sha256(str(self.options.llama_cpp_dir).encode()).hexdigest()[:8]
        return f"local-{place}-{self.options.work_flavour}"


def make_plan(options: BuildOptions, native_patch: Path | None = None) -> Plan:
    """Read the pin, the series and the machine's compilers. Needs no network. Raises EngineToolError on what is missing."""
    patch_dir = native_patch or find_native_patch()
    upstream = read_upstream(patch_dir)
    compiler = find_compiler(options)
    patch_set = PatchSet((), ()) if options.stock else read_patch_set(patch_dir)
    harness = read_harness(patch_dir) if options.harness else ()
    if options.llama_cpp_dir is None:
        pin, number, content = upstream.identity, upstream.build_number, upstream.sha256
    else:
        own = identify_checkout(options.llama_cpp_dir)
        pin, number, content = own.identity, own.build_number, own.content_sha256
    return Plan(options, upstream, patch_set, compiler, pin, number, content, harness)


def find_engine(plan: Plan, cache: Cache | None = None) -> EnginePaths | None:
    """The finished engine of ``plan``, when it is in the cache and every file of it is as it was built."""
    directory = (cache or cache_from_environment()).engines / plan.key
    if not (directory / MANIFEST_NAME).is_file():
        return None
    try:
        if verify_files(directory):
            return None
        manifest = read_manifest(directory)
    except EngineToolError:
        return None
    return EnginePaths(directory / SERVER_BINARY, directory, manifest)
