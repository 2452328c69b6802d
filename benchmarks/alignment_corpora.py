"""Texts that tokenizers cut in different ways, of about one size each, the same on every run.

English and Python are what every Python ships; Chinese and Arabic are the translations in Django's wheel, and names of
countries, languages and currencies in pycountry's; the others are drawn with a fixed seed. What is too short is
repeated, its lines in another order.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.resources
import random
import re
import sysconfig
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

from demo_corpus import documents

SIZE = 300_000
"""Bytes of a corpus, about."""
LONG = "1 MB documents"
DISORDER = "marks out of order"
"""Besides what was asked for: where a normaliser changes the order of characters, no order of tokens is right."""
_LONG_SIZE = 1_000_000
_PIECE = 3000
"""Characters of a document, about."""
_SENTENCES = 8
_PLACEHOLDER = re.compile(r"%\([a-z_]+\)[a-z]|%[a-z]|\{[^{}]*\}|</?[a-z][^<>]*>")
_MESSAGE = re.compile(r'^msgstr(?:\[\d\])? ((?:".*"\n)+)', re.MULTILINE)


def load_corpus(name: str, size: int = SIZE) -> list[str]:
    """The documents of a corpus, one of ``CORPORA``.

    Args:
        name: of the corpus.
        size: bytes of UTF-8 in all, about; long documents have twice as many each as other corpora at the default.
    """
    if name == LONG:
        length = _LONG_SIZE * size // SIZE
        return [_cut(_text(part, length), length) for part in ("English", "Python code", "Chinese")]
    text = _cut(_text(name, size), size)
    lines, found, held = text.splitlines(keepends=True), [], ""
    for line in lines:
        held += line
        if len(held) >= _PIECE:
            found.append(held)
            held = ""
    return [document for document in [*found, held] if document.strip()]


def _cut(text: str, size: int) -> str:
    """As much of a text as has ``size`` bytes, whole characters."""
    return text.encode()[:size].decode(errors="ignore")


def _text(name: str, size: int) -> str:
    """At least ``size`` bytes."""
    lines = list(_lines(name))
    found, order = list(lines), random.Random(name)
    total = once = sum(len(line.encode()) for line in lines)
    while total < size:
        order.shuffle(lines)
        found += lines
        total += once
    return "".join(found)


@cache
def _lines(name: str) -> tuple[str, ...]:
    return tuple(_MAKERS[name](random.Random(name)))


def _english(_: random.Random) -> Iterator[str]:
    for row in sorted(documents(), key=lambda row: _digest(row["text"])):
        yield row["text"] + "\n\n"


def _python(_: random.Random) -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"), key=lambda path: _digest(path.name)):
        yield from path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)


def _numbers(draw: random.Random) -> Iterator[str]:
    yield "id,date,amount,share,code,big\n"
    for row in range(8000):
        day = f"{draw.randint(1970, 2069)}-{draw.randint(1, 12):02}-{draw.randint(1, 28):02}"
        amount = f"{draw.randint(0, 10 ** draw.randint(1, 9)) / 100:.2f}"
        yield f"{row},{day},{amount},{draw.random():.6f},{draw.getrandbits(40):010x},{draw.getrandbits(64)}\n"


def _chinese(_: random.Random) -> Iterator[str]:
    yield from _paragraphs([*_translations("zh_Hans", "zh_Hant"), *_names("zh_CN", "zh_TW")], "")


def _arabic(_: random.Random) -> Iterator[str]:
    yield from _paragraphs([*_translations("ar", "ar_DZ"), *_names("ar")], " ")


def _emoji(draw: random.Random) -> Iterator[str]:
    """Families and professions with joiners, skin tones, flags, keycaps and variation selectors among words."""
    people, things = "👨👩🧑👧👦👶", "🚀🌈⚕️💻🎨🚒🔬❤️"
    tones = ["", *map(chr, range(0x1F3FB, 0x1F400))]
    while True:
        words = []
        for _ in range(draw.randint(3, 12)):
            match draw.randrange(6):
                case 0:
                    words.append("\u200d".join(draw.choice(people) for _ in range(draw.randint(2, 4))))
                case 1:
                    words.append(draw.choice(people) + draw.choice(tones) + "\u200d" + draw.choice(things))
                case 2:
                    words.append("".join(chr(0x1F1E6 + draw.randrange(26)) for _ in range(2)))
                case 3:
                    words.append(draw.choice("0123456789#*") + "\ufe0f\u20e3")
                case 4:
                    words.append(chr(draw.randrange(0x1F600, 0x1F650)) * draw.randint(1, 3))
                case _:
                    words.append(draw.choice(["so", "great", "ok", "thanks", "see you", "wow!", "Party", "日本"]))
        yield draw.choice([" ", "", ", "]).join(words) + "\n"
        if draw.random() < 0.001:
            return


def _combining(draw: random.Random) -> Iterator[str]:
    """Decomposed French and Vietnamese, Hindi and Thai, and letters under heaps of marks."""
    lines = (*_translations("fr", "vi", "hi", "th"), *_heaps(draw, 400))
    for line in lines:
        yield unicodedata.normalize("NFD", line)


def _disorder(draw: random.Random) -> Iterator[str]:
    """Heaps of marks in an order that normalisers change."""
    yield from _heaps(draw, 1000)


def _heaps(draw: random.Random, num_lines: int) -> Iterator[str]:
    for _ in range(num_lines):
        heaps = (
            draw.choice("abcdefgxyzABCÅøμЖ")
            + "".join(chr(draw.randrange(0x300, 0x370)) for _ in range(draw.randint(0, 8)))
            for _ in range(40)
        )
        yield "".join(heaps) + "\n"


def _whitespace(draw: random.Random) -> Iterator[str]:
    """Source code with CRLF and tabs, tables, and lines of nothing but spaces."""
    for line in _python(draw):
        yield line.rstrip("\n").replace("    ", "\t") + draw.choice(["\r\n", "\r\n", "\n", " \r\n", "\t\r\n", "\r"])
        if draw.random() < 0.05:
            yield "\t".join(str(draw.randrange(1000)) for _ in range(6)) + "\r\n" + " " * draw.randint(0, 20) + "\r\n"


def _random_bytes(draw: random.Random) -> Iterator[str]:
    """Bytes read as Latin-1, with all control characters, and as UTF-8 with its replacement character."""
    for _ in range(2000):
        data = draw.randbytes(100)
        yield data.decode("latin-1") if draw.random() < 0.5 else data.decode(errors="replace")
        yield "\n"


_MAKERS: dict[str, Callable[[random.Random], Iterable[str]]] = {
    "English": _english,
    "Python code": _python,
    "digit CSV": _numbers,
    "Chinese": _chinese,
    "Arabic": _arabic,
    "emoji with joiners": _emoji,
    "combining marks": _combining,
    "CRLF and tabs": _whitespace,
    "random bytes as text": _random_bytes,
    DISORDER: _disorder,
}
CORPORA = (*_MAKERS, LONG)


def _translations(*languages: str) -> Iterator[str]:
    """Sentences of Django's user interface, a line each, without tags and places for values."""
    root = Path(str(importlib.resources.files("django")))
    for language in languages:
        seen = set()
        for file in sorted(root.glob(f"**/locale/{language}/LC_MESSAGES/*.po")):
            for message in _MESSAGE.finditer(file.read_text(encoding="utf-8")):
                text = "".join(map(ast.literal_eval, message[1].splitlines())).strip()
                text = _PLACEHOLDER.sub("", text)
                if text and text not in seen and not text.startswith("Project-Id-Version"):
                    seen.add(text)
                    yield text + "\n"


def _paragraphs(lines: list[str], between: str) -> Iterator[str]:
    """Some lines of everywhere in one, as prose has them."""
    shuffled = sorted(lines, key=_digest)
    for begin in range(0, len(shuffled), _SENTENCES):
        yield between.join(line.rstrip("\n") for line in shuffled[begin : begin + _SENTENCES]) + "\n"


def _names(*languages: str) -> Iterator[str]:
    """Of countries, languages, scripts and currencies, several a line."""
    import gettext

    root = Path(str(importlib.resources.files("pycountry"))) / "locales"
    for language in languages:
        names = []
        for file in sorted(root.glob(f"{language}/LC_MESSAGES/*.mo")):
            with file.open("rb") as stream:
                catalogue = gettext.GNUTranslations(stream)._catalog  # type: ignore[attr-defined]
            names += [str(name) for key, name in sorted(catalogue.items(), key=str) if key and name]
        for begin in range(0, len(names), 8):
            yield (
                "、".join(names[begin : begin + 8]) + "。\n"
                if language[:2] == "zh"
                else ("، ".join(names[begin : begin + 8]) + ".\n")
            )


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
