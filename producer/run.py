"""The driver: walk the plan, answer what nobody has answered, publish the version.

Any number of drivers may work on one dataset. Each starts at its own place, asks before each block what is missing, and
publishes when all is answered; who is killed loses the block it was at. What needs no model is done beside the scoring.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from logitstore import freeing
from logitstore.columns import Answers, Template, find_answers, next_manifest
from logitstore.errors import ConfigError
from logitstore.heartbeats import alive
from logitstore.manifest import Manifest
from logitstore.plan import Plan
from logitstore.producer.beside import FillingBeside
from logitstore.producer.packing import Windows
from logitstore.producer.request import ProduceConfig, TeacherRequest, execution, projected_tokenizers
from logitstore.producer.scorer import Scorer
from logitstore.store import DatasetVersion, Store
from logitstore.text_columns import TextColumns, walk
from logitstore.tokenizer import Tokenizer


class ProduceProgress(Protocol):
    """Who wants to know how far a run is."""

    def begin(self, teacher: str, num_blocks: int, num_bytes: int) -> None: ...
    def advance(self, num_tokens: int) -> None: ...
    def finish_block(self, num_bytes: int) -> None: ...


@dataclass(frozen=True)
class ProduceReport:
    """What a run did. ``num_forward_tokens`` is 0 when everything was in the store already."""

    dataset: DatasetVersion
    num_scored_blocks: int
    num_forward_tokens: int


def produce(
    store: Store,
    dataset: str,
    plan_digest: str,
    teachers: list[TeacherRequest],
    student_tokenizers: list[tuple[str, Tokenizer]],
    config: ProduceConfig,
    progress: ProduceProgress,
    *,
    replaces_plan: bool = True,
    projections: Sequence[tuple[str, Tokenizer]] = (),
) -> ProduceReport:
    """Answer every recipe of the plan and publish the dataset's next version.

    Args:
        store: where to.
        dataset: name.
        plan_digest: of a plan in the store.
        teachers: checked requests.
        student_tokenizers: (label, tokenizer) to align with every teacher's.
        config: how teachers are run.
        progress: told of every batch and block.
        replaces_plan: whether this plan becomes the dataset's. A run that was named no corpus has none to say, and must
            not undo what another one added meanwhile: blocks that are new by then are holes until the next run.
        projections: (name, tokenizer) that ``sparse@NAME`` may name besides the students'.

    Raises:
        ConfigError: two teachers have one name, or are one model; or a tokenizer to project for is not known.
        VocabularyError: a teacher's vocabulary and one to project for have next to nothing in common.
    """
    _check_distinct(teachers)
    projected = projected_tokenizers(config.signals, [*projections, *student_tokenizers])

    def work() -> ProduceReport:
        return _produce(
            store, dataset, plan_digest, teachers, student_tokenizers, projected, config, progress, replaces_plan
        )

    with alive(store.storage, plan_digest):
        return freeing.tried_again(work)


def _produce(
    store: Store,
    dataset: str,
    plan_digest: str,
    teachers: list[TeacherRequest],
    student_tokenizers: list[tuple[str, Tokenizer]],
    projected: dict[str, Tokenizer],
    config: ProduceConfig,
    progress: ProduceProgress,
    replaces_plan: bool,
) -> ProduceReport:
    plan = store.plan(plan_digest)
    newest = store.find_dataset(dataset)
    known = newest.manifest if newest else None
    texts = TextColumns(store, plan, known)
    teacher_tokens = {request.name: texts.add_tokens(request.tokenizer, request.name) for request in teachers}
    for label, tokenizer in student_tokenizers:
        student = texts.add_tokens(tokenizer, label)
        for name, teacher in teacher_tokens.items():
            texts.add_alignment(teacher, student, f"{name} -> {label}")
    _prepare_torch(config)
    requested, num_blocks, num_tokens = dict(texts.requested), 0, 0
    missing = texts.missing()
    with FillingBeside(texts, missing, set(teacher_tokens.values())) as beside:
        for request in teachers:
            scorer = Scorer(store, plan, texts, request, config, projected)
            tokens = teacher_tokens[request.name]
            templates = _templates({tokens: texts.requested[tokens]} | scorer.requested)
            _score(plan, find_answers(store, plan, templates, known), scorer, request.name, progress, beside)
            requested |= scorer.requested
            num_blocks, num_tokens = num_blocks + scorer.num_scored_blocks, num_tokens + scorer.num_forward_tokens
            del scorer  # and its model: the next one may need the room
        _finish(plan, beside, missing, progress)

    def change(current: Manifest | None) -> Manifest:
        wanted = plan_digest if current is None or replaces_plan else current.plan_digest
        return next_manifest(store, current, wanted, requested)

    version = store.publish(dataset, change)
    return ProduceReport(version, num_blocks, num_tokens)


def _check_distinct(teachers: list[TeacherRequest]) -> None:
    """A column has one label, and a label says one teacher."""
    for number, teacher in enumerate(teachers):
        for other in teachers[:number]:
            if teacher.name == other.name:
                raise ConfigError(f"two teachers are called {teacher.name!r}: give names, as in --teacher NAME=MODEL")
            if _identity(teacher) == _identity(other):
                raise ConfigError(f"teachers {other.name!r} and {teacher.name!r} are the same model: name it once")


def _identity(teacher: TeacherRequest) -> tuple[str, str, Windows]:
    return teacher.fingerprint, teacher.tokenizer.fingerprint, teacher.windows


def _templates(requested: dict[str, tuple[Template, str]]) -> list[Template]:
    return [template for template, _ in requested.values()]


def _score(
    plan: Plan, found: Answers, scorer: Scorer, name: str, progress: ProduceProgress, beside: FillingBeside
) -> None:
    missing, num_bytes = found.lacking(scorer.requested), plan.blocks.num_bytes
    progress.begin(name, len(missing), int(num_bytes[list(missing)].sum()))
    for number in walk(plan):
        if number in missing:
            beside.check()
            scorer.fill(plan.blocks.digests[number], found[number], progress.advance)
            progress.finish_block(int(num_bytes[number]))


def _finish(plan: Plan, beside: FillingBeside, missing: set[int], progress: ProduceProgress) -> None:
    num_bytes = plan.blocks.num_bytes
    if beside.has_more:
        progress.begin("students", len(missing), int(num_bytes[list(missing)].sum()))
    beside.finish(lambda number: progress.finish_block(int(num_bytes[number])))


def _prepare_torch(config: ProduceConfig) -> None:
    device = config.resolved_device()
    if device == "cpu":
        torch.set_num_threads(config.resolved_threads())
    if execution(config, device, 0):
        # cuBLAS asks for it before its first product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
