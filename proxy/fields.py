"""The kinds of values a configuration is made of, each checked where it is read: what is wrong is said in words.

Units are the fields' business (`_s`, `_ms`, `_bytes`); 0 or null means "off" for what is optional here.
"""

import ipaddress
import os
import re
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

_MAC = re.compile(r"[0-9A-Fa-f]{2}([:-])[0-9A-Fa-f]{2}(\1[0-9A-Fa-f]{2}){4}")


def _zero_is_off(value: Any) -> Any:
    return None if value == 0 else value


def _as_text(value: Any) -> Any:
    """`[-np, 4]` is what people write: a number among arguments is its text."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _expand(value: Path) -> Path:
    return Path(os.path.expandvars(str(value))).expanduser()


def model_id(value: str) -> str:
    """Return a usable model name; `ValueError` says what a name must be."""
    if not value or value != value.strip() or any(ord(c) < 0x20 for c in value):
        raise ValueError("a model name is a non-empty text without surrounding blanks or control characters")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("a model name must be valid Unicode text") from None
    return value


def _secret_text(value: SecretStr) -> SecretStr:
    text = value.get_secret_value()
    if not text or text != text.strip() or not text.isprintable():
        raise ValueError("a key is a non-empty printable text without surrounding blanks")
    return value


def _url(value: str) -> str:
    try:
        parts = urlsplit(value)
        named = bool(parts.hostname) and parts.port != 0
    except ValueError:
        parts, named = urlsplit(""), False
    if not named or parts.scheme not in {"http", "https"} or parts.query or parts.fragment:
        raise ValueError("expected http://host:port or https://host:port, optionally with a path")
    return value


def _command(value: str) -> str:
    try:
        words = shlex.split(value)
    except ValueError as error:
        raise ValueError(f"cannot be split into words: {error}") from None
    if not words:
        raise ValueError("expected a command (words as in a shell, but no shell runs it)")
    return value


def _mac(value: str) -> str:
    if _MAC.fullmatch(value) is None:
        raise ValueError("expected a MAC address such as 52:54:00:12:34:56")
    return value.replace("-", ":").lower()


def _ipv4(value: str) -> str:
    try:
        return str(ipaddress.IPv4Address(value))
    except ValueError:
        raise ValueError("expected an IPv4 address such as 192.168.1.255") from None


def _address(value: str) -> str:
    try:
        parts = urlsplit(f"//{value}")
        more = parts.path or parts.query or parts.fragment or parts.username
        if parts.hostname and parts.port and not more and "://" not in value:
            return value
    except ValueError:
        pass
    raise ValueError("expected host:port")


def _probe(value: str) -> str:
    if "://" in value:
        return _url(value)
    try:
        return _address(value)
    except ValueError:
        text = "expected host:port (a connection is the answer) or http://host:port/path (200 is)"
        raise ValueError(text) from None


Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
OptionalSeconds = Annotated[Seconds | None, AfterValidator(_zero_is_off)]
OptionalCount = Annotated[Annotated[int, Field(ge=0)] | None, AfterValidator(_zero_is_off)]
Argument = Annotated[str, BeforeValidator(_as_text)]
UserPath = Annotated[Path, AfterValidator(_expand)]
ModelId = Annotated[str, AfterValidator(model_id)]
Key = Annotated[SecretStr, AfterValidator(_secret_text)]
Url = Annotated[str, AfterValidator(_url)]
CommandLine = Annotated[str, AfterValidator(_command)]
Address = Annotated[str, AfterValidator(_address)]
Ipv4 = Annotated[str, AfterValidator(_ipv4)]
MacAddress = Annotated[str, AfterValidator(_mac)]
Probe = Annotated[str, AfterValidator(_probe)]
PriorityClass = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")]
Policy = Literal["mixed", "drain", "yield"]
