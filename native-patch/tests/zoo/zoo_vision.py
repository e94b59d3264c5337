"""Vision projectors with random weights, and the text model with multi-axis positions."""

from __future__ import annotations

from pathlib import Path

from zoo_archs import FILE_TYPE_F32, SMALL, Keys, Tensors, decoder_keys, llama_tensors, write
from zoo_vocab import bpe_vocab
from zoo_weights import BIAS, Shape, normal, ones, writer_matrix, zeros

IMAGE_PIXELS, PATCH_PIXELS, CHANNELS, BLOCKS, HEADS = 56, 14, 3, 2, 4
PATCHES = (IMAGE_PIXELS // PATCH_PIXELS) ** 2
MERGED = 4  # a 2x2 square of patches becomes one embedding
QWEN2VL = Shape(heads=2, kv_heads=1)
PATCH_SHAPE = (SMALL.embd, CHANNELS, PATCH_PIXELS, PATCH_PIXELS)


def _keys(name: str, projector: str) -> Keys:
    return {
        "general.name": f"zoo-mmproj-{name}",
        "general.type": "mmproj",
        "general.file_type": FILE_TYPE_F32,
        "clip.has_vision_encoder": True,
        "clip.projector_type": projector,
        "clip.vision.embedding_length": SMALL.embd,
        "clip.vision.feed_forward_length": SMALL.ff,
        "clip.vision.block_count": BLOCKS,
        "clip.vision.projection_dim": SMALL.embd,
        "clip.vision.attention.head_count": HEADS,
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.image_size": IMAGE_PIXELS,
        "clip.vision.patch_size": PATCH_PIXELS,
        "clip.vision.image_mean": [0.5, 0.5, 0.5],
        "clip.vision.image_std": [0.5, 0.5, 0.5],
    }


def _norm(name: str) -> Tensors:
    return {f"{name}.weight": ones(SMALL.embd), f"{name}.bias": zeros(SMALL.embd)}


def _encoder(family: str) -> Tensors:
    """Return the transformer blocks of a vision encoder."""
    embd, ff = SMALL.embd, SMALL.ff
    tensors: Tensors = {}
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
            seed = f"{family}/{base}.{matrix}"
            tensors[f"{base}.{matrix}.weight"] = normal(seed, (out, fan_in), 1.0 / fan_in**0.5)
            tensors[f"{base}.{matrix}.bias"] = zeros(out)
        for norm in ("ln1", "ln2"):
            tensors |= _norm(f"{base}.{norm}")
    return tensors


def _two_layer_head(family: str, width: int) -> Tensors:
    """Return a head that leaves the text model's constant channel constant in picture embeddings."""
    embd = SMALL.embd
    bias = zeros(embd)
    bias[0] = BIAS
    return {
        "mm.0.weight": normal(f"{family}/mm.0", (width, width), 1.5 / width**0.5),
        "mm.0.bias": zeros(width),
        "mm.2.weight": writer_matrix(f"{family}/mm.2", (embd, width), 1.5 / width**0.5),
        "mm.2.bias": bias,
    }


def mmproj_llava(path: Path) -> None:
    """Write a projector (``clip`` with an ``mlp`` head) for ``llama``: 56x56, 16 tokens."""
    embd = SMALL.embd
    keys = _keys("llava", "mlp")
    keys["clip.use_gelu"] = True
    tensors: Tensors = {
        "v.patch_embd.weight": normal("llava/patch_embd", PATCH_SHAPE, 2.0 / PATCH_PIXELS),
        "v.position_embd.weight": normal("llava/position_embd", (PATCHES + 1, embd), 0.5),
        "v.class_embd": normal("llava/class_embd", (embd,), 1.0),
    }
    tensors |= _norm("v.pre_ln") | _norm("v.post_ln") | _encoder("llava")
    tensors |= _two_layer_head("llava", embd)
    write(path, "clip", keys, tensors, None)


def mmproj_qwen2vl(path: Path) -> None:
    """Write a projector for ``qwen2vl`` and ``qwen35``: any size, one token per 28x28 pixels."""
    keys = _keys("qwen2vl", "qwen2vl_merger")
    keys |= {"clip.use_silu": False, "clip.use_gelu": False}
    tensors: Tensors = {
        "v.patch_embd.weight": normal("qwen2vl/patch_embd", PATCH_SHAPE, 2.0 / PATCH_PIXELS),
        # the second frame of the patch: a still picture is sent as two
        "v.patch_embd.weight.1": normal("qwen2vl/patch_embd.1", PATCH_SHAPE, 2.0 / PATCH_PIXELS),
    }
    tensors |= _norm("v.post_ln") | _encoder("qwen2vl")
    tensors |= _two_layer_head("qwen2vl", MERGED * SMALL.embd)
    write(path, "clip", keys, tensors, None)


def mmproj_gemma3(path: Path) -> None:
    """Write a projector for ``gemma3-swa``: 56x56, pooled to 4 tokens that see each other."""
    embd = SMALL.embd
    keys = _keys("gemma3", "gemma3")
    keys |= {"clip.use_gelu": True, "clip.vision.projector.scale_factor": 2}
    tensors: Tensors = {
        "v.patch_embd.weight": normal("gemma3/patch_embd", PATCH_SHAPE, 2.0 / PATCH_PIXELS),
        "v.patch_embd.bias": zeros(embd),
        "v.position_embd.weight": normal("gemma3/position_embd", (PATCHES, embd), 0.5),
        "mm.soft_emb_norm.weight": ones(embd),
        # stored [in, out]: the engine transposes it
        "mm.input_projection.weight": normal("gemma3/projection", (embd, embd), 1.0 / embd**0.5),
    }
    tensors |= _norm("v.post_ln") | _encoder("gemma3")
    write(path, "clip", keys, tensors, None)


def qwen2vl(path: Path) -> None:
    """Write a qwen2vl: positions with three axes, biases on q, k and v."""
    vocab = bpe_vocab()
    keys = decoder_keys("qwen2vl", "zoo-qwen2vl", QWEN2VL, pre="qwen2")
    keys["qwen2vl.rope.dimension_sections"] = [4, 6, 6, 0]
    tensors = llama_tensors("qwen2vl", vocab, QWEN2VL)
    widths = {"q": QWEN2VL.heads, "k": QWEN2VL.kv_heads, "v": QWEN2VL.kv_heads}
    for block in range(QWEN2VL.layers):
        for letter, heads in widths.items():
            name = f"blk.{block}.attn_{letter}.bias"
            tensors[name] = normal(f"qwen2vl/{name}", (heads * QWEN2VL.head_dim,), 0.1)
    write(path, "qwen2vl", keys, tensors, vocab)
