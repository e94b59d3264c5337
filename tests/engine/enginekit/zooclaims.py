"""What the zoo contract claims: a proof, or a reason why there is none, for each model and feature.

The tests are parametrized from here, and so is the table in `native-patch/README.md`: a claim
without a passing test cannot get into it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tests.engine.enginekit.models import zoo


class Feature(StrEnum):
    """A column of the table; one test proves it."""

    ALONE = "alone"
    COMPANY = "in company"
    BARRIER = "barrier"
    CHOICES = "several choices"
    REUSE = "cache reuse"
    CHECKPOINTS = "checkpoints"
    SLOTS = "slot save, restore"
    DRAFTS = "drafts"
    PICTURES = "pictures"
    PICTURE_LAST = "picture last"
    BESIDE = "beside answers"


class Proof(StrEnum):
    """What a test proved, under `drain` and under `yield`."""

    COUNTED = "equal, counts too"
    EQUAL = "equal"
    ORDER = "order"
    NO_MORE = "no more"
    MAKES_NONE = "none made"
    REFUSED = "refused"
    MIXED = "mixed"
    NONE = "–"


@dataclass(frozen=True, slots=True)
class Claim:
    """A cell: the proof, and why there is no stronger one (empty for the strongest)."""

    proof: Proof
    why: str = ""


EQUAL = Claim(Proof.EQUAL)
COUNTED = Claim(Proof.COUNTED)
INEXACT = "half precision, 8-bit blocks and GELU tables round differently in another batch"
ORDER = Claim(Proof.ORDER, INEXACT)
BY_ORDER = Claim(Proof.ORDER)
REFUSED = Claim(Proof.REFUSED)


def none(why: str) -> Claim:
    """Return a cell that is not applicable, with the reason."""
    return Claim(Proof.NONE, why)


NO_DRAFT = none("no draft")
NO_EYES = none("no projector")
SEE_TEXT = none("the row of its text model")
SAMPLES = none("this server only generates")
NO_ANSWERS = none("generates nothing")
ANSWERED = Claim(Proof.MIXED, "has no answers to protect and runs `mixed`; scores equal")
SLOW = none("the architecture of `llama`, slow on purpose")
CLOSED = Claim(Proof.EQUAL, "the engine puts a token behind each picture, no prompt ends in one")
CLOSED_BY_ORDER = Claim(Proof.ORDER, CLOSED.why)


@dataclass(frozen=True, slots=True)
class SetUp:
    """A row: a zoo model with its sidecars, and what is claimed of it.

    ``sidecars`` are pairs of flag and zoo model. ``bodies`` are taken in turn by requests that run
    together, ``insert`` is a text inside every prompt. ``exact``: tokens do not depend on the batch.
    """

    name: str
    model: str
    claims: Mapping[Feature, Claim]
    sidecars: tuple[tuple[str, str], ...] = ()
    args: tuple[str, ...] = ()
    bodies: tuple[Mapping[str, Any], ...] = field(default=({},))
    insert: str = ""
    exact: bool = True

    def flags(self) -> tuple[str, ...]:
        """Return the engine flags of sidecars and arguments; makes the files."""
        return (*self._files(), *self.args)

    def adapters(self) -> tuple[str, ...]:
        """Return the flags of the sidecars that change the answers."""
        return self._files("--lora")

    def _files(self, *only: str) -> tuple[str, ...]:
        chosen = [(flag, str(zoo(name))) for flag, name in self.sidecars if not only or flag in only]
        return tuple(part for pair in chosen for part in pair)


def text(**more: Claim) -> dict[Feature, Claim]:
    """Return the claims of a model that generates text, changed by feature name."""
    found = {
        Feature.ALONE: EQUAL,
        Feature.COMPANY: EQUAL,
        Feature.BARRIER: BY_ORDER,
        Feature.CHOICES: EQUAL,
        Feature.REUSE: EQUAL,
        Feature.CHECKPOINTS: Claim(Proof.MAKES_NONE),
        Feature.SLOTS: EQUAL,
        Feature.DRAFTS: NO_DRAFT,
        Feature.PICTURES: NO_EYES,
        Feature.PICTURE_LAST: NO_EYES,
        Feature.BESIDE: SAMPLES,
    }
    return found | {Feature[name]: claim for name, claim in more.items()}


def drafting(**more: Claim) -> dict[Feature, Claim]:
    """Return the claims of a model with a draft."""
    return text(DRAFTS=COUNTED) | {Feature[n]: c for n, c in more.items()}


def seeing(pictures: Claim, last: Claim) -> dict[Feature, Claim]:
    """Return the claims of a model with a projector; its text is proved in another row."""
    found = dict.fromkeys(Feature, SEE_TEXT)
    return found | {Feature.PICTURES: pictures, Feature.PICTURE_LAST: last}


def beside() -> dict[Feature, Claim]:
    """Return the claims of a model that also embeds or decides; its text is proved in another row."""
    return dict.fromkeys(Feature, SEE_TEXT) | {Feature.BESIDE: EQUAL}


def pooling() -> dict[Feature, Claim]:
    """Return the claims of a model that only embeds or ranks."""
    return dict.fromkeys(Feature, NO_ANSWERS) | {Feature.BESIDE: ANSWERED}


SHARED_POOL = Claim(Proof.EQUAL, "all requests share one pool of n-grams; counts equal alone")
NO_CHILDREN = none("the unpatched engine, too, answers 500 to several choices with EAGLE3")
ONE_AT_A_TIME = Claim(
    Proof.EQUAL,
    "in the unpatched engine, too, its drafts get worse when several requests draft; counts equal alone",
)
CREATES = Claim(Proof.NO_MORE)
BY_LENGTH = {"COMPANY": ORDER, "CHOICES": ORDER}


def _scales(*scales: float) -> dict[str, Any]:
    return {"lora": [{"id": number, "scale": scale} for number, scale in enumerate(scales)]}


def _spec(kind: str, most: int) -> tuple[str, ...]:
    """Return the flags of a draft: four slots' drafts must fit into a batch of 64, or the engine aborts."""
    limits = {
        "ngram-mod": ("--spec-ngram-mod-n-min", "4", "--spec-ngram-mod-n-max", str(most)),
        "ngram-map-k": ("--spec-ngram-map-k-size-m", str(most)),
        "ngram-simple": ("--spec-ngram-simple-size-m", str(most)),
    }
    return ("--spec-type", kind, *limits.get(kind, ("--spec-draft-n-max", str(most))))


ADAPTERS = (("--lora", "lora-a"), ("--lora", "lora-b"), ("--lora", "lora-c-r16"))
SCALES = (_scales(1, 0, 0), _scales(0, 1, 0), _scales(0, 0, 1), _scales(0.5, 0.25, 0), _scales(0, 0, 0))

SETUPS: tuple[SetUp, ...] = (
    SetUp("llama", "llama", text()),
    SetUp("llama-f16", "llama-f16", text(**BY_LENGTH), exact=False),
    SetUp("llama-q8_0", "llama-q8_0", text(**BY_LENGTH), exact=False),
    SetUp("llama-spm", "llama-spm", text()),
    SetUp("llama-eos", "llama-eos", text(), bodies=({"ignore_eos": False},)),
    SetUp("llama-mid", "llama-mid", text(CHOICES=SLOW, REUSE=SLOW, CHECKPOINTS=SLOW, SLOTS=SLOW)),
    SetUp("llama + lora-a, -b, -c-r16", "llama", text(), ADAPTERS, bodies=SCALES),
    SetUp(
        "llama + alora", "llama", text(), (("--lora", "alora"),), bodies=(_scales(1),), insert="<tool_call>"
    ),
    SetUp("gemma3-swa", "gemma3-swa", text(**BY_LENGTH, CHECKPOINTS=CREATES), exact=False),
    SetUp("mamba", "mamba", text(CHECKPOINTS=CREATES)),
    SetUp("qwen35", "qwen35", text(CHECKPOINTS=CREATES)),
    SetUp("step35-mtp, no drafts", "step35-mtp", text(CHECKPOINTS=CREATES)),
    SetUp("glm4moe-mtp, no drafts", "glm4moe-mtp", text()),
    SetUp("qwen2vl", "qwen2vl", text()),
    SetUp("llama + llama-draft", "llama", drafting(), (("-md", "llama-draft"),), _spec("draft-simple", 4)),
    SetUp("llama + itself", "llama", drafting(), (("-md", "llama"),), _spec("draft-simple", 4)),
    SetUp(
        "llama + llama-draft-unrelated",
        "llama",
        drafting(),
        (("-md", "llama-draft-unrelated"),),
        _spec("draft-simple", 4),
    ),
    SetUp("llama-loopy, ngram-mod", "llama-loopy", drafting(DRAFTS=SHARED_POOL), args=_spec("ngram-mod", 12)),
    SetUp("llama-loopy, ngram-map-k", "llama-loopy", drafting(), args=_spec("ngram-map-k", 12)),
    SetUp("llama-loopy, ngram-simple", "llama-loopy", drafting(), args=_spec("ngram-simple", 12)),
    SetUp("qwen35-mtp", "qwen35-mtp", drafting(CHECKPOINTS=CREATES), args=_spec("draft-mtp", 3)),
    SetUp("step35-mtp", "step35-mtp", drafting(CHECKPOINTS=CREATES), args=_spec("draft-mtp", 3)),
    SetUp("glm4moe-mtp", "glm4moe-mtp", drafting(), args=_spec("draft-mtp", 3)),
    SetUp(
        "llama-loopy + draft-eagle3",
        "llama-loopy",
        drafting(DRAFTS=ONE_AT_A_TIME, CHOICES=NO_CHILDREN),
        (("-md", "draft-eagle3"),),
        _spec("draft-eagle3", 3),
    ),
    SetUp(
        "llama-loopy + draft-dspark",
        "llama-loopy",
        drafting(),
        (("-md", "draft-dspark"),),
        _spec("draft-dspark", 3),
    ),
    SetUp("llama + mmproj-llava", "llama", seeing(EQUAL, REFUSED), (("--mmproj", "mmproj-llava"),)),
    SetUp("qwen2vl + mmproj-qwen2vl", "qwen2vl", seeing(EQUAL, CLOSED), (("--mmproj", "mmproj-qwen2vl"),)),
    SetUp("qwen35 + mmproj-qwen2vl", "qwen35", seeing(EQUAL, CLOSED), (("--mmproj", "mmproj-qwen2vl"),)),
    SetUp(
        "gemma3-swa + mmproj-gemma3",
        "gemma3-swa",
        seeing(ORDER, CLOSED_BY_ORDER),
        (("--mmproj", "mmproj-gemma3"),),
        exact=False,
    ),
    SetUp("llama, embeddings", "llama", beside(), args=("--embeddings", "--pooling", "none", "-b", "512")),
    SetUp("llama-decide", "llama-decide", beside()),
    SetUp("bert-embed", "bert-embed", pooling(), args=("--embeddings", "-b", "2048", "-ub", "2048")),
    SetUp("bert-rerank", "bert-rerank", pooling(), args=("--rerank", "-b", "2048", "-ub", "2048")),
)
