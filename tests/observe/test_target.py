"""Which addresses can be watched, and what becomes of them."""

import pytest

from proxy.observe.ask import read_counters
from proxy.observe.target import Target, TargetError, parse_target

GOOD = {
    "http://127.0.0.1:8080": ("http://127.0.0.1:8080", None, "/slots?phase_since=3"),
    "127.0.0.1:8080/": ("http://127.0.0.1:8080", None, "/slots?phase_since=3"),
    "https://gpu/llama/": ("https://gpu/llama", None, "/slots?phase_since=3"),
    "http://[::1]:8080/slots": ("http://[::1]:8080", None, "/slots?phase_since=3"),
    "http://a:1/?model=qwen": ("http://a:1", "qwen", "/slots?model=qwen&phase_since=3"),
    "a:1/v1?model=org/x%20y": ("http://a:1", "org/x y", "/slots?model=org%2Fx%20y&phase_since=3"),
}
BAD = {
    "": "no address",
    "ftp://a": "no address",
    "http://": "no address",
    "http://a:0": "no address",
    "http://a:99999": "ort",
    "http://user:secret@a": "--api-key",
    "http://a/?modle=x": "only ?model=NAME",
}


@pytest.mark.parametrize("text", GOOD)
def test_good_addresses(text: str) -> None:
    base, model, slots = GOOD[text]
    target = parse_target(text)
    assert target == Target(base, model)
    assert target.path("/slots", phase_since=3) == slots
    assert parse_target(target.name.replace(" ", "%20")) == target


@pytest.mark.parametrize("text", BAD)
def test_bad_addresses_are_explained(text: str) -> None:
    with pytest.raises(TargetError) as caught:
        parse_target(text)
    assert BAD[text] in str(caught.value)
    assert "secret" not in str(caught.value)


def test_counters_of_an_engine_and_of_something_else() -> None:
    text = "# HELP x\nllamacpp:prompt_tokens_total 12\nllamacpp:tokens_predicted_total 1.2e+06\nllamacpp:prompt_tokens_seconds 3\n"
    assert read_counters(text.encode()) == (12, 1_200_000)
    assert read_counters(b"llama_proxy_requests_total 3\n") is None
    assert (
        read_counters(b'llamacpp:prompt_tokens_total{model="a"} 12\nllamacpp:tokens_predicted_total 1\n')
        is None
    )
    assert read_counters(b"llamacpp:prompt_tokens_total inf\nllamacpp:tokens_predicted_total 1\n") is None
    assert read_counters(b"\xff") is None
