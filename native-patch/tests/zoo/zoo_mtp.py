"""Models that predict several tokens ahead (MTP): hybrid with one block, and a chain of two."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from zoo_archs import SMALL, Tensors, decoder_keys, ends, write
from zoo_vocab import bpe_vocab
from zoo_weights import attention, feed_forward, normal, ones, writer_matrix, zeros


def _next_token_block(family: str, block: int, embd: int) -> Tensors:
    """Return the NextN tensors of an MTP head that passes the token embedding on."""
    project = np.zeros((embd, 2 * embd), dtype=np.float32)
    project[:, :embd] = 1.1 * np.eye(embd, dtype=np.float32)
    base = f"blk.{block}.nextn"
    return {
        f"{base}.eh_proj.weight": project,
        f"{base}.enorm.weight": ones(embd),
        f"{base}.hnorm.weight": ones(embd),
        f"{base}.shared_head_norm.weight": ones(embd),
    }


def _copy_block(tensors: Tensors, part: str, source: int, target: int) -> Tensors:
    """Return the tensors of ``part`` in block ``source`` under the names of block ``target``."""
    prefix = f"blk.{source}.{part}"
    return {
        name.replace(f"blk.{source}.", f"blk.{target}.", 1): data.copy()
        for name, data in tensors.items()
        if name.startswith(prefix)
    }


def qwen35_mtp(path: Path) -> None:
    """Write a hybrid (gated delta net, then gated attention) with one MTP block."""
    shape = SMALL
    vocab = bpe_vocab()
    family, embd = "qwen35", shape.embd
    state, groups, value_heads, conv = 32, 2, 2, 4
    inner = state * value_heads
    channels = 2 * state * groups + inner
    keys = decoder_keys("qwen35", "zoo-qwen35-mtp", shape, pre="qwen35", blocks=shape.layers + 1)
    keys |= {
        "qwen35.rope.dimension_sections": [6, 5, 5, 0],
        "qwen35.full_attention_interval": 2,
        "qwen35.nextn_predict_layers": 1,
        "qwen35.ssm.conv_kernel": conv,
        "qwen35.ssm.inner_size": inner,
        "qwen35.ssm.state_size": state,
        "qwen35.ssm.time_step_rank": value_heads,
        "qwen35.ssm.group_count": groups,
    }
    tensors = ends(family, vocab, shape)
    seed = f"{family}/blk.0"
    tensors |= {
        "blk.0.attn_norm.weight": ones(embd),
        "blk.0.post_attention_norm.weight": ones(embd),
        "blk.0.attn_qkv.weight": normal(f"{seed}.attn_qkv", (channels, embd), 1.0 / embd**0.5),
        "blk.0.attn_gate.weight": normal(f"{seed}.attn_gate", (inner, embd), 1.0 / embd**0.5),
        "blk.0.ssm_conv1d.weight": normal(f"{seed}.ssm_conv1d", (channels, conv), 0.5),
        "blk.0.ssm_dt.bias": zeros(value_heads),
        "blk.0.ssm_a": zeros(value_heads) - 0.5,
        "blk.0.ssm_beta.weight": normal(f"{seed}.ssm_beta", (value_heads, embd), 1.0 / embd**0.5),
        "blk.0.ssm_alpha.weight": normal(f"{seed}.ssm_alpha", (value_heads, embd), 1.0 / embd**0.5),
        "blk.0.ssm_norm.weight": ones(state),
        "blk.0.ssm_out.weight": writer_matrix(f"{seed}.ssm_out", (embd, inner), 0.2 / inner**0.5),
    }
    tensors |= feed_forward(family, 0, shape, scale=0.1)
    for block, scale in ((1, 0.2), (2, 0.1)):
        tensors[f"blk.{block}.attn_norm.weight"] = ones(embd)
        tensors[f"blk.{block}.post_attention_norm.weight"] = ones(embd)
        tensors |= attention(family, block, shape, scale=scale, gated=True)
        tensors[f"blk.{block}.attn_q_norm.weight"] = ones(shape.head_dim)
        tensors[f"blk.{block}.attn_k_norm.weight"] = ones(shape.head_dim)
    tensors |= feed_forward(family, 1, shape)
    tensors |= _copy_block(tensors, "ffn_", 1, 2)
    tensors |= _next_token_block(family, 2, embd)
    write(path, "qwen35", keys, tensors, vocab)


def step35_mtp(path: Path) -> None:
    """Write a dense step35 with a sliding window of 64 and a chain of two MTP blocks."""
    shape = SMALL
    vocab = bpe_vocab()
    family, embd, blocks = "step35", shape.embd, shape.layers + 2
    keys = decoder_keys("step35", "zoo-step35-mtp", shape, pre="qwen2", blocks=blocks)
    keys |= {
        "step35.nextn_predict_layers": 2,
        "step35.attention.sliding_window": 64,
        "step35.attention.sliding_window_pattern": [True, False, True, True],
        "step35.rope.freq_base_swa": 10000.0,
        "step35.expert_feed_forward_length": shape.ff,
        "step35.leading_dense_block_count": blocks,
    }
    tensors = ends(family, vocab, shape)
    for block in range(blocks):
        trunk = block < shape.layers
        tensors[f"blk.{block}.attn_norm.weight"] = ones(embd)
        tensors |= attention(family, block, shape, scale=0.4 if trunk else 0.1)
        tensors[f"blk.{block}.attn_q_norm.weight"] = ones(shape.head_dim)
        tensors[f"blk.{block}.attn_k_norm.weight"] = ones(shape.head_dim)
        tensors[f"blk.{block}.ffn_norm.weight"] = ones(embd)
        if trunk:
            last = block == shape.layers - 1
            tensors |= feed_forward(family, block, shape, scale=1.0 if last else 0.1)
        else:
            tensors |= _copy_block(tensors, "ffn_gate", shape.layers - 1, block)
            tensors |= _copy_block(tensors, "ffn_up", shape.layers - 1, block)
            tensors |= _copy_block(tensors, "ffn_down", shape.layers - 1, block)
            tensors |= _next_token_block(family, block, embd)
    write(path, "step35", keys, tensors, vocab)
