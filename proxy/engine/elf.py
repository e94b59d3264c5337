"""Just enough of an ELF file to know what it is, what it is called and which libraries it asks for.

Layout after the System V gABI, chapters 4 and 5. Little-endian, 64 bit: what llama-server is built for.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.engine.errors import EngineToolError

if TYPE_CHECKING:
    from pathlib import Path

_MAGIC = b"\x7fELF\x02\x01"
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NULL, _DT_NEEDED, _DT_STRTAB, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 0, 1, 5, 14, 15, 29


@dataclass(frozen=True, slots=True)
class ElfInfo:
    """Names from the dynamic section; all empty for a statically linked file."""

    needed: tuple[str, ...]
    soname: str
    runpath: str


def is_elf(data: bytes) -> bool:
    """Whether ``data`` starts like a 64-bit little-endian ELF file."""
    return data.startswith(_MAGIC)


def read_elf(path: Path) -> ElfInfo:
    """Read a file's dynamic section. Raises EngineToolError when it is empty, not ELF, or cut short."""
    data = path.read_bytes()
    if not data:
        raise EngineToolError(f"{path} is empty; expected a program or library")
    if not is_elf(data):
        raise EngineToolError(f"{path} is not a 64-bit little-endian ELF file")
    try:
        return _parse(data)
    except (struct.error, ValueError) as error:
        raise EngineToolError(f"{path} is a damaged ELF file: {error}") from error


def _parse(data: bytes) -> ElfInfo:
    (table,) = struct.unpack_from("<Q", data, 0x20)
    size, count = struct.unpack_from("<HH", data, 0x36)
    loads: list[tuple[int, int, int]] = []
    dynamic: tuple[int, int] | None = None
    for index in range(count):
        kind, _, offset, address, _, in_file = struct.unpack_from("<IIQQQQ", data, table + index * size)
        if offset + in_file > len(data):
            raise ValueError(f"segment {index} ends behind the end of the file")
        if kind == _PT_LOAD:
            loads.append((address, offset, in_file))
        elif kind == _PT_DYNAMIC:
            dynamic = (offset, in_file)
    if dynamic is None:
        return ElfInfo((), "", "")
    entries: list[tuple[int, int]] = []
    for at in range(dynamic[0], dynamic[0] + dynamic[1], 16):
        tag, value = struct.unpack_from("<QQ", data, at)
        if tag == _DT_NULL:
            break
        entries.append((tag, value))
    strings = next((value for tag, value in entries if tag == _DT_STRTAB), None)
    if strings is None:
        raise ValueError("no string table")
    base = next(
        (offset + strings - start for start, offset, length in loads if start <= strings < start + length),
        None,
    )
    if base is None:
        raise ValueError("the string table lies in no segment")

    def text(at: int) -> str:
        end = data.index(b"\0", base + at)
        return data[base + at : end].decode("utf-8", errors="replace")

    def all_of(*tags: int) -> tuple[str, ...]:
        return tuple(text(value) for tag, value in entries if tag in tags)

    return ElfInfo(
        needed=all_of(_DT_NEEDED),
        soname=next(iter(all_of(_DT_SONAME)), ""),
        runpath=":".join(all_of(_DT_RPATH, _DT_RUNPATH)),
    )
