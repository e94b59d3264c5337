"""Reloading the configuration: what is compared, applied, refused, and what only a restart can change."""

import asyncio
import json

import pytest

from proxy.app.compare import Changed, Difference, applied, compare
from proxy.catalog import Catalog
from proxy.settings import ConfigError, Model, Settings

from .test_cli_requests import run
from .test_operate import CHAT, KEYS, ask, proxy
from .world import until


def settings(**sections):
    sections.setdefault("models", {"demo": {"path": "demo.gguf"}, "other": {"path": "o.gguf"}})
    return Settings.model_validate(sections)


# -- the comparison ------------------------------------------------------------------------------------------


def test_nothing_changed():
    assert compare(settings(), settings()) == Difference() and Difference().none


@pytest.mark.parametrize(
    ("field", "restart"),
    [
        ({"args": ["-c", "4096"]}, True), ({"env": {"A": "1"}}, True), ({"phase_policy": "yield"}, True),
        ({"on_proxy_exit": "keep"}, True), ({"ttl_s": 60}, False), ({"aliases": ["x"]}, False),
        ({"max_tokens_cap": 9}, False), ({"stop": {"grace_s": 1}}, False), ({"budgets": {"total_timeout_s": 9}}, False),
    ],
)  # fmt: skip
def test_a_model_is_restarted_only_for_what_shapes_its_process(field, restart):
    new = settings(models={"demo": {"path": "demo.gguf", **field}, "other": {"path": "o.gguf"}})
    found = compare(settings(), new)
    assert found.changed == (Changed("demo", tuple(field), restart),) and not found.added + found.removed


def test_what_needs_a_start_is_named_without_its_value_and_stays():
    new = settings(
        server={"port": 9, "api_keys": [{"name": "a", "key": "secret"}]},
        admission={"max_queue": 5, "keepalive_s": 1},
        engine={"args": ["-t", "2"]},
        hosts={"gpu1": {}},
    )
    found = compare(settings(), new)
    assert found.admission == ("admission.max_queue",)
    assert found.at_start == (
        "server.port", "server.api_keys", "engine.args", "hosts.gpu1", "admission.keepalive_s",
    )  # fmt: skip
    assert "secret" not in repr(found)
    after = applied(settings(), new)
    assert after.admission.max_queue == 5 and after.server == settings().server
    assert after.admission.keepalive_s == settings().admission.keepalive_s
    assert compare(after, new).admission == () and compare(after, new).at_start == found.at_start


# -- names ---------------------------------------------------------------------------------------------------


def test_a_name_means_who_stays():
    """While a model leaves, an alias it had means whoever has it now; an id means its model until that is gone."""
    catalog = Catalog({"old": Model(path="o", aliases=("default", "mine"))})
    new = {"new": Model(path="n", aliases=("default", "old")), "mine": Model(path="m")}
    leaving = {"old": Model(path="o", aliases=("default", "mine", "still"))}
    catalog.replace({**leaving, **new}, leaving)
    names = {name: catalog.resolve(name) for name in ("old", "new", "mine", "default", "still")}
    assert names == {"old": "old", "new": "new", "mine": "mine", "default": "new", "still": "old"}
    catalog.drop("old")
    assert catalog.resolve("old") == "new" and catalog.resolve("still") is None


def test_the_name_may_be_left_out_while_the_only_other_model_leaves():
    catalog = Catalog({"old": Model(path="o")})
    catalog.replace({"new": Model(path="n"), "old": Model(path="o")}, ("old",))
    assert catalog.only() == "new"
    catalog.drop("old")
    assert catalog.only() == "new"


# -- over HTTP -----------------------------------------------------------------------------------------------


class File:
    """The configuration file as the proxy reads it again."""

    def __init__(self, **sections):
        self.now, self.reads = Settings.model_validate({"server": KEYS, **sections}), 0

    def __call__(self):
        self.reads += 1
        if isinstance(self.now, Exception):
            raise self.now
        return self.now

    def write(self, **sections):
        self.now = Settings.model_validate({"server": KEYS, **sections})


MODELS = {"demo": {"path": "demo.gguf", "aliases": ["default"]}, "other": {"path": "o.gguf"}}


async def test_without_a_file_there_is_nothing_to_reload():
    async with proxy() as (_, client):
        status, body = await ask(client, "POST", "/api/reload")
        assert status == 400 and "without a configuration file" in body["error"]["message"]


async def test_a_dry_run_says_what_a_reload_would_do_and_a_mistake_changes_nothing():
    file = File(models=MODELS)
    async with proxy(models=MODELS, reread=file) as (made, client):
        file.write(
            models={"demo": {**MODELS["demo"], "ttl_s": 9}, "new": {"path": "n.gguf"}},
            memory={"ram_bytes": 9},
        )
        status, body = await ask(client, "POST", "/api/reload", {"dry_run": True})
        assert status == 200 and body == {
            "ok": True, "dry_run": True, "added": ["new"], "removed": ["other"],
            "changed": [{"model": "demo", "fields": ["ttl_s"], "restart": False}], "admission": [],
            "restart_needed": ["memory.ram_bytes"], "jobs": [],
        }  # fmt: skip
        assert list(made.catalog.ids()) == ["demo", "other"]
        for wrong, words in (
            (ConfigError("c.yaml: server.port: expected a number"), "server.port"),
            (
                Settings.model_validate({"models": {"m": {"path": "x", "args": ["--port", "1"]}}}),
                "models.m.args",
            ),
        ):
            file.now = wrong
            status, body = await ask(client, "POST", "/api/reload")
            assert status == 400 and words in body["error"]["message"]
        assert list(made.catalog.ids()) == ["demo", "other"]
        status, body = await ask(client, "POST", "/api/reload", {"dry": True})
        assert status == 400 and body["error"]["param"] == "dry"


async def test_models_come_change_and_go():
    """A new one is known at once, a changed one keeps its gate, a removed one ends its waiters and is unknown then."""
    file = File(models=MODELS)
    async with proxy(models=MODELS, reread=file) as (made, client):
        for name in ("demo", "other"):
            await ask(client, "POST", f"/api/models/{name}/gate", {"state": "blocked", "reason": "wait"})
        waiting = [
            asyncio.ensure_future(
                ask(client, "POST", "/v1/chat/completions", {**CHAT, "model": name}, headers=key)
            )
            for name in ("demo", "other")
            for key in ({"Authorization": "Bearer ka"},)
        ]
        await until(lambda: made.live == 2)
        file.write(
            models={"demo": {"path": "demo.gguf", "aliases": ["renamed"], "ttl_s": 5}, "new": {"path": "n.gguf"}},
            admission={"max_queue": 1},
        )  # fmt: skip
        status, body = await ask(client, "POST", "/api/reload")
        assert status == 200 and body["added"] == ["new"] and body["removed"] == ["other"]
        assert body["admission"] == ["admission.max_queue"] and len(body["jobs"]) == 1
        status, gone = await asyncio.wait_for(waiting[1], 10)
        assert status in {404, 503} and "removed from the configuration" in gone["error"]["message"]
        await until(lambda: list(made.catalog.ids()) == ["demo", "new"])
        await until(lambda: not made.fleet.refits.busy)
        assert (await ask(client, "GET", "/api/models/other"))[0] == 404
        assert (await ask(client, "GET", "/api/models/default"))[0] == 404
        assert (await ask(client, "GET", "/api/models/renamed"))[1]["gate"]["reason"] == "wait"
        assert made.fleet._ttl_s == {"demo": 5}
        status, body = await ask(client, "POST", "/v1/chat/completions", {**CHAT, "model": "demo"}, headers={"Authorization": "Bearer ka"})  # fmt: skip
        assert (status, body["error"]["code"]) == (429, "queue_full"), "the new bound holds"
        job = (await ask(client, "POST", "/api/models/new/load?wait=10"))[1]["job"]
        assert job["state"] == "failed" and "no engine" in job["error"]
        shown = made.metrics.render().decode()
        assert 'model="other"' not in shown
        assert 'llama_proxy_upstream_errors_total{kind="mid_body",model="new"} 0.0' in shown
        again = await ask(client, "POST", "/api/reload")
        assert again[1]["added"] == again[1]["removed"] == again[1]["changed"] == []
        await ask(client, "POST", "/api/models/demo/gate", {"state": "open"})
        assert (await asyncio.wait_for(waiting[0], 10))[0] == 502
        file.write(models=MODELS)
        assert (await ask(client, "POST", "/api/reload"))[1]["added"] == ["other"]
        assert (await ask(client, "GET", "/api/models/other"))[1]["gate"]["state"] == "open"


async def test_the_command():
    """People read lines, scripts JSON; what needs a restart is said apart; a mistake ends with 1 and its words."""
    file = File(models=MODELS)
    async with proxy(models=MODELS, reread=file) as (_, client):
        where = ("--url", str(client._base_url), "--key", "adm")
        _, out, _ = await run("reload", *where, check=0)
        assert out == "nothing has changed\n"
        changed = {"demo": {**MODELS["demo"], "args": ["-c", "99"]}, "new": {"path": "n.gguf"}}
        file.write(models=changed, memory={"ram_bytes": 9})
        _, out, err = await run("reload", *where, "--dry-run", check=0)
        assert out.splitlines() == [
            "new: added",
            "demo: changed (args); restarted if it is loaded",
            "other: removed; what runs may finish",
        ]
        assert "needs a restart of the proxy: memory.ram_bytes" in err
        _, out, _ = await run("reload", *where, "--json", check=0)
        assert len(json.loads(out)["jobs"]) == 1
        file.now = ConfigError("c.yaml: server.port: expected a number")
        _, _, err = await run("reload", *where, check=1)
        assert "server.port" in err
