"""Which llama-server a load gets: what stands at the configured place now, not what stood there once."""

import os
from pathlib import Path

import pytest

from proxy.app.engines import Engines
from proxy.errors import ErrorCode, ProxyError
from proxy.settings import Model, Settings

STOCK, PATCHED = "--parallel", "--parallel --phase-policy"


def put(folder: Path, flags: str, *, manifest: bool = False) -> Path:
    """A program that names its flags, put in place at once, as an installation does."""
    folder.mkdir(exist_ok=True)
    new = folder / "new"
    new.write_text(f"#!/bin/sh\necho '{flags}'\necho asked >> {folder}/asked\n")
    new.chmod(0o755)
    new.replace(folder / "llama-server")
    if manifest:
        (folder / "manifest.json").write_text("{}")
    return folder


async def test_an_engine_that_was_replaced_is_asked_anew(tmp_path):
    """In its place, or by a link to another folder; the same one is asked once."""
    old, new, current = (
        put(tmp_path / "old", STOCK),
        put(tmp_path / "new", PATCHED, manifest=True),
        tmp_path / "current",
    )
    current.symlink_to(old)
    engines = Engines(Settings.model_validate({"engine": {"dir": str(current)}}), None)
    model = Model(path=tmp_path / "x.gguf")
    for _ in range(3):
        found = await engines(model)
        assert (found.patched, found.dir) == (False, None)
    assert (old / "asked").read_text().count("asked") == 1

    link = tmp_path / "link"
    link.symlink_to(new)
    link.replace(current)
    found = await engines(model)
    assert (found.path, found.patched, found.dir) == (current / "llama-server", True, current)

    put(new, STOCK)
    (new / "manifest.json").unlink()
    found = await engines(model)
    assert (found.patched, found.dir) == (False, None)

    os.unlink(current)
    with pytest.raises(ProxyError, match="there is no llama-server at") as gone:
        await engines(model)
    assert gone.value.code is ErrorCode.MODEL_LOAD_FAILED
