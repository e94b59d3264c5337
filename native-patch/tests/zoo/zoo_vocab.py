"""Small vocabularies for the model zoo: a byte-level BPE, and a sentencepiece one.

Both are learned from a built-in text, so that they are the same on every run
and every machine, and both can spell any UTF-8 string.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

TOKEN_NORMAL, TOKEN_UNKNOWN, TOKEN_CONTROL, TOKEN_USER_DEFINED, TOKEN_BYTE = 1, 2, 3, 4, 6

VOCAB_SIZE = 512

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

_TEXT = """
A quiet river runs past the old mill and down to the open sea. In spring the children
walk along its bank, count the boats, and ask where each of them goes. The miller knows
every boat by name. He says that one carries salt, one carries wood, and one carries
letters from people who live far away. When the rain comes they all hide under the
bridge and tell stories about a red fox, a small lamp, and a girl who could speak with
the wind. Nobody believes the stories, but nobody wants them to end. In the evening the
light on the water turns from gold to grey; the birds go home, the doors close, and the
river keeps on running in the dark. Some say that if you listen you can hear it count:
one stone, two stones, three stones, and then the first again. It has time. It was here
before the mill, before the bridge, before the road, and it will be here after them.
"""

SPECIALS: tuple[tuple[str, int], ...] = (
    ("<|endoftext|>", TOKEN_CONTROL),
    ("<|im_start|>", TOKEN_CONTROL),
    ("<|im_end|>", TOKEN_CONTROL),
    ("<|bos|>", TOKEN_CONTROL),
    ("<|vision_start|>", TOKEN_CONTROL),
    ("<|vision_end|>", TOKEN_CONTROL),
    ("<|image_pad|>", TOKEN_CONTROL),
    ("<|video_pad|>", TOKEN_CONTROL),
    ("<|fim_prefix|>", TOKEN_CONTROL),
    ("<|fim_suffix|>", TOKEN_CONTROL),
    ("<|fim_middle|>", TOKEN_CONTROL),
    ("<think>", TOKEN_USER_DEFINED),
    ("</think>", TOKEN_USER_DEFINED),
    ("<tool_call>", TOKEN_USER_DEFINED),
    ("</tool_call>", TOKEN_USER_DEFINED),
    ("[SEP]", TOKEN_CONTROL),
)

_SPM_SPECIALS: tuple[tuple[str, int], ...] = (
    ("<unk>", TOKEN_UNKNOWN),
    ("<s>", TOKEN_CONTROL),
    ("</s>", TOKEN_CONTROL),
    ("<|im_start|>", TOKEN_CONTROL),
    ("<|im_end|>", TOKEN_CONTROL),
    ("<|fim_prefix|>", TOKEN_CONTROL),
    ("<|fim_suffix|>", TOKEN_CONTROL),
    ("<|fim_middle|>", TOKEN_CONTROL),
)


@dataclass(frozen=True, slots=True)
class Vocab:
    """One tokenizer: its pieces, their GGUF types, and what the weights need to know of it.

    ``printable[i]`` is true when token ``i`` decodes to printable ASCII only.
    """

    model: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    scores: tuple[float, ...]
    merges: tuple[str, ...]
    printable: tuple[bool, ...]
    bos: int
    eos: int
    pad: int
    sep: int | None

    def __len__(self) -> int:
        return len(self.tokens)


def _byte_symbols() -> list[str]:
    """Return GPT-2's printable stand-in for each of the 256 byte values."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in shown}
    spare = 256
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(spare)
            spare += 1
    return [table[byte] for byte in range(256)]


def _learn_merges(words: Counter[tuple[str, ...]], limit: int) -> list[tuple[str, str]]:
    """Learn up to ``limit`` BPE merges; ties go to the pair that sorts first."""
    merges: list[tuple[str, str]] = []
    made: set[str] = set()
    while len(merges) < limit:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for left, right in zip(word, word[1:], strict=False):
                pairs[left, right] += count
        fresh = {pair: n for pair, n in pairs.items() if "".join(pair) not in made}
        if not fresh:
            break
        best = min(fresh, key=lambda pair: (-fresh[pair], pair))
        merges.append(best)
        made.add("".join(best))
        words = Counter({_apply_merge(word, best): count for word, count in words.items()})
    return merges


def _apply_merge(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    for symbol in word:
        if out and (out[-1], symbol) == pair:
            out[-1] += symbol
        else:
            out.append(symbol)
    return tuple(out)


def _is_printable(data: bytes) -> bool:
    return all(0x20 <= byte < 0x7F for byte in data)


def bpe_vocab() -> Vocab:
    """Return the byte-level BPE: 16 specials, 256 bytes, then learned merges."""
    symbols = _byte_symbols()
    back = {symbol: byte for byte, symbol in enumerate(symbols)}
    words = Counter(
        tuple(symbols[byte] for byte in word.encode())
        for word in re.findall(r" ?[A-Za-z]+|[^A-Za-z\s]", _TEXT.replace("\n", " "))
    )
    merges = _learn_merges(words, VOCAB_SIZE - len(SPECIALS) - 256)
    tokens = [text for text, _ in SPECIALS] + symbols + [a + b for a, b in merges]
    types = [kind for _, kind in SPECIALS] + [TOKEN_NORMAL] * (256 + len(merges))
    while len(tokens) < VOCAB_SIZE:
        tokens.append(f"<|unused_{len(tokens)}|>")
        types.append(TOKEN_CONTROL)
    printable = [
        kind == TOKEN_NORMAL and _is_printable(bytes(back[char] for char in text))
        for text, kind in zip(tokens, types, strict=True)
    ]
    return Vocab(
        model="gpt2",
        tokens=tuple(tokens),
        types=tuple(types),
        scores=(),
        merges=tuple(f"{a} {b}" for a, b in merges),
        printable=tuple(printable),
        bos=tokens.index("<|bos|>"),
        eos=tokens.index("<|im_end|>"),
        pad=tokens.index("<|endoftext|>"),
        sep=tokens.index("[SEP]"),
    )


def spm_vocab() -> Vocab:
    """Return the sentencepiece vocabulary: specials, byte tokens, ASCII, then words by rank."""
    space = "\u2581"
    tokens = [text for text, _ in _SPM_SPECIALS] + [f"<0x{byte:02X}>" for byte in range(256)]
    types = [kind for _, kind in _SPM_SPECIALS] + [TOKEN_BYTE] * 256
    printable = [False] * len(tokens)
    pieces = [space] + [chr(code) for code in range(0x21, 0x7F)]
    words = Counter(
        tuple(space + word.strip() if word.startswith(" ") else word)
        for word in re.findall(r" ?[A-Za-z]+", _TEXT.replace("\n", " "))
    )
    pieces += [a + b for a, b in _learn_merges(words, VOCAB_SIZE - len(tokens) - len(pieces))]
    tokens += pieces
    types += [TOKEN_NORMAL] * len(pieces)
    printable += [True] * len(pieces)
    first = len(tokens) - len(pieces)
    scores = [0.0] * first + [-float(rank) for rank in range(len(pieces))]
    return Vocab(
        model="llama",
        tokens=tuple(tokens),
        types=tuple(types),
        scores=tuple(scores),
        merges=(),
        printable=tuple(printable),
        bos=1,
        eos=tokens.index("<|im_end|>"),
        pad=0,
        sep=None,
    )
