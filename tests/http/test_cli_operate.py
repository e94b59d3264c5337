"""The operators' commands, as processes, against the whole proxy without an engine: words, JSON, exit codes."""

import asyncio
import json
import tarfile

from proxy.cli.doctor import without_secrets
from proxy.cli.follow import describe
from proxy.cli.tables import seconds, show, size

from .test_cli_requests import run
from .test_operate import proxy
from .world import until


async def test_models_load_and_jobs(tmp_path):
    async with proxy(tmp_path) as (made, client):
        where = ("--url", str(client._base_url), "--key", "adm")
        _, out, _ = await run("models", *where, check=0)
        assert [line.split()[:2] for line in out.splitlines()] == [
            ["model", "state"],
            ["demo", "unloaded"],
            ["other", "unloaded"],
        ]
        _, out, err = await run("load", *where, "demo", check=5)
        assert "load of demo failed: no engine" in err and "llama-proxy logs demo" in err
        _, out, _ = await run("load", *where, "demo", "--json", check=5)
        answer = json.loads(out)
        assert not answer["ok"] and answer["job"]["code"] == "model_load_failed"
        _, out, _ = await run("jobs", *where, check=0)
        assert [line.split()[1:4] for line in out.splitlines()[1:]] == [["load", "demo", "failed"]] * 2
        _, out, _ = await run("jobs", *where, answer["job"]["id"], "--json", check=0)
        assert json.loads(out) == answer["job"]
        _, out, _ = await run("models", *where, check=0)
        assert "no engine" in out and "failed" in out
        for args in (
            ("load", "nope"),
            ("unload", "nope"),
            ("jobs", "nope"),
            ("logs", "nope"),
            ("gate", "open", "nope"),
        ):
            _, _, err = await run(*args, *where, check=4)
            assert "nope" in err
        assert made.fleet.jobs.all("other") == ()


async def test_unload_gate_and_leases(tmp_path):
    async with proxy(tmp_path) as (made, client):
        where = ("--url", str(client._base_url), "--key", "adm")
        _, out, _ = await run("unload", *where, "default", check=0)
        assert out.startswith("demo is unloaded after")
        _, out, _ = await run("unload", *where, "demo", "--dry-run", check=0)
        assert out.splitlines() == [
            "demo is unloaded; a forced unload would end",
            "  0 running",
            "  0 queued",
        ]
        _, out, _ = await run("unload", *where, "demo", "--force", "--block", "--reason", "new disk", check=0)
        assert "0 running and 0 queued requests were ended" in out
        assert made.fleet.gates.gate("demo").reason == "new disk"
        for args in (("--force", "--deadline", "3"), ("--force", "--no-wait")):
            _, _, err = await run("unload", *where, "demo", *args, check=2)
            assert "exclude each other" in err
        _, out, _ = await run("gate", "block", *where, "--all", "--mode", "reject", "--dry-run", check=0)
        assert "would be" in out and made.fleet.gates.gate("other").open
        _, out, _ = await run("gate", "block", *where, "other", "--reason", "because", "--json", check=0)
        assert json.loads(out)["models"][0]["gate"]["by"] == {"key": "ops", "address": "127.0.0.1"}
        for args in (("gate", "open"), ("gate", "block", "demo", "--all")):
            _, _, err = await run(*args, *where, check=2)
            assert "--all" in err
        await run("gate", "open", *where, "--all", check=0)
        assert made.fleet.gates.gate("demo").open and made.fleet.gates.gate("other").open

        _, out, _ = await run("leases", "list", *where, check=0)
        assert out == "no leases are held\n"
        _, out, _ = await run("leases", "hold", *where, "--ttl", "3600", "--reason", "night run", check=0)
        [lease] = made.fleet.leases.held()
        assert out == f"{lease.id}\n" and lease.audit.key == "ops"
        _, out, _ = await run("leases", "list", *where, check=0)
        assert lease.id in out and "night run" in out
        await run("leases", "release", *where, lease.id, check=0)
        await run("leases", "release", *where, lease.id, check=4)
        assert made.fleet.leases.held() == ()


async def test_what_is_refused_and_who_does_not_answer():
    async with proxy() as (_, client):
        url = str(client._base_url)
        code, out, err = await run("models", "--url", url, "--key", "ka", "--json", check=1)
        assert "admin key" in err and json.loads(out)["exit_code"] == code
        _, _, err = await run("models", "--url", url, check=1)
        assert "--key" in err and "LLAMA_PROXY_ADMIN_KEY" in err
    for args in (
        ("models",),
        ("load", "m"),
        ("logs", "m"),
        ("doctor",),
        ("leases", "list"),
        ("gate", "open", "--all"),
    ):
        _, _, err = await run(*args, "--url", url, "--key", "adm", check=3)
        assert "no proxy answers" in err and "llama-proxy serve" in err


async def test_logs_are_followed_until_the_proxy_goes():
    async with proxy() as (made, client):
        where = ("--url", str(client._base_url), "--key", "adm")
        feed = made.fleet._runner("demo")._recipe.feed
        following = asyncio.ensure_future(run("logs", *where, "demo", "--follow", "--json"))
        await until(lambda: bool(feed._followers), 30)
        feed.push(["first", "second"])
        feed.close()
        code, out, _ = await following
        said = [json.loads(line)["line"] for line in out.splitlines()]
        assert (code, said) == (3, ["first", "second", "--- the proxy is shutting down"])


async def test_the_doctor_finds_says_what_next_and_writes_a_bundle(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(
        "server: {admin_keys: [{name: ops, key: topsecretkey}]}\n"
        "models: {demo: {path: /x.gguf, env: {HF_TOKEN: hf_secret}, args: [--api-key, otherkey]}}\n"
    )
    async with proxy(tmp_path / "state") as (_, client):
        where = ("--url", str(client._base_url), "--key", "adm")
        _, out, _ = await run("doctor", *where, "--reconcile", check=0)
        assert "nothing is wrong" in out and "agree" in out
        await run("load", *where, "demo", check=5)
        await run("gate", "block", *where, "other", "--reason", "paint", check=0)
        bundle = tmp_path / "b.tar.gz"
        _, out, _ = await run("doctor", *where, "--config", str(config), "--bundle", str(bundle), check=5)
        assert "demo: does not load: no engine" in out and "llama-proxy gate open other" in out
        assert bundle.stat().st_mode & 0o777 == 0o600
        with tarfile.open(bundle) as tar:
            found = {
                name.removeprefix("llama-proxy-bundle/"): tar.extractfile(name).read()
                for name in tar.getnames()
            }
        assert {"about.json", "models.json", "jobs.json", "metrics.txt", "logs/0-demo.txt"} <= set(found)
        assert json.loads(found["config-found-here.json"])["models"]["demo"]["path"] == "/x.gguf"
        everything = b"".join(found.values())
        assert not any(secret in everything for secret in (b"topsecretkey", b"hf_secret", b"otherkey"))
        assert json.loads(found["jobs.json"])["jobs"][0]["state"] == "failed"
        _, _, err = await run("doctor", *where, "--bundle", str(bundle), check=2)
        assert "exists already" in err


def test_secrets_are_left_out():
    value = {
        "env": {"A": "x"},
        "key": "y",
        "args": ["--api-key", "z", "-c", "4096"],
        "cmd": "ssh h s --api-key=w -c 1",
    }
    hidden = without_secrets(value)
    assert hidden["args"] == ["--api-key", "**********", "-c", "4096"] and hidden["env"] == {
        "A": "**********"
    }
    assert hidden["cmd"] == "ssh h s --api-key=********** -c 1" and hidden["key"] == "**********"
    stars = "*" * 10
    assert without_secrets({"url": "http://me:pw@host:1/x", "cmd": "env HF_TOKEN=a run -c 1"}) == {
        "url": f"http://{stars}@host:1/x",
        "cmd": f"env HF_TOKEN={stars} run -c 1",
    }
    words = ["-e", "HF_TOKEN=a", "curl -H 'Authorization: Bearer abc' x", "http://host/a@b", "-c", "4096"]
    assert without_secrets(words) == [
        *(
            "-e",
            f"HF_TOKEN={stars}",
            f"curl -H 'Authorization: Bearer {stars}' x",
            "http://host/a@b",
            "-c",
            "4096",
        ),
    ]


def test_words_of_progress_and_numbers():
    progress = {
        "stage": "loading",
        "bytes_read": 500_000_000,
        "bytes_total": 2_000_000_000,
        "requests_left": None,
    }
    job = {"kind": "load", "model": "m", "progress": progress}
    assert describe(job) == ("load m: loading 500.0 MB of 2.00 GB", 500_000_000, 2_000_000_000)
    progress |= {"stage": "draining", "bytes_read": None, "bytes_total": None, "requests_left": 1}
    assert describe(job) == ("load m: draining, 1 request still running", 0, 0)
    assert [seconds(n) for n in (None, 0.4, 61, 3700, 200_000)] == ["", "0.4s", "1m01s", "1h01m", "2d07h"]
    assert [size(n) for n in (None, 7, 1_200, 3_400_000, 5_600_000_000)] == [
        "",
        "7 B",
        "1.2 kB",
        "3.4 MB",
        "5.60 GB",
    ]


def test_a_table_in_a_pipe_has_a_line_for_each_row(capsys):
    """However long its last cell is, and whatever a reason holds."""
    long = "no such file " * 60
    show(
        ("model", "n", "note"),
        [("m", "1", long), ("other", "12", "two\nlines \x1b[31mred")],
        "none",
        right=("n",),
    )
    out = capsys.readouterr().out.splitlines()
    assert out == ["model  n note", f"m      1 {long.rstrip()}", "other 12 two lines  [31mred"]
    show(("model",), [], "no models are configured")
    assert capsys.readouterr().out == "no models are configured\n"
