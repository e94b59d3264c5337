"""Local files in the place of the models that llama.cpp's server tests download.

One is the very model (`stories260K`), the others are of the zoo: same architecture or same task, random weights. A
test that asserts what only the downloaded model says fails on every engine and decides nothing.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.engine.enginekit.models import zoo

STORIES = "stories260K.gguf"
# the router finds models by the layout that downloads have on disk
COMMIT = "0" * 40


@dataclass(frozen=True, slots=True)
class StandIns:
    """Presets (llama.cpp's name -> arguments), single downloads (file name -> file), and a hub cache.

    `hub` maps repository -> {file name in it -> file}.
    """

    presets: dict[str, list[str]]
    downloads: dict[str, str]
    hub: dict[str, dict[str, Path]]

    def write_hub(self, folder: Path) -> None:
        """Lay the hub cache out below `folder`, as copies: a test deletes what it finds there."""
        for repository, files in self.hub.items():
            base = folder / f"models--{repository.replace('/', '--')}"
            snapshot = base / "snapshots" / COMMIT
            snapshot.mkdir(parents=True)
            (base / "refs").mkdir()
            (base / "refs" / "main").write_text(COMMIT)
            for name, file in files.items():
                shutil.copyfile(file, snapshot / name)


def stand_ins(stories: Path) -> StandIns:
    """Return all stand-ins; `stories` is llama.cpp's own test model."""
    llama, eye = zoo("llama"), zoo("mmproj-llava")
    bert = ["-m", str(zoo("bert-embed"))]
    return StandIns(
        presets={
            "tinyllama2": ["-m", str(stories)],
            "tinyllama_infill": ["-m", str(llama)],
            "stories15m_moe": ["-m", str(llama)],
            "bert_bge_small": bert,
            "bert_bge_small_with_fa": bert,
            "jina_reranker_tiny": ["-m", str(zoo("bert-rerank"))],
            "tinygemma3": ["-m", str(llama), "--mmproj", str(eye)],
        },
        downloads={
            "moe_shakespeare15M.gguf": str(zoo("lora-a")),
            "stories15M-q4_0.gguf": str(zoo("llama-draft")),
        },
        hub={
            "ggml-org/test-model-stories260K": {"stories260K-F32.gguf": stories},
            "ggml-org/test-model-stories260K-infill": {"stories260K-infill-F32.gguf": llama},
            "ggml-org/tinygemma3-GGUF": {"tinygemma3-Q8_0.gguf": llama, "mmproj-tinygemma3-Q8_0.gguf": eye},
        },
    )
