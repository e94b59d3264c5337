"""Reading the configuration: one YAML file and the environment, with errors that name file and field.

What the fields are is `proxy.settings`; this is the only reader of files and environment.
"""

import json
import os
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsError,
)

from proxy.fields import model_id
from proxy.settings import ConfigError, Model, Settings


def load(path: Path | None, environ: Mapping[str, str] | None = None) -> Settings:
    """Read and validate the configuration.

    Relative paths (`models_dir`, `models.*.path`, `cwd`, `state_dir`) are taken from the file's
    folder. Raises `ConfigError` naming file, field path and expectation.
    """
    raw: dict[str, Any] = {}
    base = Path.cwd()
    if path is not None:
        raw = _read_yaml(path)
        base = path.resolve().parent
    try:
        settings = _build(raw, os.environ if environ is None else environ)
    except ValidationError as error:
        raise ConfigError(_explain(error, path)) from None
    except SettingsError as error:
        raise ConfigError(f"environment: {error} (expected JSON for a whole section)") from None
    return _with_base(_with_models_dir(settings, base, path), base)


def _build(raw: dict[str, Any], environ: Mapping[str, str]) -> Settings:
    class _Env(EnvSettingsSource):
        def _load_env_vars(self) -> Mapping[str, str | None]:
            return {key.lower(): value for key, value in environ.items()}

    class _Loaded(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            _ = init_settings, env_settings, dotenv_settings, file_secret_settings
            return (_Env(settings_cls), InitSettingsSource(settings_cls, raw))

    loaded = _Loaded()
    return Settings.model_construct(**{name: getattr(loaded, name) for name in Settings.model_fields})


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    try:
        raw = yaml.load(text, Loader=_UniqueKeys)  # noqa: S506 - a SafeLoader subclass
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply") from None
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: the top level must be a mapping, not {type(raw).__name__}")
    # a section of which only comments are left is an empty section
    return {str(key): value for key, value in raw.items() if value is not None}


class _UniqueKeys(yaml.SafeLoader):
    """A SafeLoader that refuses a key given twice: YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                # `<<` brings defaults, which the mapping's own keys may replace
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be a plain value, not a list or a mapping", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _explain(error: ValidationError, path: Path | None) -> str:
    where = str(path) if path else "configuration"
    lines = []
    for item in error.errors(include_url=False):
        field = ".".join(str(part) for part in item["loc"]) or "(top level)"
        message = _EXPECTED.get(item["type"]) or item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = "this field does not exist (check the spelling; see config.example.yaml)"
        got = item.get("input")
        shown = "" if isinstance(got, dict | list | BaseModel) or _secret(field) else f" (got {_short(got)})"
        lines.append(f"{where}: {field}: {message}{shown}")
    return "\n".join(lines)


_EXPECTED = {
    "tuple_type": "expected a list",
    "mapping_type": "expected a mapping",
    "dict_type": "expected a mapping",
    "model_type": "expected a mapping",
}
_KEEPS_SECRETS = frozenset({"api_keys", "admin_keys", "metrics_key", "upstream_key", "key", "env"})


def _secret(field: str) -> bool:
    return not _KEEPS_SECRETS.isdisjoint(field.split("."))


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "…"


def _with_models_dir(settings: Settings, base: Path, path: Path | None) -> Settings:
    """Add a model for every GGUF of `models_dir` that no entry names."""
    if settings.models_dir is None:
        return settings
    folder = base / settings.models_dir
    if not folder.is_dir():
        raise ConfigError(f"{path or 'configuration'}: models_dir: {folder} is not a folder")
    models = dict(settings.models)
    named = {(base / model.path).resolve() for model in models.values() if model.path is not None}
    taken = set(models) | {alias for model in models.values() for alias in model.aliases}
    for file in sorted(folder.glob("*.gguf")):
        if file.name.startswith("mmproj") or _later_shard(file.name) or file.resolve() in named:
            continue
        try:
            model_id(file.stem)
        except ValueError as error:
            raise ConfigError(f"models_dir: {str(file)!a}: {error}; rename the file") from None
        if file.stem in taken:
            raise ConfigError(f"models_dir: {file}: the name {file.stem!r} is already taken by another model")
        models[file.stem] = Model(path=file)
    return settings.model_copy(update={"models": models, "models_dir": folder})


def _later_shard(name: str) -> bool:
    """Whether a split GGUF's file is not the first: llama-server finds the others by itself."""
    parts = name.removesuffix(".gguf").rsplit("-of-", 1)
    return len(parts) == 2 and parts[1].isdigit() and not parts[0].endswith("-00001")


def _with_base(settings: Settings, base: Path) -> Settings:
    models = {
        name: model.model_copy(
            update={
                "path": base / model.path if model.path else None,
                "cwd": base / model.cwd if model.cwd else None,
            }
        )
        for name, model in settings.models.items()
    }
    server = settings.server
    if server.state_dir is not None:
        server = server.model_copy(update={"state_dir": base / server.state_dir})
    return settings.model_copy(update={"models": models, "server": server})
