"""Models that predict several tokens ahead (MTP): hybrid, a chain of two blocks, experts; the hybrid without it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from zoo_archs import SMALL, Tensors, decoder_keys, ends, write
from zoo_vocab import bpe_vocab
from zoo_weights import Shape, attention, feed_forward, normal, ones, writer_matrix, zeros


def _next_token_block(block: int, embd: int) -> Tensors:
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
    _qwen35(path, "qwen35-mtp", heads=1, trunk_attention=0.2, early_ffn=0.1)


def qwen35(path: Path) -> None:
    """Write the hybrid without an MTP block; its attention has more of a say."""
    _qwen35(path, "qwen35", heads=0, trunk_attention=0.45, early_ffn=0.4)


def _qwen35(path: Path, name: str, *, heads: int, trunk_attention: float, early_ffn: float) -> None:
    """Write a qwen35 with ``heads`` (0 or 1) MTP blocks."""
    shape = SMALL
    vocab = bpe_vocab()
    family, embd = "qwen35", shape.embd
    state, groups, value_heads, conv = 32, 2, 2, 4
    inner = state * value_heads
    channels = 2 * state * groups + inner
    keys = decoder_keys("qwen35", f"zoo-{name}", shape, pre="qwen35", blocks=shape.layers + heads)
    keys |= {
        "qwen35.rope.dimension_sections": [6, 5, 5, 0],
        "qwen35.full_attention_interval": 2,
        "qwen35.ssm.conv_kernel": conv,
        "qwen35.ssm.inner_size": inner,
        "qwen35.ssm.state_size": state,
        "qwen35.ssm.time_step_rank": value_heads,
        "qwen35.ssm.group_count": groups,
    }
    if heads:
        keys["qwen35.nextn_predict_layers"] = heads
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
    tensors |= feed_forward(family, 0, shape, scale=early_ffn)
    for block, scale in ((1, trunk_attention), (2, 0.1))[: 1 + heads]:
        tensors[f"blk.{block}.attn_norm.weight"] = ones(embd)
        tensors[f"blk.{block}.post_attention_norm.weight"] = ones(embd)
        tensors |= attention(family, block, shape, scale=scale, gated=True)
        tensors[f"blk.{block}.attn_q_norm.weight"] = ones(shape.head_dim)
        tensors[f"blk.{block}.attn_k_norm.weight"] = ones(shape.head_dim)
    tensors |= feed_forward(family, 1, shape)
    if heads:
        tensors |= _copy_block(tensors, "ffn_", 1, 2)
        tensors |= _next_token_block(2, embd)
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
            tensors |= _next_token_block(block, embd)
    write(path, "step35", keys, tensors, vocab)


EXPERTS, EXPERTS_USED, EXPERT_FF = 4, 2, 64


def _experts(family: str, block: int, shape: Shape) -> Tensors:
    """Return a mixture of experts: a router, four small SwiGLUs, and a shared one."""
    embd, name = shape.embd, f"{family}/blk.{block}"
    base = f"blk.{block}"
    wide, narrow = (EXPERT_FF, embd), (embd, EXPERT_FF)
    grow, gate = 1.0 / embd**0.5, 1.5 / embd**0.5
    shrink = 1.0 / (0.6 * EXPERT_FF**0.5)
    down = normal(f"{name}.down_exps", (EXPERTS, *narrow), shrink)
    down[:, 0, :] = 0.0
    return {
        f"{base}.ffn_gate_inp.weight": normal(f"{name}.gate_inp", (EXPERTS, embd), 2.0 / embd**0.5),
        f"{base}.exp_probs_b.bias": normal(f"{name}.probs_b", (EXPERTS,), 0.1),
        f"{base}.ffn_gate_exps.weight": normal(f"{name}.gate_exps", (EXPERTS, *wide), gate),
        f"{base}.ffn_up_exps.weight": normal(f"{name}.up_exps", (EXPERTS, *wide), grow),
        f"{base}.ffn_down_exps.weight": down,
        f"{base}.ffn_gate_shexp.weight": normal(f"{name}.gate_shexp", wide, gate),
        f"{base}.ffn_up_shexp.weight": normal(f"{name}.up_shexp", wide, grow),
        f"{base}.ffn_down_shexp.weight": writer_matrix(f"{name}.down_shexp", narrow, shrink),
    }


def glm4moe_mtp(path: Path) -> None:
    """Write a glm4moe: a dense block, a block of experts, and one MTP block of experts."""
    shape = SMALL
    vocab = bpe_vocab()
    family, embd, blocks = "glm4moe", shape.embd, shape.layers + 1
    last = shape.layers - 1
    keys = decoder_keys("glm4moe", "zoo-glm4moe-mtp", shape, pre="qwen2", blocks=blocks)
    keys |= {
        "glm4moe.nextn_predict_layers": 1,
        "glm4moe.expert_count": EXPERTS,
        "glm4moe.expert_used_count": EXPERTS_USED,
        "glm4moe.expert_shared_count": 1,
        "glm4moe.expert_feed_forward_length": EXPERT_FF,
        "glm4moe.expert_weights_norm": True,
        "glm4moe.leading_dense_block_count": last,
    }
    tensors = ends(family, vocab, shape)
    for block in range(blocks):
        tensors[f"blk.{block}.attn_norm.weight"] = ones(embd)
        tensors[f"blk.{block}.post_attention_norm.weight"] = ones(embd)
        tensors |= attention(family, block, shape, scale=0.2 if block <= last else 0.1)
    for block in range(last):
        tensors |= feed_forward(family, block, shape, scale=0.1)
    tensors |= _experts(family, last, shape)
    for part in ("ffn_", "exp_probs_b"):
        tensors |= _copy_block(tensors, part, last, shape.layers)
    tensors |= _next_token_block(shape.layers, embd)
    write(path, "glm4moe", keys, tensors, vocab)
