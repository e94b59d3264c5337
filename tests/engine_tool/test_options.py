"""Options: what cmake is told, what is refused, what the environment says."""

from pathlib import Path

import pytest

from proxy.engine.amx import uses_amx, without_amx
from proxy.engine.errors import EngineToolError
from proxy.engine.options import BuildOptions, Sanitizer, options_from_environment, parse_sanitizers


def test_nothing_is_fetched_or_built_that_a_server_does_not_need() -> None:
    defs = BuildOptions().definitions()
    for name in ("TESTS", "EXAMPLES", "APP", "UI"):
        assert defs[f"LLAMA_BUILD_{name}"] == "OFF"
    assert defs["LLAMA_USE_PREBUILT_UI"] == "OFF"
    assert defs["LLAMA_OPENSSL"] == "OFF"
    assert BuildOptions().targets == ("llama-server",)
    assert BuildOptions(rpc=True).targets == ("llama-server", "ggml-rpc-server")


def test_release_uses_no_feature_of_this_machine() -> None:
    assert BuildOptions().definitions()["GGML_NATIVE"] == "ON"
    assert BuildOptions(release=True).definitions()["GGML_NATIVE"] == "OFF"


def test_sanitizers() -> None:
    some = BuildOptions(sanitize=parse_sanitizers("undefined, address"))
    assert some.sanitize == (Sanitizer.ADDRESS, Sanitizer.UNDEFINED)
    assert some.definitions()["PHASE_SANITIZE"] == "address,undefined"
    thread = BuildOptions(sanitize=(Sanitizer.THREAD,)).definitions()
    assert thread["PHASE_SANITIZE"] == "thread"
    assert "GGML_OPENMP" not in thread
    stock = BuildOptions(sanitize=(Sanitizer.THREAD,), stock=True).definitions()
    assert (stock["LLAMA_SANITIZE_THREAD"], stock["GGML_OPENMP"]) == ("ON", "OFF")
    assert "PHASE_SANITIZE" not in stock
    with pytest.raises(EngineToolError, match="memory"):
        parse_sanitizers("memory")


@pytest.mark.parametrize(
    "wrong",
    [
        {"sanitize": (Sanitizer.THREAD, Sanitizer.ADDRESS)},
        {"sanitize": (Sanitizer.ADDRESS,), "stock": True},
        {"cuda_architectures": "70"},
        {"jobs": 0},
    ],
)
def test_impossible_combinations_are_refused(wrong: dict) -> None:
    with pytest.raises(EngineToolError, match="--"):
        BuildOptions(**wrong)


def test_the_flags_line_is_one_cmake_value() -> None:
    flags = BuildOptions(cuda=True, cuda_architectures="70;80", sanitize=(Sanitizer.ADDRESS,)).flags
    assert ";" not in flags
    assert '"' not in flags
    assert flags == "GGML_NATIVE=ON GGML_CUDA=ON GGML_RPC=OFF CMAKE_CUDA_ARCHITECTURES=70,80 SANITIZE=address"


def test_environment() -> None:
    assert options_from_environment({}) == BuildOptions()
    assert options_from_environment({"CUDA": "1", "CUDA_ARCHITECTURES": "70"}) == BuildOptions(
        cuda=True, cuda_architectures="70"
    )
    assert options_from_environment({"CUDA": "0", "CUDA_ARCHITECTURES": "70"}) == BuildOptions()
    assert options_from_environment({"LLAMA_CPP_DIR": "/src/x"}).llama_cpp_dir == Path("/src/x")
    with pytest.raises(EngineToolError, match="CUDA='maybe'"):
        options_from_environment({"CUDA": "maybe"})


def test_amx_is_switched_off_by_name() -> None:
    features = ("__AMX_BF16__", "__AMX_INT8__", "__AMX_NEW__", "__AMX_TILE__", "__AVX2__")
    assert uses_amx(features)
    kept, flags = without_amx(features)
    assert kept == ("__AVX2__",)
    assert flags == "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16 -mno-amx-new"
    assert not uses_amx(kept)
