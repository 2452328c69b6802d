"""Small real tokenizers as ``save_pretrained`` folders: trained on the spot, or out of the mistral-common package.

All have ``<s>`` (put before texts by their post-processor), ``</s>``, ``<|im_start|>`` and ``<|im_end|>``; the trained
ones as ids 0 to 3.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL_TOKENS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
)

TEXTS = (
    "The quick brown fox jumps over the lazy dog. Return a list of the lines in the string, breaking at line ends.\n",
    "def split(text: str, sep: str = ' ') -> list[str]:\n    return [part for part in text.split(sep) if part]\n",
    "Numbers: 0 1 2 3 10 42 100 1024 65536; naïve café, straße, Привет мир, 你好世界, こんにちは, 🎉🚀.\n",
)


def build_bytelevel_tokenizer(
    folder: str | Path,
    vocab_size: int = 400,
    texts: Sequence[str] | None = None,
    chat_template: str | None = CHATML_TEMPLATE,
) -> str:
    """Train a ByteLevel BPE (GPT-2's kind) on ``texts`` and save it in ``folder``, which is returned."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts or TEXTS, trainer)
    return _save(tokenizer, Path(folder), chat_template)


def build_metaspace_tokenizer(
    folder: str | Path,
    vocab_size: int = 600,
    texts: Sequence[str] | None = None,
    chat_template: str | None = CHATML_TEMPLATE,
) -> str:
    """Train a BPE with metaspace and byte fallback (Llama-2's kind) on ``texts`` and save it in ``folder``."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=max(vocab_size - 256 - len(SPECIAL_TOKENS), 1), show_progress=False)
    learner.train_from_iterator(texts or TEXTS, trainer)
    learnt = json.loads(learner.to_str())["model"]
    # Byte tokens are ordinary entries of the vocabulary, which no trainer makes.
    tokens = [*SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256)), *learnt["vocab"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge) for merge in learnt["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _save(tokenizer, Path(folder), chat_template)


def build_tekken_tokenizer(folder: str | Path, num_tokens: int) -> str:
    """The first ``num_tokens`` of Mistral's tekken vocabulary as a ByteLevel BPE: real merges, a real pattern."""
    tekken = json.loads((mistral_data() / "tekken_240718.json").read_text())
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in tekken["vocab"][:num_tokens]}
    spelling = bytes_to_unicode()
    vocabulary = {"".join(spelling[byte] for byte in token): rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=_merges(vocabulary), ignore_merges=True))
    pattern = pre_tokenizers.Split(Regex(tekken["config"]["pattern"]), behavior="isolated")
    bytelevel = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pattern, bytelevel])
    tokenizer.decoder = decoders.ByteLevel()
    return _save(tokenizer, Path(folder), CHATML_TEMPLATE)


def build_sentencepiece_tokenizer(folder: str | Path) -> str:
    """Mistral's 32k SentencePiece model as transformers converts it: Prepend and Replace normalisers, byte fallback."""
    from sentencepiece import SentencePieceProcessor

    model = SentencePieceProcessor(model_file=str(mistral_data() / "tokenizer.model.v1"))
    vocabulary = {model.id_to_piece(index): index for index in range(model.vocab_size())}
    # Unlike ranks, scores do not always follow the ids. Control and byte tokens come first, and are never merged.
    order = {token: -model.get_score(index) for token, index in vocabulary.items() if index >= 3 + 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=_merges(order), byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _save(tokenizer, Path(folder), CHATML_TEMPLATE)


def mistral_data() -> Path:
    """Where the installed mistral-common keeps its tokenizers."""
    import mistral_common

    return Path(mistral_common.__file__).parent / "data"


def bytes_to_unicode() -> dict[int, str]:
    """GPT-2's spelling of bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + n) for n, byte in enumerate(others)}}


def _merges(order: Mapping[str, float]) -> list[tuple[str, str]]:
    """All ways to join two tokens to a third, in the order of the third."""
    merges = []
    for token in sorted(order, key=order.__getitem__):
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in halves if pair[0] in order and pair[1] in order]
        merges += sorted(known, key=lambda pair: (order[pair[0]], order[pair[1]]))
    return merges


def _save(tokenizer: Tokenizer, folder: Path, chat_template: str | None) -> str:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
    return str(folder)
