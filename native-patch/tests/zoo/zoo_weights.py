"""Random weights that make a tiny transformer talk in varied, printable ASCII.

Channel 0 of the residual stream is a constant bias: every token embedding holds
``BIAS`` there and no matrix writes to it, so ``output[:, 0]`` is a per-token
logit bias. Unwanted tokens get a large negative one, the end token a finite
negative one, so that a grammar can still end a text.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from zoo_vocab import Vocab

Array = npt.NDArray[np.float32]

BIAS = 4.0
UNWANTED_LOGIT = -40.0
EOS_LOGIT = -12.0
EOS_LOGIT_EAGER = 1.2


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder: ``embd`` must not be smaller than ``heads * head_dim / 2``."""

    embd: int = 64
    layers: int = 2
    ff: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    context: int = 32768


def normal(seed: str, shape: tuple[int, ...], std: float) -> Array:
    """Return N(0, std) values of ``shape`` from a stream named by ``seed``.

    One stream per name: adding a tensor to a model changes no other tensor.
    """
    digest = hashlib.sha256(seed.encode()).digest()
    rng = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))
    return (rng.standard_normal(shape) * std).astype(np.float32)


def writer_matrix(seed: str, shape: tuple[int, int], std: float) -> Array:
    """Return a matrix ``[out, in]`` that writes the residual stream, but not channel 0."""
    weights = normal(seed, shape, std)
    weights[0] = 0.0
    return weights


def embedding(seed: str, vocab: Vocab, embd: int) -> Array:
    """Return token embeddings ``[vocab, embd]`` with the constant bias channel."""
    weights = normal(seed, (len(vocab), embd), 1.0)
    weights[:, 0] = BIAS
    return weights


def head(seed: str, vocab: Vocab, embd: int, *, eos_logit: float = EOS_LOGIT) -> Array:
    """Return the output matrix ``[vocab, embd]``: logit spread 4, bias in channel 0."""
    weights = normal(seed, (len(vocab), embd), 4.0 / embd**0.5)
    weights[:, 0] = [0.0 if shown else UNWANTED_LOGIT for shown in vocab.printable]
    weights[vocab.eos, 0] = eos_logit
    return weights


def ones(size: int) -> Array:
    """Return a norm weight that changes nothing."""
    return np.ones(size, dtype=np.float32)


def zeros(size: int) -> Array:
    """Return a bias that adds nothing."""
    return np.zeros(size, dtype=np.float32)


def attention(
    family: str, block: int, shape: Shape, *, scale: float = 1.0, gated: bool = False
) -> dict[str, Array]:
    """Return q, k, v, output of one block; ``gated`` doubles q (query and gate interleaved)."""
    embd, width = shape.embd, shape.heads * shape.head_dim
    kv_width = shape.kv_heads * shape.head_dim
    name = f"{family}/blk.{block}"
    return {
        f"blk.{block}.attn_q.weight": normal(
            f"{name}.attn_q", (width * (2 if gated else 1), embd), 2.0 / embd**0.5
        ),
        f"blk.{block}.attn_k.weight": normal(f"{name}.attn_k", (kv_width, embd), 2.0 / embd**0.5),
        f"blk.{block}.attn_v.weight": normal(f"{name}.attn_v", (kv_width, embd), 1.0 / embd**0.5),
        f"blk.{block}.attn_output.weight": writer_matrix(
            f"{name}.attn_output", (embd, width), scale / width**0.5
        ),
    }


def feed_forward(family: str, block: int, shape: Shape, *, scale: float = 1.0) -> dict[str, Array]:
    """Return gate, up, down of one SwiGLU block; ``scale`` multiplies its output."""
    embd, ff = shape.embd, shape.ff
    name = f"{family}/blk.{block}"
    return {
        f"blk.{block}.ffn_gate.weight": normal(f"{name}.ffn_gate", (ff, embd), 1.5 / embd**0.5),
        f"blk.{block}.ffn_up.weight": normal(f"{name}.ffn_up", (ff, embd), 1.0 / embd**0.5),
        f"blk.{block}.ffn_down.weight": writer_matrix(
            f"{name}.ffn_down", (embd, ff), scale / (0.6 * ff**0.5)
        ),
    }
