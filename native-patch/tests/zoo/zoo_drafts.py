"""Drafts that read the target's hidden states: EAGLE3, and DFlash with a Markov head (DSpark).

Both are made for ``llama-loopy``, whose next token hangs almost only on the last one, so that
weights can be written down which guess right often, but not always. A random part reads
what the target computed: a draft whose state was disturbed guesses differently.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from zoo_archs import SMALL, Keys, Tensors, decoder_keys, write
from zoo_variants import loopy_tensors
from zoo_vocab import VOCAB_SIZE, bpe_vocab
from zoo_weights import Array, attention, feed_forward, normal, ones, writer_matrix, zeros

LAST = SMALL.layers - 1

EAGLE_FEATURES = (0, 1, 1)  # it wants three; the target has two blocks
EAGLE_GAIN = 4.0  # the token against the features
# query and key are this constant: with rotary positions a token then sees (almost) only itself
EAGLE_SELF = 7.0

DSPARK_FEATURES = (0, 1)
DSPARK_BLOCK = 4
DSPARK_CONTEXT = 0.1  # logits from the hidden states against those of the Markov head


def _fusion(name: str, layers: int, std: float) -> Array:
    """Return the matrix that merges the features of ``layers`` target layers."""
    fan_in = layers * SMALL.embd
    return writer_matrix(f"{name}/fc", (SMALL.embd, fan_in), std / fan_in**0.5)


def draft_eagle3(path: Path) -> None:
    """Write an EAGLE3 draft for ``llama-loopy``: one block over the token and three features."""
    vocab = bpe_vocab()
    shape, embd = SMALL, SMALL.embd
    target = loopy_tensors(vocab)
    keys = decoder_keys("eagle3", "zoo-draft-eagle3", shape, pre="qwen2", blocks=1)
    keys |= {"eagle3.target_layers": list(EAGLE_FEATURES), "eagle3.target_hidden_size": embd}
    value = np.zeros((shape.kv_heads * shape.head_dim, 2 * embd), dtype=np.float32)
    value[:, :embd] = np.eye(embd, dtype=np.float32)
    output = np.zeros((embd, shape.heads * shape.head_dim), dtype=np.float32)
    shared = shape.heads // shape.kv_heads
    rms = float(np.sqrt(np.mean(np.square(target["token_embd.weight"], dtype=np.float64))))
    for channel in range(embd):
        group, inside = divmod(channel, shape.head_dim)
        output[channel, group * shared * shape.head_dim + inside] = EAGLE_GAIN * rms
    tensors: Tensors = {
        "fc.weight": _fusion("eagle3", len(EAGLE_FEATURES), 0.3),
        "output_norm.weight": ones(embd),
        "blk.0.attn_norm.weight": ones(embd),
        "blk.0.attn_norm_2.weight": ones(embd),
        "blk.0.attn_q.weight": _constant(shape.heads * shape.head_dim, embd),
        "blk.0.attn_k.weight": _constant(shape.kv_heads * shape.head_dim, embd),
        "blk.0.attn_v.weight": value,
        "blk.0.attn_output.weight": output,
        "blk.0.ffn_norm.weight": ones(embd),
        "blk.0.ffn_gate.weight": target[f"blk.{LAST}.ffn_gate.weight"],
        "blk.0.ffn_up.weight": target[f"blk.{LAST}.ffn_up.weight"],
        "blk.0.ffn_down.weight": EAGLE_GAIN * target[f"blk.{LAST}.ffn_down.weight"],
    }
    write(path, "eagle3", keys, tensors, vocab)


def _constant(rows: int, embd: int) -> Array:
    """Return a matrix over (token, features) that reads only the token's constant channel."""
    matrix = np.zeros((rows, 2 * embd), dtype=np.float32)
    matrix[:, 0] = EAGLE_SELF / 4.0
    return matrix


def _markov_states(target: Tensors) -> Array:
    """Return what the target's output matrix would see after each token, without attention."""
    hidden = target["token_embd.weight"].astype(np.float64)
    for block in range(SMALL.layers):
        seen = _normed(hidden)
        gate = seen @ target[f"blk.{block}.ffn_gate.weight"].astype(np.float64).T
        up = seen @ target[f"blk.{block}.ffn_up.weight"].astype(np.float64).T
        down = target[f"blk.{block}.ffn_down.weight"].astype(np.float64).T
        hidden = hidden + (gate / (1.0 + np.exp(-gate)) * up) @ down
    return _normed(hidden).astype(np.float32)


def _normed(rows: np.ndarray) -> np.ndarray:
    return rows / np.sqrt(np.mean(np.square(rows), axis=1, keepdims=True))


def draft_dspark(path: Path) -> None:
    """Write a DFlash draft with a Markov head for ``llama-loopy``; runs as draft-dflash, too."""
    vocab = bpe_vocab()
    shape, embd = SMALL, SMALL.embd
    target = loopy_tensors(vocab)
    keys: Keys = decoder_keys("dflash", "zoo-draft-dspark", shape, pre="qwen2", blocks=1)
    keys |= {
        "dflash.target_layers": list(DSPARK_FEATURES),
        "dflash.block_size": DSPARK_BLOCK,
        "dflash.has_confidence_head": False,
        "tokenizer.ggml.mask_token_id": vocab.tokens.index("<|video_pad|>"),
    }
    tensors: Tensors = {
        "fc.weight": normal("dspark/fc", (embd, len(DSPARK_FEATURES) * embd), 0.1),
        "enc.output_norm.weight": ones(embd),
        "output_norm.weight": zeros(embd) + np.float32(DSPARK_CONTEXT),
        "blk.0.attn_norm.weight": ones(embd),
        "blk.0.attn_q_norm.weight": ones(shape.head_dim),
        "blk.0.attn_k_norm.weight": ones(shape.head_dim),
        "blk.0.ffn_norm.weight": ones(embd),
        "markov_w1.weight": _markov_states(target),
        "markov_w2.weight": target["output.weight"],
    }
    tensors |= attention("dspark", 0, shape) | feed_forward("dspark", 0, shape)
    assert tensors["markov_w1.weight"].shape == (VOCAB_SIZE, embd)
    write(path, "dflash", keys, tensors, vocab)
