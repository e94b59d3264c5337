"""Write tiny random-weight GGUF models for the engine's tests.

Usage::

    python native-patch/tests/zoo/make_models.py OUT [names...]

Needs numpy and the PyPI package ``gguf``. The files are byte-identical on each
run. They give determinism, not sense: see ``README.md`` beside this file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import zoo_archs
import zoo_drafts
import zoo_mtp
import zoo_variants
import zoo_vision

Recipe = Callable[[Path], None]

MODELS: dict[str, Recipe] = {
    "llama": zoo_archs.llama,
    "llama-f16": zoo_variants.llama_f16,
    "llama-q8_0": zoo_variants.llama_q8_0,
    "llama-spm": zoo_archs.llama_spm,
    "llama-eos": zoo_archs.llama_eos,
    "llama-loopy": zoo_variants.llama_loopy,
    "llama-mid": zoo_archs.llama_mid,
    "llama-decide": zoo_variants.llama_decide,
    "llama-draft": zoo_variants.llama_draft,
    "llama-draft-unrelated": zoo_variants.llama_draft_unrelated,
    "draft-eagle3": zoo_drafts.draft_eagle3,
    "draft-dspark": zoo_drafts.draft_dspark,
    "lora-a": zoo_variants.lora_a,
    "lora-b": zoo_variants.lora_b,
    "lora-c-r16": zoo_variants.lora_c_r16,
    "alora": zoo_variants.alora,
    "bert-embed": zoo_archs.bert_embed,
    "bert-rerank": zoo_archs.bert_rerank,
    "gemma3-swa": zoo_archs.gemma3_swa,
    "mamba": zoo_archs.mamba,
    "qwen35": zoo_mtp.qwen35,
    "qwen35-mtp": zoo_mtp.qwen35_mtp,
    "step35-mtp": zoo_mtp.step35_mtp,
    "glm4moe-mtp": zoo_mtp.glm4moe_mtp,
    "qwen2vl": zoo_vision.qwen2vl,
    "mmproj-llava": zoo_vision.mmproj_llava,
    "mmproj-qwen2vl": zoo_vision.mmproj_qwen2vl,
    "mmproj-gemma3": zoo_vision.mmproj_gemma3,
}


def make(out: Path, names: Iterable[str] = ()) -> dict[str, Path]:
    """Write the named models (all when none is named) and return their paths.

    A file appears under its final name only when it is whole, so that an
    interrupted run leaves nothing that looks finished.
    Raises ``ValueError`` for an unknown name.
    """
    wanted = list(names) or list(MODELS)
    unknown = sorted(set(wanted) - set(MODELS))
    if unknown:
        msg = f"unknown model {', '.join(unknown)}; known: {', '.join(MODELS)}"
        raise ValueError(msg)
    out.mkdir(parents=True, exist_ok=True)
    paths: dict[str, Path] = {}
    for name in wanted:
        path = out / f"{name}.gguf"
        partial = out / f"{name}.gguf.part"
        MODELS[name](partial)
        partial.replace(path)
        paths[name] = path
    return paths


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description="Write tiny random-weight GGUF test models.")
    parser.add_argument("out", type=Path, help="folder to write into (made if absent)")
    parser.add_argument("names", nargs="*", help=f"any of: {', '.join(MODELS)} (default: all)")
    args = parser.parse_args(argv)
    try:
        paths = make(args.out, args.names)
    except ValueError as error:
        print(f"make_models: {error}", file=sys.stderr)
        return 2
    for name, path in paths.items():
        print(f"{name}: {path} ({path.stat().st_size} bytes)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
