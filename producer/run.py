"""The driver: walk the plan, answer what nobody has answered, publish the version.

Any number of drivers may work on one dataset. Each starts at its own place, asks before each block what is missing, and
publishes when all is answered; who is killed loses the block it was at.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Protocol

import numpy as np
import torch
from logitstore.producer.calibration import resolve_theta
from logitstore.producer.request import ProduceConfig, TeacherRequest, execution
from logitstore.producer.scoring import ScoredBlock, score_block
from logitstore.producer.selection import Policy, Threshold, ThresholdBudget
from logitstore.producer.teacher import Teacher

from logitstore.alignment_parts import align_blocks, alignment_template, stage_alignment
from logitstore.columns import TEXT_ID, Template, find_answers, next_manifest, recipe_for
from logitstore.digests import decimal, digest_json
from logitstore.documents import Document
from logitstore.plan import Plan
from logitstore.recipes import WRITER, Answer
from logitstore.signals import stage_scalars, stage_sparse
from logitstore.sparse import STEP_NATS
from logitstore.store import DatasetVersion, Store
from logitstore.text_parts import read_documents_of, text_recipe
from logitstore.token_parts import read_tokens, stage_tokens, tokens_template
from logitstore.tokenizer import Tokenizer

_BATCH_TOKENS = {"cpu": 1024, "cuda": 16384}


class ProduceProgress(Protocol):
    """Who wants to know how far a run is."""

    def begin(self, teacher: str, num_blocks: int, num_bytes: int) -> None: ...
    def advance(self, num_tokens: int) -> None: ...
    def finish_block(self, num_bytes: int) -> None: ...


@dataclass(frozen=True)
class ProduceReport:
    """What a run did. ``num_forward_tokens`` is 0 when everything was in the store already."""

    dataset: DatasetVersion
    num_blocks: int
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
    """
    run = _Run(store, store.plan(plan_digest), config, progress)
    for request in teachers:
        run.add_tokens(request.tokenizer, request.name)
    for label, tokenizer in student_tokenizers:
        student = run.add_tokens(tokenizer, label)
        for request in teachers:
            teacher = digest_json(tokens_template(request.tokenizer))
            if teacher != student:
                run.add_alignment(teacher, student, f"{request.name} -> {label}")
    run.fill_texts()
    for request in teachers:
        run.fill_signals(request)
    version = store.publish(dataset, lambda current: next_manifest(store, current, plan_digest, run.columns))
    return ProduceReport(version, len(run.plan.blocks), run.num_scored_blocks, run.num_forward_tokens)


class _Run:
    """One walk over a plan."""

    def __init__(self, store: Store, plan: Plan, config: ProduceConfig, progress: ProduceProgress) -> None:
        self.store, self.plan, self.config, self.progress = store, plan, config, progress
        self.device = config.resolved_device()
        self.dtype = config.resolved_dtype(self.device)
        self.columns: dict[str, tuple[Template, str]] = {}
        self.tokenizers: dict[str, Tokenizer] = {}
        self.num_scored_blocks = 0
        self.num_forward_tokens = 0
        if self.device == "cpu":
            torch.set_num_threads(config.resolved_threads())
        if execution(config, self.device, 0):
            torch.use_deterministic_algorithms(True)

    def add_tokens(self, tokenizer: Tokenizer, label: str) -> str:
        """Ask for a tokens column; returns its id. The tokenizer itself is kept as an asset."""
        template = tokens_template(tokenizer)
        column = digest_json(template)
        if column not in self.columns:
            self.store.put_asset(tokenizer.asset())
            if (chat_template := tokenizer.template_asset()) is not None:
                self.store.put_asset(chat_template)
            self.columns[column] = (template, label)
            self.tokenizers[column] = tokenizer
        return column

    def add_alignment(self, teacher: str, student: str, label: str) -> None:
        template = alignment_template(teacher, student)
        self.columns[digest_json(template)] = (template, label)

    def fill_texts(self) -> None:
        """Tokens and alignments: no model is needed."""
        templates = [template for template, _ in self.columns.values()]
        for number in self._walk():
            block = self.plan.blocks[number].digest
            answers = {TEXT_ID: self._text_answer(block)}
            documents: list[Document] | None = None
            for template in templates:
                recipe = recipe_for(template, block, answers)
                assert recipe is not None, "tokens come before the alignments that build on them"
                answer = self.store.answer(recipe)
                if answer is None and template["kind"] == "tokens":
                    documents = documents or read_documents_of(self.store.part(answers[TEXT_ID].part))
                    answer = self._commit_tokens(recipe, self.tokenizers[digest_json(template)], documents)
                elif answer is None:
                    answer = self._commit_alignment(recipe, template, answers)
                answers[digest_json(template)] = answer

    def fill_signals(self, request: TeacherRequest) -> None:
        """All signals of one teacher. The model is loaded only if a block needs it."""
        batch_tokens = self.config.batch_tokens or _BATCH_TOKENS.get(self.device.split(":")[0], 4096)
        scorer = _Scorer(self, request, batch_tokens)
        for template in scorer.templates():
            self.columns[digest_json(template)] = (template, request.name)
        found = find_answers(self.store, self.plan, [template for template, _ in self.columns.values()])
        missing = [n for n, answers in enumerate(found) if any(c not in answers for c in scorer.column_ids())]
        self.progress.begin(request.name, len(missing), sum(self.plan.blocks[n].num_bytes for n in missing))
        wanted = set(missing)
        for number in self._walk():
            if number in wanted:
                scorer.fill(self.plan.blocks[number].digest, found[number])
                self.progress.finish_block(self.plan.blocks[number].num_bytes)

    def _walk(self) -> Iterator[int]:
        # Workers begin at different places, so that they meet only when little is left.
        num_blocks = len(self.plan.blocks)
        begin = int(WRITER[:8], 16) % num_blocks
        for step in range(num_blocks):
            yield (begin + step) % num_blocks

    def _text_answer(self, block: str) -> Answer:
        answer = self.store.answer(text_recipe(block))
        assert answer is not None, "ingest stores the text of every block before its plan"
        return answer

    def _commit_tokens(self, recipe: Mapping[str, Any], tokenizer: Tokenizer, documents: list[Document]) -> Answer:
        tokenized = tokenizer.tokenize(documents)
        num_tokens = sum(len(document.ids) for document in tokenized)
        stats = {
            "num_rows": num_tokens,
            "num_documents": len(documents),
            "num_exact_documents": sum(document.exact for document in tokenized),
        }
        return self.store.commit_part(recipe, stage_tokens(tokenized), stats, self.provenance())

    def _commit_alignment(self, recipe: Mapping[str, Any], template: Template, answers: Mapping[str, Answer]) -> Answer:
        teacher, student = (
            read_tokens(self.store.part(answers[template[side]].part)) for side in ("teacher_tokens", "student_tokens")
        )
        alignment = align_blocks(teacher, student)
        stats = {"num_rows": student.num_tokens, **vars(alignment.statistics)}
        return self.store.commit_part(recipe, stage_alignment(alignment), stats, self.provenance())

    def provenance(self) -> dict[str, str]:
        """Who made a part, for people; no recipe depends on it."""
        device = torch.cuda.get_device_name(self.device) if self.device.startswith("cuda") else platform.machine()
        libraries = ("logitstore", "torch", "transformers", "tokenizers", "zarr")
        return {"device": device, "attention": "sdpa", **{name: version(name) for name in libraries}}


class _Scorer:
    """One teacher at work: its recipes, its model (loaded when first needed), and the blocks it scores."""

    def __init__(self, run: _Run, request: TeacherRequest, batch_tokens: int) -> None:
        self.run, self.request, self.batch_tokens = run, request, batch_tokens
        self._teacher: Teacher | None = None
        self.tokens = digest_json(tokens_template(request.tokenizer))
        self.policy = self._resolve_policy() if "sparse" in run.config.signals else None

    def templates(self) -> list[Template]:
        return [self._template(signal) for signal in self.run.config.signals]

    def column_ids(self) -> list[str]:
        return [digest_json(template) for template in self.templates()]

    def fill(self, block: str, answers: Mapping[str, Answer]) -> None:
        """Score a block and commit whichever of its signals are still missing."""
        store = self.run.store
        recipes = {t["signal"]: recipe_for(t, block, answers) for t in self.templates()}
        missing = {signal: recipe for signal, recipe in recipes.items() if recipe and store.answer(recipe) is None}
        if not missing:
            return
        tokens = read_tokens(store.part(answers[self.tokens].part))
        documents = read_documents_of(store.part(answers[TEXT_ID].part))
        scored = score_block(
            self.teacher, tokens, _digest_words(documents), self.request.windows, self.batch_tokens, self.policy,
            self.run.config.temperatures, self._advance,
        )  # fmt: skip
        self.run.num_scored_blocks += 1
        for signal, recipe in missing.items():
            self._commit(signal, recipe, scored)

    @property
    def teacher(self) -> Teacher:
        if self._teacher is None:
            config = self.run.config
            self._teacher = Teacher.load(
                self.request.folder,
                dtype=self.run.dtype,
                device=self.run.device,
                allow_pickle=config.allow_pickle,
                trust_code=config.trust_remote_code,
            )
        return self._teacher

    def _template(self, signal: str) -> dict[str, Any]:
        common = self._common_recipe()
        temperatures = [decimal(temperature) for temperature in self.run.config.temperatures]
        template = {"kind": "signal", "version": "1", "signal": signal, **common, "temperatures": temperatures}
        if signal == "sparse":
            assert self.policy is not None
            template["selection"] = self.policy.to_json()
        return template

    def _common_recipe(self) -> dict[str, Any]:
        return {
            "teacher": self.request.fingerprint,
            "tokens": self.tokens,
            "windows": self.request.windows.to_json(),
            "dtype": self.run.dtype,
            "step_nats": decimal(STEP_NATS),
            **execution(self.run.config, self.run.device, self.batch_tokens),
        }

    def _resolve_policy(self) -> Policy:
        selection = self.run.config.selection
        if not isinstance(selection, ThresholdBudget):
            return selection
        run, calibration = self.run, self.run.plan.settings.calibration_block
        text = run._text_answer(calibration)
        tokens_recipe = recipe_for(tokens_template(self.request.tokenizer), calibration, {TEXT_ID: text})
        assert tokens_recipe is not None
        tokens = run.store.answer(tokens_recipe)
        if tokens is None:  # the calibration block has left the plan since
            tokens = run._commit_tokens(
                tokens_recipe, self.request.tokenizer, read_documents_of(run.store.part(text.part))
            )
        recipe = {
            "kind": "theta",
            "version": "1",
            **self._common_recipe(),
            "entries": decimal(selection.entries),
            "tokens_content": tokens.content,
        }
        answer = run.store.answer(recipe)
        if answer is None:
            block = read_tokens(run.store.part(tokens.part))
            theta = resolve_theta(self.teacher, block, self.request.windows, self.batch_tokens, selection.entries)
            answer = run.store.commit_result(recipe, {"theta": decimal(theta)}, run.provenance())
        return Threshold(float(answer.result["theta"]), selection.seed)

    def _commit(self, signal: str, recipe: Mapping[str, Any], scored: ScoredBlock) -> None:
        stats = {"num_rows": len(scored.scored), "num_scored": int(scored.scored.sum())}
        if signal == "scalars":
            part = stage_scalars(scored.scalars, scored.scored, self.run.config.temperatures)
        else:
            assert scored.sparse is not None
            part = stage_sparse(scored.sparse)
            stats["num_entries"] = scored.sparse.rows.num_entries
        self.run.store.commit_part(recipe, part, stats, self.run.provenance())

    def _advance(self, num_tokens: int) -> None:
        self.run.num_forward_tokens += num_tokens
        self.run.progress.advance(num_tokens)


def _digest_words(documents: list[Document]) -> np.ndarray:
    """uint64 [D]: 64 bits of each document's digest."""
    return np.array([int.from_bytes(document.digest()[16:24], "big") for document in documents], np.uint64)
