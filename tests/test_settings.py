"""The configuration: what is accepted, what is refused and with which words."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import jsonschema
import pytest
import yaml

from proxy.config import load
from proxy.settings import ENGINE_MAX_BODY_BYTES, ConfigError, Settings, json_schema

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "config.example.yaml"

Load = Callable[..., Settings]


@pytest.fixture
def read(tmp_path: Path) -> Load:
    """Loads a YAML text with an environment."""

    def inner(text: str, env: Mapping[str, str] | None = None) -> Settings:
        file = tmp_path / "c.yaml"
        file.write_text(text)
        return load(file, env or {})

    return inner


def test_the_example_loads_and_matches_the_schema() -> None:
    """config.example.yaml is valid for the loader and for the exported JSON Schema."""
    load(EXAMPLE, {})
    jsonschema.Draft202012Validator.check_schema(json_schema())
    jsonschema.validate(yaml.safe_load(EXAMPLE.read_text()), json_schema())


def test_the_example_names_every_field() -> None:
    """A field that exists is shown in the example, section by section."""
    raw = yaml.safe_load(EXAMPLE.read_text())
    sections = {
        "server": raw["server"],
        "engine": raw["engine"],
        "admission": raw["admission"],
        "memory": raw["memory"],
        "models.*": {key for model in raw["models"].values() for key in model},
        "budgets": raw["models"]["qwen-27b"]["budgets"],
        "stop": raw["models"]["qwen-27b"]["stop"],
        "restart": raw["models"]["qwen-27b"]["restart"],
        "api_keys": raw["server"]["api_keys"][0],
        "host": raw["hosts"]["gpu1"],
        "wake": raw["hosts"]["gpu1"]["wake"],
        "idle": raw["hosts"]["gpu1"]["idle"],
    }
    definitions = json_schema()["$defs"]
    names = {
        "server": "Server", "engine": "Engine", "admission": "Admission", "memory": "Memory", "models.*": "Model",
        "budgets": "Budgets", "stop": "Stop", "restart": "Restart", "api_keys": "ApiKey",
        "host": "Host", "wake": "Wake", "idle": "Idle",
    }  # fmt: skip
    for section, name in names.items():
        missing = set(definitions[name]["properties"]) - set(sections[section])
        assert not missing, f"{section}: {missing} not in config.example.yaml"


def _wake(text: str) -> str:
    return f"hosts: {{gpu1: {{wake: {{{text}, probe: 'gpu1:22'}}}}}}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("server: {port: 99999}", ["server.port", "65535", "99999"]),
        (_wake("mac: '52:54:00:12:34'"), ["hosts.gpu1.wake.mac", "52:54:00:12:34:56"]),
        (_wake("mac: '52:54-00:12-34:56'"), ["hosts.gpu1.wake.mac"]),
        (_wake("command: 'ssh \"gpu'"), ["hosts.gpu1.wake.command", "split into words"]),
        (_wake("command: '  '"), ["hosts.gpu1.wake.command", "expected a command"]),
        (_wake("command: a, mac: '52:54:00:12:34:56'"), ["hosts.gpu1.wake", "exactly one of command or mac"]),
        (_wake("command: a, broadcast: everywhere"), ["hosts.gpu1.wake.broadcast", "IPv4"]),
        (_wake("port: 9"), ["hosts.gpu1.wake", "exactly one of command or mac"]),
        (_wake("command: a, timeout_s: 0"), ["hosts.gpu1.wake.timeout_s", "greater than 0"]),
        ("hosts: {gpu1: {wake: {command: a}}}", ["hosts.gpu1.wake.probe", "required"]),
        *(
            (f"hosts: {{gpu1: {{wake: {{command: a, probe: '{probe}'}}}}}}", ["hosts.gpu1.wake.probe"])
            for probe in ("gpu1", "gpu1:0", ":22", "gpu1:22/x", "ftp://gpu1:22", "gpu1:99999", "u@gpu1:22")
        ),
        ("hosts: {gpu1: {idle: {command: a}}}", ["hosts.gpu1.idle.after_s", "required"]),
        ("hosts: {gpu1: {idle: {after_s: 5}}}", ["hosts.gpu1.idle.command", "required"]),
        ("hosts: {gpu1: {idle: {after_s: -5, command: a}}}", ["hosts.gpu1.idle.after_s"]),
        ("hosts: {'a b': {}}", ["hosts.a b"]),
        ("hosts: {gpu1: {}}\nmodels: {m: {path: x, host: gpu2}}", ["models.m.host", "'gpu2'", "gpu1"]),
        ("server: {prot: 1}", ["server.prot", "does not exist"]),
        ("admission: {queue_timeout_s: -1}", ["admission.queue_timeout_s", "0"]),
        ("admission: {queue_timeout_s: .inf}", ["admission.queue_timeout_s"]),
        ("admission: {age_every_grants: 0}", ["admission.age_every_grants", "1"]),
        ("admission: {cohort_shape_ratio: 0}", ["admission.cohort_shape_ratio", "0"]),
        ("admission: {fair_decode_weight: -1}", ["admission.fair_decode_weight", "0"]),
        (f"server: {{max_body_bytes: {ENGINE_MAX_BODY_BYTES + 1}}}", ["server.max_body_bytes"]),
        ("server: {host: 0.0.0.0}", ["server", "api_keys", "insecure_no_keys"]),
        ("engine: {phase_policy: fast}", ["engine.phase_policy", "'mixed', 'drain' or 'yield'"]),
        ("models: {a: {}}", ["models.a", "exactly one of path, cmd, url or dns"]),
        ("models: {a: {path: x, url: 'http://y'}}", ["models.a", "path, url"]),
        ("models: {a: {path: x, aliases: [b]}, b: {path: y}}", ["models.a.aliases", "'b'"]),
        ("models: {' a': {path: x}}", ["blanks"]),
        ("server: {port: 1, port: 2}", ["'port' stands twice", "line 1"]),
        ("server: [", ["not valid YAML"]),
        ("? [a]\n: 1", ["not valid YAML", "a key must be a plain value"]),
        ("a: " + "[" * 5000 + "]" * 5000, ["nested too deeply"]),
        ("server: {host: localhost.example.org}", ["server", "api_keys"]),
        ("server: {host: '::1234'}", ["server", "api_keys"]),
        ("server: {api_keys: [{name: a, key: ''}]}", ["server.api_keys.0.key", "non-empty"]),
        ("server: {metrics_key: ' x'}", ["server.metrics_key", "blanks"]),
        ("server: {api_keys: [{name: a, key: k}, {name: b, key: k}]}", ["api_keys (b)", "api_keys (a)"]),
        (
            "server: {api_keys: [{name: a, key: k}], admin_keys: [{name: b, key: k}]}",
            ["admin_keys (b)", "api_keys (a)"],
        ),
        ('models: {"a\\uD800": {path: x}}', ["models", "valid Unicode"]),
        ("models: {a: {path: x, args: -t 1}}", ["models.a.args", "a list"]),
        ("models: {a: }", ["models.a", "a mapping"]),
        ("models: {a: {url: 'http://'}}", ["models.a.url", "http://host:port"]),
        ("models: {a: {url: 'http://[::1'}}", ["models.a.url", "http://host:port"]),
        ("models: {a: {url: 'localhost:8080'}}", ["models.a.url", "http://host:port"]),
        ("- 1", ["top level must be a mapping"]),
        ("models_dir: nowhere", ["models_dir", "not a folder"]),
        ("server: {api_keys: [{name: a, key: k, class: vip}]}", ["class 'vip'", "interactive"]),
        ("server: {api_keys: [{name: a, key: k}, {name: a, key: l}]}", ["api_keys", "same name"]),
    ],
)
def test_an_invalid_file_names_the_field(read: Load, text: str, words: list[str]) -> None:
    """Each error names file, field path and expectation."""
    with pytest.raises(ConfigError) as error:
        read(text)
    message = str(error.value)
    assert "c.yaml" in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "::1", "[::1]"])
def test_loopback_needs_no_keys(read: Load, host: str) -> None:
    """Addresses and names that cannot be anything but this machine."""
    assert read(f"server: {{host: '{host}'}}").server.loopback


def test_yaml_merge_keys_bring_defaults(read: Load) -> None:
    """`<<` is for models that share most of their fields; what a model says itself wins."""
    text = "models: {a: &a {path: /a.gguf, args: [-c, '1']}, b: {<<: *a, path: /b.gguf}}"
    models = read(text).models
    assert models["b"].args == models["a"].args == ("-c", "1")
    assert (models["a"].path, models["b"].path) == (Path("/a.gguf"), Path("/b.gguf"))


@pytest.mark.parametrize(
    "text",
    [
        "server: {api_keys: [{name: a, key: 123456789}]}",
        "server: {api_keys: [123456789]}",
        "server: {admin_keys: 123456789}",
        "server: {api_keys: [{name: a, keey: 123456789}]}",
        "models: {a: {path: x, env: {TOKEN: 123456789}}}",
        "models: {a: {url: 'http://x', upstream_key: 123456789}}",
        "engine: {env: {TOKEN: 123456789}}",
    ],
)
def test_keys_never_appear_in_errors(read: Load, text: str) -> None:
    """A secret is not printed, not even when it is what is wrong or stands in the wrong place."""
    with pytest.raises(ConfigError) as error:
        read(text)
    assert "123456789" not in str(error.value)


def test_keys_never_appear_in_reprs(read: Load) -> None:
    """Settings can be logged."""
    settings = read("server: {api_keys: [{name: a, key: s3cr3t}]}")
    assert "s3cr3t" not in repr(settings)


def test_environment_wins_over_the_file(read: Load) -> None:
    """Every field can come from the environment, nested with two underscores."""
    settings = read("server: {port: 1, host: localhost}", {"LLAMA_PROXY_SERVER__PORT": "77"})
    assert (settings.server.port, settings.server.host) == (77, "localhost")
    with pytest.raises(ConfigError, match=r"server\.port"):
        read("", {"LLAMA_PROXY_SERVER__PORT": "x"})
    with pytest.raises(ConfigError, match="environment"):
        read("", {"LLAMA_PROXY_SERVER": "{"})


@pytest.mark.parametrize("off", ["0", "null", "0.0"])
def test_zero_and_null_are_off(read: Load, off: str) -> None:
    """0 and null mean the same everywhere: off."""
    settings = read(
        f"admission: {{max_queue: {off.split('.')[0]}, queue_timeout_s: {off}, keepalive_s: {off}}}\n"
        f"models: {{a: {{path: x, ttl_s: {off}, budgets: {{load_timeout_s: {off}}}}}}}"
    )
    assert settings.admission.max_queue is None
    assert settings.admission.queue_timeout_s is None
    assert settings.admission.keepalive_s is None
    assert settings.models["a"].ttl_s is None
    assert settings.models["a"].budgets.load_timeout_s is None


@pytest.mark.parametrize("off", ["0", "0.0"])
def test_zero_from_the_environment_is_off(read: Load, off: str) -> None:
    """There it is a text; a limit of 0 seconds would end everything at once."""
    settings = read(
        "", {"LLAMA_PROXY_ADMISSION__QUEUE_TIMEOUT_S": off, "LLAMA_PROXY_ADMISSION__MAX_QUEUE": off}
    )
    assert settings.admission.queue_timeout_s is None and settings.admission.max_queue is None


def test_numbers_among_arguments_are_their_text(read: Load) -> None:
    """`[-np, 4]` is what people write."""
    settings = read("engine: {args: [-np, 4, --temp, 0.5]}\nmodels: {a: {path: x, args: [-c, 8192]}}")
    assert settings.engine.args == ("-np", "4", "--temp", "0.5")
    assert settings.models["a"].args == ("-c", "8192")


def test_settings_are_frozen(read: Load) -> None:
    """Nobody changes the configuration of a running proxy by assignment."""
    settings = read("models: {a: {path: x}}")
    for target, field in ((settings.server, "port"), (settings, "server"), (settings.models["a"], "path")):
        with pytest.raises((ValueError, TypeError, dataclasses.FrozenInstanceError)):
            setattr(target, field, 1)


def test_models_dir_adds_what_is_not_named(tmp_path: Path) -> None:
    """Every GGUF is a model; projectors and later shards are not; an entry keeps its own name."""
    folder = tmp_path / "models"
    folder.mkdir()
    for name in (
        "a.gguf",
        "b.gguf",
        "mmproj-a.gguf",
        "s-00001-of-00002.gguf",
        "s-00002-of-00002.gguf",
        "x.txt",
    ):
        (folder / name).touch()
    file = tmp_path / "c.yaml"
    file.write_text("models_dir: models\nmodels: {mine: {path: models/b.gguf}}")
    settings = load(file, {})
    assert set(settings.models) == {"mine", "a", "s-00001-of-00002"}
    assert settings.models["mine"].path == folder / "b.gguf"


def test_unreadable_files_say_so(tmp_path: Path) -> None:
    """A missing or binary file is a sentence, not a traceback."""
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "no.yaml", {})
    (tmp_path / "bin.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(tmp_path / "bin.yaml", {})


def test_models_dir_refuses_a_name_that_is_no_text(tmp_path: Path) -> None:
    """A file name that is not UTF-8 could neither be listed nor asked for."""
    (tmp_path / os.fsdecode(b"\xff.gguf")).touch()
    file = tmp_path / "c.yaml"
    file.write_text("models_dir: .")
    with pytest.raises(ConfigError, match="rename the file"):
        load(file, {})
