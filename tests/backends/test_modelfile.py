"""Which files a model is made of, and when they count as others."""

import os

import pytest

from proxy.backends import modelfile
from proxy.backends.runrecord import RunRecord, decode, encode

MODEL = "m-00001-of-00002.gguf"


@pytest.fixture
def folder(tmp_path):
    """A split model, a projector, two adapters, and a text that is no model."""
    for name in (MODEL, "m-00002-of-00002.gguf", "mmproj.gguf", "a,b.gguf", "c.bin"):
        (tmp_path / name).write_bytes(b"GGUF" + name.encode())
    (tmp_path / "template.jinja").write_text("GG")
    return tmp_path


WORDS = ("-c", "4096", "--mmproj", "mmproj.gguf", "--lora-scaled", "c.bin:0.5,c.bin:1", "--lora", "a,b.gguf")


def look(folder):
    return modelfile.identity(
        folder / MODEL, (*WORDS, "--chat-template-file", "template.jinja", "\0"), folder
    )


@pytest.mark.parametrize("name", [MODEL, "m-00002-of-00002.gguf", "mmproj.gguf", "a,b.gguf", "c.bin"])
def test_every_file_counts(folder, name):
    """Replaced by rename, rewritten in place with its date put back, or longer: each is another one."""
    seen, stat = [look(folder)], (folder / name).stat()
    assert seen[0] == look(folder) != ""
    (folder / name).write_bytes(b"GGUF" + name.encode()[::-1])
    os.utime(folder / name, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    seen.append(look(folder))
    (folder / "next").write_bytes((folder / name).read_bytes())
    (folder / "next").replace(folder / name)
    seen.append(look(folder))
    (folder / name).write_bytes((folder / name).read_bytes() + b"more")
    seen.append(look(folder))
    assert len(set(seen)) == 4


def test_what_is_no_model_does_not_count(folder):
    before = look(folder)
    (folder / "template.jinja").write_text("another text")
    assert look(folder) == before


def test_a_file_that_is_missing_is_not_known(folder):
    (folder / "m-00002-of-00002.gguf").unlink()
    assert look(folder) == "" == modelfile.identity(folder / "none.gguf")


def test_a_pipe_among_the_arguments_holds_nobody_up(folder):
    os.mkfifo(folder / "pipe")
    assert modelfile.identity(folder / MODEL, (str(folder / "pipe"), str(folder)))


def test_records_of_older_proxies_can_be_read():
    record = RunRecord("m", "t" * 32, True, "b", "r", "k", 1.0, files="f")
    data = encode(record)
    assert decode(data) == record
    del data["files"]
    assert decode(data).files == ""
