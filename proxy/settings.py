"""Configuration: one YAML file plus environment, validated into frozen models.

Units are in the names (`_s` seconds, `_ms` milliseconds, `_bytes` bytes). 0 or null means "off"
for every limit, budget and interval. `proxy.config` reads files and environment.
"""

import ipaddress
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from proxy.fields import (
    Address,
    Argument,
    CommandLine,
    Ipv4,
    Key,
    MacAddress,
    ModelId,
    OptionalCount,
    OptionalSeconds,
    Policy,
    PriorityClass,
    Probe,
    Seconds,
    Url,
    UserPath,
)

ENV_PREFIX = "LLAMA_PROXY_"
ENGINE_MAX_BODY_BYTES = 100 * 1024 * 1024
"""llama-server refuses larger bodies and has no flag for it, so our cap may not exceed it."""

_LOOPBACK_NAMES = frozenset({"localhost", "localhost.", "ip6-localhost"})


class ConfigError(Exception):
    """The configuration cannot be used; the message names the file, the field path and what was expected."""


class Frozen(BaseModel):
    """Base of all sections: frozen, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ApiKey(Frozen):
    """One client's key. `weight` and `class` are used by fair sharing; `models` are glob patterns.

    `max_tokens_default` replaces the model's; of two caps the lower one counts.
    """

    name: Annotated[str, Field(min_length=1, max_length=64)]
    key: Key
    priority: PriorityClass = Field("normal", alias="class")
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    max_queue: OptionalCount = None
    models: tuple[str, ...] = ("*",)
    max_tokens_default: OptionalCount = None
    max_tokens_cap: OptionalCount = None

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class AdminKey(Frozen):
    """A key for the operator API; its name is the audit field."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    key: Key


class Server(Frozen):
    """The listening side."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8082
    api_keys: tuple[ApiKey, ...] = ()
    admin_keys: tuple[AdminKey, ...] = ()
    metrics_key: Key | None = None
    insecure_no_keys: bool = False
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: Annotated[int, Field(gt=0, le=ENGINE_MAX_BODY_BYTES)] = 67_108_864
    max_header_bytes: Annotated[int, Field(ge=1024, le=262_144)] = 16_384
    body_timeout_s: OptionalSeconds = 60.0
    stall_timeout_s: OptionalSeconds = 120.0
    shutdown_drain_s: Seconds = 10.0
    state_dir: UserPath | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "json", "console"] = "auto"

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the port."""
        if self.host.lower() in _LOOPBACK_NAMES:
            return True
        try:
            return ipaddress.ip_address(self.host.removeprefix("[").removesuffix("]")).is_loopback
        except ValueError:
            return False

    @model_validator(mode="after")
    def _keys(self) -> Self:
        for field in ("api_keys", "admin_keys"):
            names = [key.name for key in getattr(self, field)]
            if len(set(names)) != len(names):
                raise ValueError(f"{field}: two keys have the same name")
        owners: dict[str, str] = {}
        named = [(f"api_keys ({key.name})", key.key) for key in self.api_keys]
        named += [(f"admin_keys ({key.name})", key.key) for key in self.admin_keys]
        for where, secret in named:
            other = owners.setdefault(secret.get_secret_value(), where)
            if other != where:
                raise ValueError(f"{where}: has the same key as {other}; every key must be another")
        problem = _open_bind(self)
        if problem:
            raise ValueError(problem)
        return self


def _open_bind(server: Server) -> str:
    """Return why this server may not listen where it wants to, or an empty text."""
    if server.loopback or server.insecure_no_keys or (server.api_keys and server.admin_keys):
        return ""
    return (
        f"host {server.host!r} can be reached from other machines: set api_keys and admin_keys, "
        "or say insecure_no_keys: true if something in front of the proxy checks callers"
    )


class Engine(Frozen):
    """Defaults for every process backend. `dir: auto` is the engine built by `llama-proxy engine build`."""

    dir: str = "auto"
    phase_policy: Policy = "drain"
    phase_yield_ms: Annotated[int, Field(ge=0, le=3_600_000)] = 2000
    phase_admit_ms: Annotated[int, Field(ge=0, le=60_000)] = 0
    args: tuple[Argument, ...] = ()
    env: Mapping[str, str] = Field(default_factory=dict)


class Admission(Frozen):
    """Queueing: bounds, deadlines, classes."""

    max_queue: OptionalCount = 256
    max_queued_bytes: OptionalCount = 1_073_741_824
    queue_timeout_s: OptionalSeconds = 600.0
    gate_hold_max_s: OptionalSeconds = 600.0
    wide_patience_s: Seconds = 5.0
    keepalive_s: OptionalSeconds = 15.0
    cohort_gather_ms: Annotated[int, Field(ge=0, le=1000)] = 20
    native_standby: bool = True
    recall: bool = True
    fair_share: bool = True
    fair_decode_weight: Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)] = 2.0
    age_after_s: OptionalSeconds = 60.0
    age_every_grants: Annotated[int, Field(ge=1, le=1000)] = 8
    cohort_shape: bool = False
    cohort_shape_ratio: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] = 1.0
    cohort_shape_max_wait_s: Seconds = 10.0
    stale_after_s: Annotated[float, Field(gt=0)] = 3.0
    classes: Mapping[PriorityClass, int] = Field(
        default_factory=lambda: {"interactive": 10, "normal": 0, "batch": -10}
    )


class Memory(Frozen):
    """How much memory all models together may take, and how they make room for each other.

    `ram_bytes` null is the machine's; `vram_bytes` null does not limit beyond what is measured. A model stays for at least
    `min_residency_s`; a load that found no idle model to replace drains a busy one after `swap_patience_s`.
    """

    ram_bytes: OptionalCount = None
    vram_bytes: OptionalCount = None
    min_residency_s: Seconds = 60.0
    swap_patience_s: Seconds = 120.0


class Budgets(Frozen):
    """Time limits of one request or load, each off with 0."""

    load_timeout_s: OptionalSeconds = 900.0
    first_token_timeout_s: OptionalSeconds = None
    inter_token_timeout_s: OptionalSeconds = 120.0
    total_timeout_s: OptionalSeconds = None


class Stop(Frozen):
    """How a model is stopped: `drain_s` for running requests, `grace_s` between TERM and KILL.

    `new_requests` says what becomes of requests that come while it drains.
    """

    drain_s: Seconds = 30.0
    grace_s: Seconds = 10.0
    new_requests: Literal["hold", "reject"] = "hold"


class Restart(Frozen):
    """Starting again after a crash or a wedge: at once, then `first_s`, doubled up to `max_s`.

    A backend that served for `stable_s` starts over. `first_s` 0: nothing is started again by itself.
    """

    first_s: Seconds = 1.0
    max_s: Seconds = 60.0
    stable_s: Seconds = 300.0


class Wake(Frozen):
    """How a host is woken: a command, or a Wake-on-LAN packet to `mac`; it is awake once `probe` answers.

    The packet goes to `broadcast` and `port` (UDP), again and again until the answer or `timeout_s`, which bounds all of it.
    """

    command: CommandLine | None = None
    mac: MacAddress | None = None
    broadcast: Ipv4 = "255.255.255.255"
    port: Annotated[int, Field(ge=1, le=65535)] = 9
    probe: Probe
    timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 120.0

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.command is None) == (self.mac is None):
            raise ValueError("exactly one of command or mac is needed")
        return self


class Idle(Frozen):
    """What becomes of a host that nobody used for `after_s`: its models are unloaded, then `command` runs once.

    The command may take `timeout_s`; what it began (going to sleep) is given `settle_s` before the host is woken again.
    """

    after_s: OptionalSeconds
    command: CommandLine
    timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 60.0
    settle_s: Seconds = 10.0


class Host(Frozen):
    """A machine that models run on, where it may sleep."""

    wake: Wake | None = None
    idle: Idle | None = None


class Model(Frozen):
    """One model: exactly one of `path` (we run llama-server), `cmd` (we run that), `url` or `dns`."""

    path: UserPath | None = None
    cmd: str | None = None
    url: Url | None = None
    dns: Address | None = None
    cwd: UserPath | None = None
    args: tuple[Argument, ...] = ()
    env: Mapping[str, str] = Field(default_factory=dict)
    aliases: tuple[ModelId, ...] = ()
    description: str = ""
    engine: str | None = None
    host: str | None = None
    upstream_key: Key | None = None
    vram_bytes: OptionalCount = None
    ram_bytes: OptionalCount = None
    ttl_s: OptionalSeconds = None
    wedge_after_s: OptionalSeconds = 300.0
    preload: bool = False
    slot_cache: bool = False
    phase_policy: Policy | None = None
    phase_yield_ms: Annotated[int, Field(ge=0, le=3_600_000)] | None = None
    phase_admit_ms: Annotated[int, Field(ge=0, le=60_000)] | None = None
    on_proxy_exit: Literal["stop", "keep"] = "stop"
    max_queue: OptionalCount = None
    max_tokens_default: OptionalCount = None
    max_tokens_cap: OptionalCount = None
    budgets: Budgets = Budgets()
    stop: Stop = Stop()
    restart: Restart = Restart()

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        sources = [name for name in ("path", "cmd", "url", "dns") if getattr(self, name) is not None]
        if len(sources) != 1:
            found = ", ".join(sources) or "none"
            raise ValueError(f"exactly one of path, cmd, url or dns is needed (found: {found})")
        return self


class Settings(BaseSettings):
    """The whole configuration, as one frozen value."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        env_file=None,
        nested_model_default_partial_update=False,
    )

    server: Server = Server()
    engine: Engine = Engine()
    admission: Admission = Admission()
    memory: Memory = Memory()
    hosts: Mapping[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")], Host] = Field(
        default_factory=dict
    )
    models_dir: UserPath | None = None
    models: Mapping[ModelId, Model] = Field(default_factory=dict)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Environment over file (the file arrives as init values)."""
        _ = settings_cls, dotenv_settings, file_secret_settings
        return (env_settings, init_settings)

    @model_validator(mode="after")
    def _names(self) -> Self:
        taken: dict[str, str] = {name: f"models.{name}" for name in self.models}
        for name, model in self.models.items():
            if model.host is not None and model.host not in self.hosts:
                known = ", ".join(sorted(self.hosts)) or "none is configured"
                raise ValueError(f"models.{name}.host: {model.host!r} is not one of hosts: {known}")
            for alias in model.aliases:
                if alias in taken:
                    raise ValueError(f"models.{name}.aliases: {alias!r} is already {taken[alias]}")
                taken[alias] = f"an alias of models.{name}"
        for key in self.server.api_keys:
            if key.priority not in self.admission.classes:
                known = ", ".join(sorted(self.admission.classes))
                raise ValueError(
                    f"server.api_keys ({key.name}): class {key.priority!r} is not one of {known}"
                )
        return self


def check_bind(settings: Settings) -> Settings:
    """Return the settings unless they would listen without keys where others can reach it (`ConfigError`).

    Needed after a command-line flag replaced the host: validation saw only the file's.
    """
    problem = _open_bind(settings.server)
    if problem:
        raise ConfigError(f"server: {problem}")
    return settings


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the configuration file."""
    schema = Settings.model_json_schema(by_alias=True, mode="validation")
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "llama-proxy configuration"
    return schema
