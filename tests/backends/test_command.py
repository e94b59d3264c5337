"""The command builder: our defaults, the user's word, what may not be said."""

from pathlib import Path

import pytest

from proxy.backends.command import EngineBinary, build, check, needs_engine
from proxy.settings import ConfigError, Engine, Model

STOCK = EngineBinary(Path("/opt/llama-server"))
PATCHED = EngineBinary(Path("/opt/llama-server"), patched=True, dir=Path("/opt"))


def make(model, *, engine=STOCK, defaults=None, cores=8, inherited=None, port=0):
    return build(
        "m",
        Model.model_validate(model),
        Engine.model_validate(defaults or {}),
        engine=engine,
        port=port,
        key="secret",
        cores=cores,
        inherited=inherited or {"PATH": "/bin"},
    )


def after(argv, flag):
    return argv[argv.index(flag) + 1]


def test_defaults_of_a_path_model():
    command = make({"path": "/models/a b.gguf"})
    assert command.argv[:3] == ("/opt/llama-server", "-m", "/models/a b.gguf")
    assert after(command.argv, "--host") == "127.0.0.1" and after(command.argv, "--port") == "0"
    assert after(command.argv, "-np") == "4" and after(command.argv, "-b") == "512"
    assert after(command.argv, "-t") == "7"
    assert "--no-webui" in command.argv and "--metrics" in command.argv
    assert command.env == {"PATH": "/bin", "LLAMA_API_KEY": "secret"}
    assert not any("secret" in word for word in command.argv)
    assert not any(word.startswith(("--phase", "--sleep")) for word in command.argv)


def test_one_core_still_gets_a_thread():
    assert after(make({"path": "x"}, cores=1).argv, "-t") == "1"


@pytest.mark.parametrize(
    ("args", "ours"),
    [
        (["-np", "2"], "-np"),
        (["--parallel", "2"], "-np"),
        (["-b", "64"], "-b"),
        (["--batch-size", "64"], "-b"),
        (["--batch_size", "64"], "-b"),
        (["-t", "3"], "-t"),
        (["--threads", "3"], "-t"),
        (["--ui"], "--no-webui"),
    ],
)
def test_the_users_flag_wins_in_both_spellings(args, ours):
    """Said in the model or in the engine's defaults: ours is left out, theirs is passed on as it is."""
    for model, defaults in (({"path": "x", "args": args}, None), ({"path": "x"}, {"args": args})):
        argv = list(make(model, defaults=defaults).argv)
        assert argv[-len(args) :] == args
        assert ours not in argv[: -len(args)]


def test_the_users_environment_wins_too():
    command = make({"path": "x", "env": {"LLAMA_ARG_THREADS": "2", "CUDA_VISIBLE_DEVICES": "1"}})
    assert "-t" not in command.argv
    assert command.env["LLAMA_ARG_THREADS"] == "2" and command.env["CUDA_VISIBLE_DEVICES"] == "1"


def test_model_arguments_come_after_the_defaults():
    argv = make({"path": "x", "args": ["-c", "2"]}, defaults={"args": ["-c", "1"], "env": {"A": "1"}}).argv
    assert argv[-4:] == ("-c", "1", "-c", "2")


def test_phase_flags_only_for_a_patched_engine():
    defaults = {"phase_policy": "drain", "phase_yield_ms": 1500, "phase_admit_ms": 5}
    argv = make({"path": "x", "phase_policy": "yield"}, engine=PATCHED, defaults=defaults).argv
    assert (after(argv, "--phase-policy"), after(argv, "--phase-yield-ms")) == ("yield", "1500")
    assert after(argv, "--phase-admit-ms") == "5"
    argv = make({"path": "x", "phase_admit_ms": 0}, engine=PATCHED, defaults=defaults).argv
    assert after(argv, "--phase-admit-ms") == "0"
    argv = make({"path": "x", "args": ["--phase-policy", "mixed"]}, engine=PATCHED, defaults=defaults).argv
    assert argv.count("--phase-policy") == 1 and after(argv, "--phase-policy") == "mixed"
    assert not any(word.startswith("--phase") for word in make({"path": "x"}, defaults=defaults).argv)


@pytest.mark.parametrize(
    "flag",
    [
        *("--host", "--port", "--api-key", "--api_key", "--api-key-file", "--api-prefix", "--ssl-key-file"),
        *("-m", "--model", "-hf", "--sleep-idle-seconds", "--no-slots", "--reuse-port"),
    ],
)
def test_reserved_flags_are_refused_by_name(flag):
    with pytest.raises(
        ConfigError, match=rf"models\.m\.args: {flag.replace('_', '-')} may not be set here: .+; remove it"
    ):
        make({"path": "x", "args": [flag, "1"]})
    with pytest.raises(ConfigError, match=r"engine\.args: "):
        make({"path": "x"}, defaults={"args": [flag, "1"]})


def test_reserved_variables_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"models\.m\.env: LLAMA_ARG_PORT may not be set"):
        make({"path": "x", "env": {"LLAMA_ARG_PORT": "1"}})
    with pytest.raises(ConfigError, match=r"engine\.env: LLAMA_API_KEY may not be set"):
        make({"path": "x"}, defaults={"env": {"LLAMA_API_KEY": "1"}})


def test_what_is_not_inherited():
    """Engine arguments, our own settings (they hold keys) and port-moving variables stay behind."""
    inherited = {
        "HOME": "/h",
        "LLAMA_ARG_THREADS": "99",
        "LLAMA_API_KEY": "theirs",
        "LLAMA_PROXY_SERVER__API_KEYS": "[…]",
        "AIP_MODE": "PREDICTION",
        "LLAMA_CACHE": "/c",
    }
    env = make({"path": "x"}, inherited=inherited).env
    assert env == {"HOME": "/h", "LLAMA_CACHE": "/c", "LLAMA_API_KEY": "secret"}


def test_cmd_macros():
    """Words are split before macros are put in, so that a blank in a path stays in its word."""
    engine = EngineBinary(Path("/o pt/llama-server"))
    cmd = "sh -c '${ENGINE} --port ${PORT}' \"${MODEL} x\" $${HOME}"
    command = make({"cmd": cmd, "env": {"P": "${PORT}"}}, engine=engine, port=4711)
    assert command.argv == ("sh", "-c", "/o pt/llama-server --port 4711", "m x", "${HOME}")
    assert command.env["P"] == "4711" and command.env["LLAMA_API_KEY"] == "secret"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"cmd": "x ${PROT}"},
            r"models\.m\.cmd: \$\{PROT\} is not a macro \(known: \$\{PORT\}, \$\{MODEL\}, \$\{ENGINE\}",
        ),
        ({"cmd": "x --port 1"}, r"models\.m\.cmd: does not say \$\{PORT\}"),
        ({"cmd": "x $${PORT}"}, r"does not say \$\{PORT\}"),
        ({"cmd": "x 'y ${PORT}"}, r"models\.m\.cmd: cannot be split into words: No closing quotation"),
        ({"cmd": " "}, r"models\.m\.cmd: is empty"),
        ({"cmd": "x ${PORT}", "env": {"A": "${B}"}}, r"models\.m\.env\.A: \$\{B\} is not a macro"),
        ({"cmd": "x ${PORT}", "args": ["-c", "1"]}, r"models\.m\.args: has no meaning with cmd"),
    ],
)
def test_cmd_errors(model, message):
    with pytest.raises(ConfigError, match=message):
        check("m", Model.model_validate(model), Engine())


def test_macros_in_the_environment_of_all_engines():
    """`engine.env` is a command's, too: what it lacks is said before anything starts; a model's own variable wins."""
    model, defaults = Model(cmd="run"), Engine(env={"P": "${PORT}", "E": "${ENGINE}"})
    check("m", model, defaults)
    assert needs_engine(model, defaults)
    own = Model(cmd="run", env={"E": "none"})
    assert not needs_engine(own, defaults)
    with pytest.raises(ConfigError, match=r"^engine\.env\.E: \$\{ENGIN\} is not a macro"):
        check("m", Model(cmd="run ${PORT}"), Engine(env={"E": "${ENGIN}"}))
    check("m", Model(cmd="run ${PORT}", env={"E": ""}), Engine(env={"E": "${ENGIN}"}))
    check("m", Model(path=Path("x")), Engine(env={"E": "${ENGIN}"}))


def test_needs_engine():
    assert needs_engine(Model(path=Path("x")), Engine())
    assert needs_engine(Model(cmd="ssh h ${ENGINE} ${PORT}"), Engine())
    assert not needs_engine(Model(cmd="run ${PORT}"), Engine())
    assert not needs_engine(Model(url="http://x"), Engine(env={"E": "${ENGINE}"}))
