"""`llama-proxy requests` and `cancel`, as processes, against a proxy that serves."""

import asyncio
import json
import os
import signal
import sys

import aiohttp
import yaml

from tests.support.ports import held_port

from .test_forward import CHAT, chat
from .test_requests import ALICE, KEYS
from .world import house, settings, until


async def run(*args, env=None, check=None):
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "proxy",
        *args,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **(env or {})},
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    if check is not None:
        assert process.returncode == check, (out, err)
    return process.returncode, out.decode(), err.decode()


async def test_list_and_cancel():
    async with house(settings(server=KEYS), slots=1) as h, aiohttp.ClientSession(h.base) as client:
        where = ("--url", h.base, "--key", "adm")
        _, out, _ = await run("requests", *where, check=0)
        assert "no live requests" in out
        running = await client.post(
            CHAT, json=chat(True, tokens=100_000, pace_ms=2), headers={**ALICE, "x-request-id": "one"}
        )
        await running.content.readuntil(b"t2")
        waiting = asyncio.ensure_future(
            client.post(CHAT, json=chat(), headers={**ALICE, "x-request-id": "two"})
        )
        await until(lambda: h.live() == 2)
        _, out, _ = await run("requests", *where, check=0)
        rows = [line.split() for line in out.splitlines()]
        assert rows[1][:5] == ["one", "demo", "alice", "interactive", "generating"]
        assert rows[2][:7] == ["two", "demo", "alice", "interactive", "queued", "no_free_slot", "1"]
        _, out, _ = await run("requests", *where, "--json", check=0)
        assert [one["id"] for one in json.loads(out)["requests"]] == ["one", "two"]
        _, out, _ = await run("cancel", *where, "two", "nobody", "--json", check=4)
        assert [one["status"] for one in json.loads(out)["requests"]] == ["cancelled", "unknown"]
        async with await waiting as answer:
            assert answer.status == 503
        env = {"LLAMA_PROXY_URL": h.base, "LLAMA_PROXY_ADMIN_KEY": "adm"}
        _, out, _ = await run("cancel", "one", env=env, check=0)
        assert out == "one: cancelled\n"
        assert b"cancelled_by_operator" in await running.read()
        await until(lambda: h.live() == 0)


async def test_every_failure_has_its_exit_code(tmp_path):
    async with house(settings(server=KEYS)) as h:
        _, _, err = await run("requests", "--url", h.base, "--key", "wrong", check=1)
        assert "server.admin_keys" in err
        _, out, _ = await run("cancel", "--url", h.base, "--key", "ka", "x", "--json", check=1)
        assert json.loads(out)["exit_code"] == 1
        await run("requests", "--url", h.base, "--key", "adm", "--model", "nobody", check=4)
        with held_port() as nobody:
            _, _, err = await run("requests", "--url", f"http://127.0.0.1:{nobody}", check=3)
        assert "no proxy answers" in err
        await run("requests", "--url", "ftp://x", check=2)
        await run("cancel", check=2)
        broken = tmp_path / "broken.yaml"
        broken.write_text("server: {port: x}")
        await run("requests", "--config", str(broken), check=2)


async def test_address_and_key_come_from_the_configuration(tmp_path):
    async with house(settings(server=KEYS)) as h:
        file = tmp_path / "llama-proxy.yaml"
        file.write_text(yaml.safe_dump({"server": {"host": "127.0.0.1", "port": h.port, **KEYS}}))
        await run("requests", "--config", str(file), check=0)
        await run("requests", env={"LLAMA_PROXY_CONFIG": str(file)}, check=0)
        await run("requests", "--config", str(file), "--url", h.base, check=0)


async def test_watch_goes_on_until_it_is_interrupted():
    async with house(settings(server=KEYS)) as h:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "proxy", "requests", "--watch", "--json", "--interval", "0.1"),
            *("--url", h.base, "--key", "adm"),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        for _ in range(3):
            line = await asyncio.wait_for(process.stdout.readline(), 60)
            assert json.loads(line)["requests"] == []
        process.send_signal(signal.SIGINT)
        # to the end of its output: a pipe that is not read out is left open
        await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 130
