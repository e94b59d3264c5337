"""The engine: a pinned llama.cpp, our patch series, and the llama-server built from both.

``ensure_engine`` and ``ensure_demo_model`` block; run them in a thread where an event loop must go on.
"""

from proxy.engine.build import ensure_engine
from proxy.engine.cache import Cache, cache_from_environment
from proxy.engine.errors import EngineToolError, ExitCode
from proxy.engine.manifest import FileEntry, FileKind, Manifest, read_manifest, source_identity
from proxy.engine.model import ensure_demo_model
from proxy.engine.options import BuildOptions, Sanitizer, options_from_environment, parse_sanitizers
from proxy.engine.plan import EnginePaths, Plan, find_engine, make_plan
from proxy.engine.progress import Progress, SilentProgress
from proxy.engine.verify import HashCache, Mismatch, MismatchReason, verify_files, verify_process

__all__ = [
    "BuildOptions",
    "Cache",
    "EnginePaths",
    "EngineToolError",
    "ExitCode",
    "FileEntry",
    "FileKind",
    "HashCache",
    "Manifest",
    "Mismatch",
    "MismatchReason",
    "Plan",
    "Progress",
    "Sanitizer",
    "SilentProgress",
    "cache_from_environment",
    "ensure_demo_model",
    "ensure_engine",
    "find_engine",
    "make_plan",
    "options_from_environment",
    "parse_sanitizers",
    "read_manifest",
    "source_identity",
    "verify_files",
    "verify_process",
]
