"""A small complete store without any model: text, tokens of two tokenizers, their alignment, and a made-up teacher."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from builders import TEXTS, build_bytelevel_tokenizer, build_metaspace_tokenizer

from logitstore.columns import TEXT_ID, next_manifest, recipe_for
from logitstore.corpus import list_files
from logitstore.digests import digest_json
from logitstore.ingest import ingest
from logitstore.plan import PlanSettings
from logitstore.recipes import Answer
from logitstore.signals import WHOLE_NUMBERS, SparseSignal, scalar_columns, stage_scalars, stage_sparse
from logitstore.sparse import SparseRows, offsets_of, quantise
from logitstore.store import DatasetVersion, Store
from logitstore.text_columns import TextColumns
from logitstore.text_parts import text_recipe
from logitstore.token_parts import TokenBlock, read_tokens
from logitstore.tokenizer import Tokenizer

TEMPERATURES = (1.0, 2.0)
ENTRIES = 4
DATASET = "demo"


def fill_store(url: str, folder: Path, num_documents: int = 24) -> tuple[Store, DatasetVersion]:
    """A published dataset at ``url``; its corpus and tokenizers are made in ``folder``."""
    store = Store.open_or_create(url)
    corpus = folder / "corpus.jsonl"
    rows = [row_of(number) for number in range(num_documents)]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0]]))
    plan_digest = ingest(store, list_files([str(corpus)]), PlanSettings.for_corpus(0, 0.15, 1200)).plan_digest
    plan = store.plan(plan_digest)
    texts = TextColumns(store, plan)
    tokenizers = [
        Tokenizer.from_folder(build_bytelevel_tokenizer(folder / "bytelevel")),
        Tokenizer.from_folder(build_metaspace_tokenizer(folder / "metaspace")),
    ]
    teacher, student = (
        texts.add_tokens(tokenizer, label) for tokenizer, label in zip(tokenizers, ("teacher", "student"), strict=True)
    )
    texts.add_alignment(teacher, student, "teacher -> student")
    texts.fill()
    templates = [signal_template(signal, teacher) for signal in ("scalars", "sparse")]
    for block in plan.blocks:
        score(store, texts, templates, teacher, block.digest)
    requested = texts.requested | {digest_json(template): (template, "made-up") for template in templates}
    return store, store.publish(DATASET, lambda current: next_manifest(store, current, plan_digest, requested))


def row_of(number: int) -> dict[str, Any]:
    text = TEXTS[number % len(TEXTS)]
    if number % 3 == 0:
        return {"prompt": f"Item {number}: ", "completion": text}
    if number % 3 == 1:
        return {"messages": [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": text}]}
    return {"text": f"{number}. {text}"}


def signal_template(signal: str, tokens: str) -> dict[str, Any]:
    template = {"kind": "signal", "signal": signal, "version": "1", "teacher": "7e" * 32, "tokens": tokens}
    return template | ({"selection": {"policy": "topk", "k": str(ENTRIES)}} if signal == "sparse" else {})


def score(store: Store, texts: TextColumns, templates: list[dict[str, Any]], tokens: str, block: str) -> None:
    text = store.answer(text_recipe(block))
    assert text is not None
    answers: dict[str, Answer] = {TEXT_ID: text, tokens: texts.tokens(tokens, block)}
    token_block = read_tokens(store.part(answers[tokens].part))
    scored = token_block.positions() > 0
    for template in templates:
        recipe = recipe_for(template, block, answers)
        assert recipe is not None
        stats = {"num_rows": len(scored), "num_scored": int(scored.sum())}
        if template["signal"] == "scalars":
            columns = scalar_columns(TEMPERATURES)
            values = np.random.default_rng(0).normal(size=(len(scored), len(columns)))
            whole = [name in WHOLE_NUMBERS for name in columns]
            values[:, whole] = np.rint(abs(values[:, whole]) * 100)
            part = stage_scalars(values.astype(np.float32), scored, TEMPERATURES)
        else:
            rows = made_up_rows(token_block, scored)
            rest = np.full((len(scored), len(TEMPERATURES)), -2.0, np.float32)
            part = stage_sparse(SparseSignal(rows, rest, TEMPERATURES, None))
            stats["num_entries"] = rows.num_entries
        store.commit_part(recipe, part, stats, {"device": "none"})


def made_up_rows(tokens: TokenBlock, scored: np.ndarray) -> SparseRows:
    """The realised token with probability 1/2, and its neighbours in the vocabulary with less and less."""
    ids = tokens.ids[scored, None] ^ np.arange(ENTRIES)
    logprobs = np.log(0.5) * (1 + np.arange(ENTRIES))[None, :].repeat(len(ids), 0)
    offsets = offsets_of(np.where(scored, ENTRIES, 0))
    return SparseRows(
        offsets, ids.reshape(-1).astype(np.int32), quantise(logprobs).reshape(-1), np.zeros(ids.size, np.uint16)
    )
