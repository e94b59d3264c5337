"""Small pictures as requests carry them."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

from tests.engine.enginekit.server import Server

SIDE = 56


def _chunk(kind: bytes, data: bytes) -> bytes:
    body = kind + data
    return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))


def png(shade: int, width: int = SIDE, height: int = SIDE) -> bytes:
    """Return a PNG with a gradient that ``shade`` (0-255) tints."""
    rows = b"".join(b"\0" + bytes([shade, (shade * 7) % 256, row % 256]) * width for row in range(height))
    parts = (
        _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        _chunk(b"IDAT", zlib.compress(rows)),
        _chunk(b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def picture_chat(shade: int, text: str = "what", max_tokens: int = 16) -> dict[str, Any]:
    """Return a greedy chat about one picture; its answer carries the two best candidates of each token."""
    url = "data:image/png;base64," + base64.b64encode(png(shade)).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }


def media_prompt(server: Server, shade: int, after: str) -> dict[str, Any]:
    """Return a completion whose prompt has a picture, and ``after`` behind it."""
    marker = server.get("/props").ok().get("media_marker", "<__media__>")
    data = base64.b64encode(png(shade)).decode()
    prompt = {"prompt_string": f"see {marker}{after}", "multimodal_data": [data]}
    return {"prompt": prompt, "n_predict": 10, "temperature": 0, "return_tokens": True}
