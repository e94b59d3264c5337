"""Whether this compiler's AMX code works on this machine.

Some GCC releases (12 among them) declare only the first eight bytes of the tile configuration as read by
``_tile_loadconfig`` and then drop the stores to the rest as dead, so that optimised code ends in SIGILL at its first
tile instruction. Hypervisors that advertise AMX without giving it end the same way. Native builds ask for what the CPU
claims, so the claim is tried first, on a program of the same shape.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

_TIMEOUT_S = 60
_MACRO_PREFIX = "__AMX_"
# Those every compiler with AMX knows come first and in one order, so that compiler caches meet.
_KNOWN = ("TILE", "INT8", "BF16", "FP16", "COMPLEX")

_PROBE = r"""
#include <immintrin.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>
typedef struct { uint8_t palette, start, pad[14]; uint16_t colsb[16]; uint8_t rows[16]; } config;
__attribute__((noinline)) static void configure(void) {
    config tc __attribute__((aligned(64))) = {0};
    tc.palette = 1;
    tc.rows[0] = 8;   tc.colsb[0] = 64;
    tc.rows[1] = 8;   tc.colsb[1] = 64;
    tc.rows[2] = 16;  tc.colsb[2] = 32;
    tc.rows[3] = 16;  tc.colsb[3] = 32;
    tc.rows[4] = 16;  tc.colsb[4] = 64;
    tc.rows[5] = 16;  tc.colsb[5] = 64;
    tc.rows[6] = 16;  tc.colsb[6] = 64;
    tc.rows[7] = 16;  tc.colsb[7] = 64;
    _tile_loadconfig(&tc);
}
static volatile uint8_t out[16 * 64];
int main(void) {
    if (syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) != 0) return 1;
    for (unsigned i = 0; i < sizeof out; i++) out[i] = 1;
    configure();
    _tile_zero(4);
    _tile_zero(7);
    _tile_stored(7, (void *) out, 64);
    _tile_release();
    for (unsigned i = 0; i < sizeof out; i++) if (out[i] != 0) return 2;
    return 0;
}
"""


def uses_amx(features: tuple[str, ...]) -> bool:
    """Whether a native build with these compiler macros would contain AMX code."""
    return any(feature.startswith(_MACRO_PREFIX) for feature in features)


def amx_works(cc: str) -> bool:
    """Compile the probe as ggml is compiled, and run it."""
    with tempfile.TemporaryDirectory(prefix="llama-proxy-probe-") as name:
        folder = Path(name)
        compile_it = [cc, "-O3", "-march=native", "-x", "c", "-", "-o", "probe"]
        return _succeeds(compile_it, folder, stdin=_PROBE) and _succeeds([str(folder / "probe")], folder)


def _succeeds(argv: list[str], folder: Path, stdin: str = "") -> bool:
    try:
        done = subprocess.run(
            argv, input=stdin, cwd=folder, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def without_amx(features: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """The features left when AMX is off, and the compiler flags that turn it off."""
    kept = tuple(feature for feature in features if not feature.startswith(_MACRO_PREFIX))
    names = {
        feature.removeprefix(_MACRO_PREFIX).removesuffix("__") for feature in features if feature not in kept
    }
    ordered = [name for name in _KNOWN if name in names] + sorted(names - set(_KNOWN))
    return kept, " ".join(f"-mno-amx-{name.lower()}" for name in ordered)
