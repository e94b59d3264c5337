"""Builds the command line and environment of an engine process. Pure.

The proxy decides where an engine listens and who may talk to it; everything else is the user's: model
arguments come after the engine defaults of the configuration, so that the later one wins, and our own
defaults (`-np 4`, `-b 512`, threads = cores - 1) are only added where the user said nothing, neither by
a short or long flag nor by llama-server's environment variable.

The engine's key travels in the environment (`LLAMA_API_KEY`), never in the process list. Variables of the
proxy's own environment that llama-server would read as arguments are not inherited: an engine runs as
its configuration says, whatever shell the proxy was started from.
"""

import itertools
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from proxy.settings import ConfigError, Engine, Model

HOST: Final = "127.0.0.1"
KEY_VARIABLE: Final = "LLAMA_API_KEY"
DEFAULT_SLOTS: Final = 4
DEFAULT_BATCH: Final = 512
LLAMA_BATCH: Final = 2048
"""What llama-server itself takes when nobody says."""

_ENDPOINT = "the proxy chooses where the engine listens and which key it takes"
_PATHS = "the proxy calls the engine's own paths over plain HTTP"
_SOURCE = "the model is given by `path`"
_RESERVED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("--host", "--port", "--reuse-port", "--api-key", "--api-key-file"), _ENDPOINT),
    **dict.fromkeys(("--api-prefix", "--ssl-key-file", "--ssl-cert-file"), _PATHS),
    **dict.fromkeys(
        ("-m", "--model", "-mu", "--model-url", "-hf", "-hfr", "--hf-repo", "-hff", "--hf-file", "-dr"),
        _SOURCE,
    ),
    **dict.fromkeys(("--docker-repo", "--models-dir", "--models-preset"), _SOURCE),
    "--no-slots": "the proxy reads the engine's state from /slots",
    "--sleep-idle-seconds": "the proxy owns idle timers (ttl_s), and its polling would keep the engine awake",
}
_RESERVED_VARIABLES: Final = frozenset(
    {
        KEY_VARIABLE,
        *(f"LLAMA_ARG_{name}" for name in ("HOST", "PORT", "REUSE_PORT", "API_KEY_FILE", "API_PREFIX")),
        *(
            f"LLAMA_ARG_{name}"
            for name in ("SSL_KEY_FILE", "SSL_CERT_FILE", "MODEL", "MODEL_URL", "NO_ENDPOINT_SLOTS")
        ),
        *(
            f"LLAMA_ARG_{name}"
            for name in ("HF_REPO", "HF_FILE", "DOCKER_REPO", "MODELS_DIR", "SLEEP_IDLE_SECONDS")
        ),
    }
)
_NOT_INHERITED: Final = ("LLAMA_ARG_", "LLAMA_PROXY_", "LLAMA_SERVER_", "AIP_")
"""Prefixes: engine arguments, our own settings (they hold keys), router internals, and the variables by
which a cloud platform would move llama-server to another port."""

_MACRO: Final = re.compile(r"\$?\$\{([^}]*)\}")
_MACROS: Final = ("PORT", "MODEL", "ENGINE")


@dataclass(frozen=True, slots=True)
class EngineBinary:
    """A llama-server to run. `patched` engines know the phase flags; `dir` holds the manifest."""

    path: Path
    patched: bool = False
    dir: Path | None = None


@dataclass(frozen=True, slots=True)
class Command:
    """What to execute. `env` is the whole environment; it holds the engine's key."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path | None = None


def build(
    name: str,
    model: Model,
    defaults: Engine,
    *,
    engine: EngineBinary | None,
    port: int,
    key: str,
    cores: int,
    inherited: Mapping[str, str],
    slots: Path | None = None,
) -> Command:
    """Return the command of a `path` or `cmd` model.

    `port` is the port to listen on (0: the engine takes a free one); `cores` are the CPUs this machine
    gives us; `engine` may only be None for a `cmd` without `${ENGINE}`; `slots` is the folder for saved slots. Raises `ConfigError` naming field and flag.
    """
    check(name, model, defaults)
    env = {k: v for k, v in inherited.items() if k != KEY_VARIABLE and not k.startswith(_NOT_INHERITED)}
    if model.cmd is not None:
        macros = {"PORT": str(port), "MODEL": name, "ENGINE": str(engine.path) if engine else ""}
        argv = [_expand(word, macros, f"models.{name}.cmd") for word in shlex.split(model.cmd)]
        env |= {k: _expand(v, macros, field) for k, (field, v) in _variables(name, model, defaults).items()}
        return Command(tuple(argv), env | {KEY_VARIABLE: key}, model.cwd)
    if engine is None or model.path is None:
        raise ConfigError(f"models.{name}: an engine and a path are needed to build a command")
    env |= {**defaults.env, **model.env}
    user = (*defaults.args, *model.args)
    argv = [str(engine.path), "-m", str(model.path), "--host", HOST, "--port", str(port)]
    argv += _defaults(name, user, env, cores)
    if slots is not None and not _said(user, env, ("--slot-save-path",), "LLAMA_ARG_SLOT_SAVE_PATH"):
        argv += ["--slot-save-path", str(slots)]
    if engine.patched:
        argv += _phase(user, env, model, defaults)
    return Command((*argv, *user), env | {KEY_VARIABLE: key}, model.cwd)


def check(name: str, model: Model, defaults: Engine) -> None:
    """Refuse what cannot work before anything is started. Raises `ConfigError`."""
    if model.cmd is not None:
        _check_cmd(name, model, defaults)
        return
    if model.path is None:
        return
    for field, args in (("engine.args", defaults.args), (f"models.{name}.args", model.args)):
        for flag in map(_flag, args):
            if flag in _RESERVED:
                raise ConfigError(f"{field}: {flag} may not be set here: {_RESERVED[flag]}; remove it")
    for field, env in (("engine.env", defaults.env), (f"models.{name}.env", model.env)):
        for variable in env:
            if variable in _RESERVED_VARIABLES:
                raise ConfigError(
                    f"{field}: {variable} may not be set here: the proxy sets it itself; remove it"
                )


def needs_engine(model: Model, defaults: Engine) -> bool:
    """Whether the model's command or environment names a llama-server of ours."""
    if model.cmd is None:
        return model.path is not None
    texts = (text for _, text in _variables("", model, defaults).values())
    return any("ENGINE" in _macros(text) for text in (model.cmd, *texts))


def batch_tokens(model: Model, defaults: Engine) -> int:
    """Return the most tokens one decode call of this model takes (`-b`), as far as the configuration says it."""
    args = (*defaults.args, *model.args)
    found = DEFAULT_BATCH if model.cmd is None else LLAMA_BATCH
    for flag, value in itertools.pairwise(args):
        if _flag(flag) in ("-b", "--batch-size") and value.isdecimal():
            found = int(value)
    return max(1, found)


def _check_cmd(name: str, model: Model, defaults: Engine) -> None:
    where = f"models.{name}.cmd"
    if model.args:
        raise ConfigError(f"models.{name}.args: has no meaning with cmd; write the arguments into cmd")
    try:
        words = shlex.split(model.cmd or "")
    except ValueError as error:
        raise ConfigError(f"{where}: cannot be split into words: {error}") from None
    if not words:
        raise ConfigError(f"{where}: is empty")
    texts = {where: model.cmd or "", **dict(_variables(name, model, defaults).values())}
    for field, text in texts.items():
        for macro in _macros(text):
            if macro not in _MACROS:
                known = ", ".join(f"${{{known}}}" for known in _MACROS)
                raise ConfigError(
                    f"{field}: ${{{macro}}} is not a macro (known: {known}; $${{{macro}}} passes it on as it is)"
                )
    if not any("PORT" in _macros(text) for text in texts.values()):
        raise ConfigError(
            f"{where}: does not say ${{PORT}}, so that the proxy could not reach what it starts"
        )


def _variables(name: str, model: Model, defaults: Engine) -> dict[str, tuple[str, str]]:
    """Return a command's own variables, each with the field that it is from; the model's come before the engines'."""
    found = {k: (f"engine.env.{k}", v) for k, v in defaults.env.items()}
    return found | {k: (f"models.{name}.env.{k}", v) for k, v in model.env.items()}


def _macros(text: str) -> list[str]:
    return [m.group(1) for m in _MACRO.finditer(text) if not m.group().startswith("$$")]


def _expand(text: str, macros: Mapping[str, str], where: str) -> str:
    def one(match: re.Match[str]) -> str:
        if match.group().startswith("$$"):
            return match.group()[1:]
        if match.group(1) not in macros:
            raise ConfigError(f"{where}: ${{{match.group(1)}}} is not a macro")
        return macros[match.group(1)]

    return _MACRO.sub(one, text)


def _flag(arg: str) -> str:
    """Return a flag as llama-server reads it: underscores in long flags are dashes."""
    return arg.replace("_", "-") if arg.startswith("--") else arg


def _said(user: Sequence[str], env: Mapping[str, str], flags: Iterable[str], variable: str) -> bool:
    return variable in env or not {_flag(arg) for arg in user}.isdisjoint(flags)


def _defaults(name: str, user: Sequence[str], env: Mapping[str, str], cores: int) -> list[str]:
    argv = (
        ["--no-webui"]
        if not _said(user, env, ("--ui", "--webui", "--no-ui", "--no-webui"), "LLAMA_ARG_UI")
        else []
    )
    if not _said(user, env, ("--metrics",), "LLAMA_ARG_ENDPOINT_METRICS"):
        argv += ["--metrics"]
    if not _said(user, env, ("-np", "--parallel"), "LLAMA_ARG_N_PARALLEL"):
        argv += ["-np", str(DEFAULT_SLOTS)]
    if not _said(user, env, ("-b", "--batch-size"), "LLAMA_ARG_BATCH"):
        argv += ["-b", str(DEFAULT_BATCH)]
    if "," not in name and not _said(user, env, ("-a", "--alias"), "LLAMA_ARG_ALIAS"):
        # answers carry the name clients know, not a file's (a comma would mean several names to the engine)
        argv += ["--alias", name]
    if not _said(user, env, ("-t", "--threads"), "LLAMA_ARG_THREADS"):
        # one core stays free for the proxy: a spinning engine thread would starve it
        argv += ["-t", str(max(1, cores - 1))]
    return argv


def _phase(user: Sequence[str], env: Mapping[str, str], model: Model, defaults: Engine) -> list[str]:
    policy = model.phase_policy or defaults.phase_policy
    yield_ms = defaults.phase_yield_ms if model.phase_yield_ms is None else model.phase_yield_ms
    admit_ms = defaults.phase_admit_ms if model.phase_admit_ms is None else model.phase_admit_ms
    argv: list[str] = []
    for flag, value in (("policy", policy), ("yield-ms", str(yield_ms)), ("admit-ms", str(admit_ms))):
        variable = f"LLAMA_ARG_PHASE_{flag.upper().replace('-', '_')}"
        if not _said(user, env, (f"--phase-{flag}",), variable):
            argv += [f"--phase-{flag}", value]
    return argv
