"""One recipe per zoo model: its GGUF keys and its tensors.

Tensor shapes here are numpy's: ``[out, in]``, the reverse of ggml's.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from zoo_vocab import CHAT_TEMPLATE, Vocab, bpe_vocab, spm_vocab
from zoo_weights import (
    EOS_LOGIT,
    EOS_LOGIT_EAGER,
    Array,
    Shape,
    attention,
    embedding,
    feed_forward,
    head,
    normal,
    ones,
    writer_matrix,
    zeros,
)

Tensors = dict[str, Array]
Keys = dict[str, int | float | bool | str | list[int] | list[bool] | list[float] | list[str]]

SMALL = Shape()
MID = Shape(embd=256, layers=8, ff=768, heads=8, kv_heads=4)
BERT = Shape(heads=2, kv_heads=2, context=2048)
FILE_TYPE_F32, FILE_TYPE_F16, FILE_TYPE_Q8_0 = 0, 1, 7
_STORED_AS = {
    FILE_TYPE_F16: gguf.GGMLQuantizationType.F16,
    FILE_TYPE_Q8_0: gguf.GGMLQuantizationType.Q8_0,
}


def write(
    path: Path,
    arch: str,
    keys: Keys,
    tensors: Tensors,
    vocab: Vocab | None,
    invocation: tuple[int, ...] = (),
) -> None:
    """Write one GGUF file: keys in the given order, then tensors in the given order.

    ``invocation`` tokens make the file an activated adapter. Matrices are stored in the
    type that ``general.file_type`` names, vectors always as F32.
    """
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    if invocation:
        writer.add_key_value(
            "adapter.alora.invocation_tokens",
            list(invocation),
            gguf.GGUFValueType.ARRAY,
            sub_type=gguf.GGUFValueType.UINT32,
        )
    if vocab is not None:
        _add_vocab(writer, vocab)
    stored = _STORED_AS.get(int(str(keys.get("general.file_type", FILE_TYPE_F32))))
    for name, data in tensors.items():
        whole = np.ascontiguousarray(data)
        if stored is None or whole.ndim < 2:
            writer.add_tensor(name, whole)
        else:
            writer.add_tensor(name, gguf.quants.quantize(whole, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocab(writer: gguf.GGUFWriter, vocab: Vocab) -> None:
    writer.add_tokenizer_model(vocab.model)
    writer.add_token_list(list(vocab.tokens))
    writer.add_token_types(list(vocab.types))
    if vocab.scores:
        writer.add_token_scores(list(vocab.scores))
    if vocab.merges:
        writer.add_token_merges(list(vocab.merges))
    writer.add_bos_token_id(vocab.bos)
    writer.add_eos_token_id(vocab.eos)
    writer.add_pad_token_id(vocab.pad)
    if vocab.sep is not None:
        writer.add_sep_token_id(vocab.sep)


def decoder_keys(arch: str, name: str, shape: Shape, *, pre: str, blocks: int = 0) -> Keys:
    """Return the keys every decoder needs; ``blocks`` overrides the block count."""
    return {
        "general.name": name,
        "general.file_type": FILE_TYPE_F32,
        f"{arch}.context_length": shape.context,
        f"{arch}.embedding_length": shape.embd,
        f"{arch}.block_count": blocks or shape.layers,
        f"{arch}.feed_forward_length": shape.ff,
        f"{arch}.attention.head_count": shape.heads,
        f"{arch}.attention.head_count_kv": shape.kv_heads,
        f"{arch}.attention.key_length": shape.head_dim,
        f"{arch}.attention.value_length": shape.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.dimension_count": shape.head_dim,
        f"{arch}.rope.freq_base": 10000.0,
        f"{arch}.vocab_size": 512,
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def ends(family: str, vocab: Vocab, shape: Shape, *, eos_logit: float = EOS_LOGIT) -> Tensors:
    """Return embedding, final norm and output of a decoder."""
    return {
        "token_embd.weight": embedding(f"{family}/token_embd", vocab, shape.embd),
        "output_norm.weight": ones(shape.embd),
        "output.weight": head(f"{family}/output", vocab, shape.embd, eos_logit=eos_logit),
    }


def llama_tensors(family: str, vocab: Vocab, shape: Shape, *, eos_logit: float = EOS_LOGIT) -> Tensors:
    """Return all tensors of a dense llama."""
    tensors = ends(family, vocab, shape, eos_logit=eos_logit)
    for block in range(shape.layers):
        tensors[f"blk.{block}.attn_norm.weight"] = ones(shape.embd)
        tensors |= attention(family, block, shape)
        tensors[f"blk.{block}.ffn_norm.weight"] = ones(shape.embd)
        tensors |= feed_forward(family, block, shape)
    return tensors


def llama(path: Path) -> None:
    """Write the dense llama that most tests use."""
    vocab = bpe_vocab()
    keys = decoder_keys("llama", "zoo-llama", SMALL, pre="qwen2")
    write(path, "llama", keys, llama_tensors("llama", vocab, SMALL), vocab)


def llama_eos(path: Path) -> None:
    """Write a llama that ends by itself after some dozens of sampled tokens."""
    vocab = bpe_vocab()
    keys = decoder_keys("llama", "zoo-llama-eos", SMALL, pre="qwen2")
    tensors = llama_tensors("llama", vocab, SMALL, eos_logit=EOS_LOGIT_EAGER)
    write(path, "llama", keys, tensors, vocab)


def llama_spm(path: Path) -> None:
    """Write a llama with a sentencepiece vocabulary, byte tokens and an automatic BOS."""
    vocab = spm_vocab()
    keys = decoder_keys("llama", "zoo-llama-spm", SMALL, pre="default")
    keys["tokenizer.ggml.add_bos_token"] = True
    keys["tokenizer.ggml.add_space_prefix"] = False
    write(path, "llama", keys, llama_tensors("llama-spm", vocab, SMALL), vocab)


def llama_mid(path: Path) -> None:
    """Write a llama that is slow enough to be interrupted (25 MiB)."""
    vocab = bpe_vocab()
    keys = decoder_keys("llama", "zoo-llama-mid", MID, pre="qwen2")
    write(path, "llama", keys, llama_tensors("llama-mid", vocab, MID), vocab)


def _bert(path: Path, name: str, pooling: int) -> None:
    vocab = bpe_vocab()
    embd, ff = BERT.embd, BERT.ff
    keys: Keys = {
        "general.name": f"zoo-{name}",
        "general.file_type": FILE_TYPE_F32,
        "bert.context_length": BERT.context,
        "bert.embedding_length": embd,
        "bert.block_count": BERT.layers,
        "bert.feed_forward_length": ff,
        "bert.attention.head_count": BERT.heads,
        "bert.attention.layer_norm_epsilon": 1e-5,
        "bert.attention.causal": False,
        "bert.pooling_type": pooling,
        "bert.vocab_size": 512,
        "tokenizer.ggml.pre": "roberta-bpe",
        "tokenizer.ggml.token_type_count": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
        "tokenizer.ggml.add_sep_token": True,
    }
    tensors: Tensors = {
        "token_embd.weight": normal(f"{name}/token_embd", (len(vocab), embd), 1.0),
        "token_types.weight": normal(f"{name}/token_types", (2, embd), 0.1),
        "position_embd.weight": normal(f"{name}/position_embd", (BERT.context, embd), 0.3),
        "token_embd_norm.weight": ones(embd),
        "token_embd_norm.bias": zeros(embd),
    }
    for block in range(BERT.layers):
        for matrix, (out, fan_in) in {
            "attn_q": (embd, embd),
            "attn_k": (embd, embd),
            "attn_v": (embd, embd),
            "attn_output": (embd, embd),
            "ffn_up": (ff, embd),
            "ffn_down": (embd, ff),
        }.items():
            base = f"blk.{block}.{matrix}"
            tensors[f"{base}.weight"] = normal(f"{name}/{base}", (out, fan_in), 1.5 / fan_in**0.5)
            tensors[f"{base}.bias"] = normal(f"{name}/{base}.bias", (out,), 0.1)
        for norm in ("attn_output_norm", "layer_output_norm"):
            tensors[f"blk.{block}.{norm}.weight"] = ones(embd)
            tensors[f"blk.{block}.{norm}.bias"] = zeros(embd)
    if pooling == gguf.PoolingType.RANK:
        keys["bert.classifier.output_labels"] = ["relevance"]
        tensors["cls.weight"] = normal(f"{name}/cls", (embd, embd), 1.0 / embd**0.5)
        tensors["cls.bias"] = zeros(embd)
        tensors["cls.output.weight"] = normal(f"{name}/cls.output", (1, embd), 1.0)
        tensors["cls.output.bias"] = zeros(1)
    write(path, "bert", keys, tensors, vocab)


def bert_embed(path: Path) -> None:
    """Write an embedding model (mean pooling, 64 dimensions)."""
    _bert(path, "bert-embed", int(gguf.PoolingType.MEAN))


def bert_rerank(path: Path) -> None:
    """Write a reranker (one relevance score)."""
    _bert(path, "bert-rerank", int(gguf.PoolingType.RANK))


def gemma3_swa(path: Path) -> None:
    """Write a gemma3 with a sliding window of 64 on every second layer."""
    shape = Shape(layers=4)
    vocab = bpe_vocab()
    keys = decoder_keys("gemma3", "zoo-gemma3-swa", shape, pre="qwen2")
    keys["gemma3.attention.sliding_window"] = 64
    keys["gemma3.attention.sliding_window_pattern"] = 2
    tensors = llama_tensors("gemma3", vocab, shape)
    # gemma multiplies its embeddings by sqrt(embd)
    tensors["token_embd.weight"] /= np.float32(shape.embd**0.5)
    post_norm = ones(shape.embd)
    post_norm[0] = 0.0
    for block in range(shape.layers):
        for norm in ("attn_q_norm", "attn_k_norm"):
            tensors[f"blk.{block}.{norm}.weight"] = ones(shape.head_dim)
        for norm in ("post_attention_norm", "post_ffw_norm"):
            tensors[f"blk.{block}.{norm}.weight"] = post_norm.copy()
    write(path, "gemma3", keys, tensors, vocab)


def mamba(path: Path) -> None:
    """Write a pure recurrent model."""
    vocab = bpe_vocab()
    embd, inner, state, rank, conv = SMALL.embd, 2 * SMALL.embd, 16, 4, 4
    keys: Keys = {
        "general.name": "zoo-mamba",
        "general.file_type": FILE_TYPE_F32,
        "mamba.context_length": SMALL.context,
        "mamba.embedding_length": embd,
        "mamba.feed_forward_length": 0,
        "mamba.attention.head_count": 0,
        "mamba.block_count": SMALL.layers,
        "mamba.ssm.conv_kernel": conv,
        "mamba.ssm.inner_size": inner,
        "mamba.ssm.state_size": state,
        "mamba.ssm.time_step_rank": rank,
        "mamba.attention.layer_norm_rms_epsilon": 1e-5,
        "mamba.vocab_size": 512,
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    tensors = ends("mamba", vocab, SMALL)
    decay = -np.tile(np.arange(1, state + 1, dtype=np.float32), (inner, 1))
    for block in range(SMALL.layers):
        base = f"blk.{block}"
        seed = f"mamba/{base}"
        tensors |= {
            f"{base}.attn_norm.weight": ones(embd),
            f"{base}.ssm_in.weight": normal(f"{seed}.ssm_in", (2 * inner, embd), 1.5 / embd**0.5),
            f"{base}.ssm_conv1d.weight": normal(f"{seed}.ssm_conv1d", (inner, conv), 0.5),
            f"{base}.ssm_conv1d.bias": zeros(inner),
            f"{base}.ssm_x.weight": normal(f"{seed}.ssm_x", (rank + 2 * state, inner), 0.8 / inner**0.5),
            f"{base}.ssm_dt.weight": normal(f"{seed}.ssm_dt", (inner, rank), 0.5),
            f"{base}.ssm_dt.bias": zeros(inner) - 1.0,
            f"{base}.ssm_a": decay,
            f"{base}.ssm_d": ones(inner),
            f"{base}.ssm_out.weight": writer_matrix(f"{seed}.ssm_out", (embd, inner), 0.35 / inner**0.5),
        }
    write(path, "mamba", keys, tensors, vocab)
