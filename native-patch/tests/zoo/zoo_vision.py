"""A vision projector with random weights: a small fixed-size picture becomes 16 embeddings."""

from __future__ import annotations

from pathlib import Path

from zoo_archs import FILE_TYPE_F32, SMALL, Keys, Tensors, write
from zoo_weights import BIAS, normal, ones, writer_matrix, zeros

IMAGE_PIXELS, PATCH_PIXELS, CHANNELS, BLOCKS, HEADS = 56, 14, 3, 2, 4


def mmproj_llava(path: Path) -> None:
    """Write a projector (``clip`` with an ``mlp`` head) for ``llama``: 56x56, 16 tokens."""
    embd, ff = SMALL.embd, SMALL.ff
    positions = (IMAGE_PIXELS // PATCH_PIXELS) ** 2 + 1
    keys: Keys = {
        "general.name": "zoo-mmproj-llava",
        "general.type": "mmproj",
        "general.file_type": FILE_TYPE_F32,
        "clip.has_vision_encoder": True,
        "clip.projector_type": "mlp",
        "clip.vision.embedding_length": embd,
        "clip.vision.feed_forward_length": ff,
        "clip.vision.block_count": BLOCKS,
        "clip.vision.projection_dim": embd,
        "clip.vision.attention.head_count": HEADS,
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.image_size": IMAGE_PIXELS,
        "clip.vision.patch_size": PATCH_PIXELS,
        "clip.vision.image_mean": [0.5, 0.5, 0.5],
        "clip.vision.image_std": [0.5, 0.5, 0.5],
        "clip.use_gelu": True,
    }
    patch = (embd, CHANNELS, PATCH_PIXELS, PATCH_PIXELS)
    tensors: Tensors = {
        "v.patch_embd.weight": normal("llava/patch_embd", patch, 2.0 / PATCH_PIXELS),
        "v.position_embd.weight": normal("llava/position_embd", (positions, embd), 0.5),
        "v.class_embd": normal("llava/class_embd", (embd,), 1.0),
    }
    for norm in ("pre_ln", "post_ln"):
        tensors[f"v.{norm}.weight"], tensors[f"v.{norm}.bias"] = ones(embd), zeros(embd)
    for block in range(BLOCKS):
        base = f"v.blk.{block}"
        for matrix, (out, fan_in) in {
            "attn_q": (embd, embd),
            "attn_k": (embd, embd),
            "attn_v": (embd, embd),
            "attn_out": (embd, embd),
            "ffn_up": (ff, embd),
            "ffn_down": (embd, ff),
        }.items():
            seed = f"llava/{base}.{matrix}"
            tensors[f"{base}.{matrix}.weight"] = normal(seed, (out, fan_in), 1.0 / fan_in**0.5)
            tensors[f"{base}.{matrix}.bias"] = zeros(out)
        for norm in ("ln1", "ln2"):
            tensors[f"{base}.{norm}.weight"] = ones(embd)
            tensors[f"{base}.{norm}.bias"] = zeros(embd)
    tensors["mm.0.weight"] = normal("llava/mm.0", (embd, embd), 1.5 / embd**0.5)
    tensors["mm.0.bias"] = zeros(embd)
    tensors["mm.2.weight"] = writer_matrix("llava/mm.2", (embd, embd), 1.5 / embd**0.5)
    # the text model's constant channel holds in picture embeddings too
    tensors["mm.2.bias"] = zeros(embd)
    tensors["mm.2.bias"][0] = BIAS
    write(path, "clip", keys, tensors, None)
