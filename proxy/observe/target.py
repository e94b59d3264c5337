"""What can be watched: a llama-server, or a model behind a llama-proxy. Pure."""

from dataclasses import dataclass
from urllib.parse import parse_qs, quote, urlsplit

DEFAULT_URL = "http://127.0.0.1:8082"
"""A llama-proxy on its default port."""


class TargetError(ValueError):
    """This is no address of a server; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Target:
    """`base` is scheme, authority and path prefix; `model` the one behind a proxy, None for an engine of its own."""

    base: str
    model: str | None = None

    @property
    def name(self) -> str:
        """How people see it."""
        bare = self.base.removeprefix("http://")
        return bare if self.model is None else f"{bare}/?model={self.model}"

    def path(self, path: str, **query: int) -> str:
        """Return the request target of one of the server's paths."""
        words = [] if self.model is None else [f"model={quote(self.model, safe='')}"]
        words += [f"{name}={value}" for name, value in query.items()]
        return path + ("?" + "&".join(words) if words else "")


def parse_target(text: str) -> Target:
    """Read `http://host:port`, `host:port` or `http://host:port/?model=NAME`. Raises `TargetError`."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise TargetError(f"{text!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise TargetError(f"{text!r} is no address of a server: expected http://host:port")
    if parts.username is not None or parts.password is not None:
        raise TargetError("an address with a password would be shown and recorded: use --api-key")
    query = parse_qs(parts.query, keep_blank_values=True)
    model = query.pop("model", [""])[-1] or None
    if query or parts.fragment:
        raise TargetError(f"{text!r}: only ?model=NAME may follow the address")
    path = parts.path.rstrip("/").removesuffix("/slots").removesuffix("/v1")
    return Target(f"{parts.scheme}://{parts.netloc}{path}", model)
