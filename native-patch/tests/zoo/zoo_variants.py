"""What is made of the dense llama: other number types, drafts, adapters, habits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from zoo_archs import (
    FILE_TYPE_F16,
    FILE_TYPE_Q8_0,
    SMALL,
    Keys,
    Tensors,
    decoder_keys,
    ends,
    llama_tensors,
    write,
)
from zoo_vocab import Vocab, bpe_vocab
from zoo_weights import Shape, attention, feed_forward, normal, ones, writer_matrix

TINY = Shape(embd=32, layers=1, ff=64, heads=2, kv_heads=1)

LOOPY_ATTENTION = 0.06
LOOPY_EARLY_FFN = 0.1

DECISION_TEMPLATE = (
    "{{ state }}\n{{ instructions }}\n"
    "{%- for option in options %}\n{{ option.key }}: {{ option.description }}{%- endfor %}\n"
)


def llama_f16(path: Path) -> None:
    """Write ``llama`` with its matrices in half precision."""
    _llama_stored_as(path, "f16", FILE_TYPE_F16)


def llama_q8_0(path: Path) -> None:
    """Write ``llama`` with its matrices in 8-bit blocks."""
    _llama_stored_as(path, "q8_0", FILE_TYPE_Q8_0)


def _llama_stored_as(path: Path, label: str, file_type: int) -> None:
    vocab = bpe_vocab()
    keys = decoder_keys("llama", f"zoo-llama-{label}", SMALL, pre="qwen2")
    keys["general.file_type"] = file_type
    write(path, "llama", keys, llama_tensors("llama", vocab, SMALL), vocab)


def loopy_tensors(vocab: Vocab) -> Tensors:
    """Return a llama whose next token hangs almost only on the last one.

    Its last feed-forward block decides; attention is weak. Such a model falls into loops.
    """
    tensors = ends("loopy", vocab, SMALL)
    last = SMALL.layers - 1
    for block in range(SMALL.layers):
        tensors[f"blk.{block}.attn_norm.weight"] = ones(SMALL.embd)
        tensors |= attention("loopy", block, SMALL, scale=LOOPY_ATTENTION)
        tensors[f"blk.{block}.ffn_norm.weight"] = ones(SMALL.embd)
        tensors |= feed_forward("loopy", block, SMALL, scale=1.0 if block == last else LOOPY_EARLY_FFN)
    return tensors


def llama_loopy(path: Path) -> None:
    """Write a llama that repeats itself, so that n-gram drafts hit."""
    vocab = bpe_vocab()
    keys = decoder_keys("llama", "zoo-llama-loopy", SMALL, pre="qwen2")
    write(path, "llama", keys, loopy_tensors(vocab), vocab)


def llama_decide(path: Path) -> None:
    """Write ``llama`` as a decision model: one label per option, read at the last prompt token."""
    vocab = bpe_vocab()
    keys = decoder_keys("llama", "zoo-llama-decide", SMALL, pre="qwen2")
    keys["llama.decision.type"] = "openjev"
    keys["tokenizer.chat_template.systemone"] = DECISION_TEMPLATE
    write(path, "llama", keys, llama_tensors("llama", vocab, SMALL), vocab)


def llama_draft_unrelated(path: Path) -> None:
    """Write a smaller llama with other weights: (almost) none of its drafts is accepted."""
    vocab = bpe_vocab()
    keys = decoder_keys("llama", "zoo-llama-draft-unrelated", TINY, pre="qwen2")
    write(path, "llama", keys, llama_tensors("llama-unrelated", vocab, TINY), vocab)


def llama_draft(path: Path) -> None:
    """Write ``llama`` with 4 % noise on every matrix: about half of its drafts are accepted."""
    vocab = bpe_vocab()
    keys = decoder_keys("llama", "zoo-llama-draft", SMALL, pre="qwen2")
    tensors = llama_tensors("llama", vocab, SMALL)
    for name, data in tensors.items():
        if data.ndim == 2 and name.startswith("blk."):
            std = 0.04 * float(np.std(data))
            noise = normal(f"llama-draft/{name}", data.shape, std)
            noise[np.all(data == 0.0, axis=1)] = 0.0
            tensors[name] = data + noise
    write(path, "llama", keys, tensors, vocab)


def _lora(path: Path, label: str, rank: int, invocation: tuple[int, ...] = ()) -> None:
    """Write an adapter on ``llama``; with ``invocation`` tokens it is an activated one (aLoRA)."""
    keys: Keys = {
        "general.type": "adapter",
        "general.name": f"zoo-lora-{label}",
        "adapter.type": "lora",
        "adapter.lora.alpha": float(rank),
    }
    widths = {
        "attn_q": (SMALL.embd, SMALL.heads * SMALL.head_dim),
        "attn_output": (SMALL.heads * SMALL.head_dim, SMALL.embd),
        "ffn_down": (SMALL.ff, SMALL.embd),
    }
    tensors: Tensors = {}
    for block in range(SMALL.layers):
        for matrix, (fan_in, fan_out) in widths.items():
            base = f"blk.{block}.{matrix}.weight"
            seed = f"lora-{label}/{base}"
            tensors[f"{base}.lora_a"] = normal(f"{seed}.a", (rank, fan_in), 1.0 / fan_in**0.5)
            grow = normal if matrix == "attn_q" else writer_matrix
            tensors[f"{base}.lora_b"] = grow(f"{seed}.b", (fan_out, rank), 1.0 / rank**0.5)
    write(path, "llama", keys, tensors, None, invocation)


def lora_a(path: Path) -> None:
    """Write the first of two adapters that change the output in different ways."""
    _lora(path, "a", 4)


def lora_b(path: Path) -> None:
    """Write the second adapter."""
    _lora(path, "b", 4)


def alora(path: Path) -> None:
    """Write an adapter that starts to act at ``<tool_call>`` in the prompt."""
    _lora(path, "c", 4, (bpe_vocab().tokens.index("<tool_call>"),))


def lora_c_r16(path: Path) -> None:
    """Write a third adapter, of rank 16."""
    _lora(path, "c-r16", 16)
