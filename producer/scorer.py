"""One teacher at work on a dataset: its recipes, its model (loaded when first needed), the blocks it scores."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from functools import cached_property
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from logitstore.columns import TEXT_ID, Template, recipe_for
from logitstore.digests import decimal, digest_json
from logitstore.plan import Plan
from logitstore.producer.calibration import resolve_theta
from logitstore.producer.projecting import Projected, Projection
from logitstore.producer.request import ProduceConfig, TeacherRequest, execution
from logitstore.producer.scoring import Measures, ScoredBlock, score_block
from logitstore.producer.selection import Policy, ThresholdBudget
from logitstore.producer.teacher import Teacher
from logitstore.recipes import Answer, Recipe
from logitstore.signals import PROJECTED, PROJECTED_TEMPERATURES, SCALAR_STEP_NATS, stage_scalars, stage_sparse
from logitstore.store import Store
from logitstore.text_columns import TextColumns
from logitstore.text_parts import read_documents_of
from logitstore.token_parts import read_tokens, tokens_template
from logitstore.token_starts import start_masks
from logitstore.tokenizer import Tokenizer
from logitstore.vocabulary_maps import VocabularyMaps, vocabulary_maps

# On a CPU, attention costs the square of a batch: its mask of document boundaries is dense.
_BATCH_TOKENS = {"cpu": 512, "cuda": 16384}


class Scorer:
    """Answers the signal recipes of one teacher.

    Attributes:
        requested: by column id, (template, label) of its signals.
        num_forward_tokens: tokens that went through the model.
        num_scored_blocks: blocks that did.
    """

    def __init__(
        self,
        store: Store,
        plan: Plan,
        texts: TextColumns,
        request: TeacherRequest,
        config: ProduceConfig,
        projected: Mapping[str, Tokenizer] | None = None,
    ) -> None:
        """Args: ``projected`` has the tokenizer of each signal that is projected for one."""
        self._store, self._texts, self._request, self._config = store, texts, request, config
        self._device = config.resolved_device()
        self._batch_tokens = config.batch_tokens or _BATCH_TOKENS.get(self._device.split(":")[0], 4096)
        self._teacher: Teacher | None = None
        self._tokens = digest_json(tokens_template(request.tokenizer, has_chats=plan.has_chats))
        self._maps = {signal: self._stored_maps(tokenizer) for signal, tokenizer in (projected or {}).items()}
        self._policies = {
            signal: self._resolve_policy(plan, signal) for signal in config.signals if signal != "scalars"
        }
        self._templates = {signal: self._template(signal) for signal in config.signals}
        self.requested: dict[str, tuple[Template, str]] = {
            digest_json(template): (template, request.name) for template in self._templates.values()
        }
        self.num_forward_tokens = 0
        self.num_scored_blocks = 0

    def fill(self, block: str, answers: Mapping[str, Answer], progress: Callable[[int], None]) -> None:
        """Score a block and commit whichever of its signals are still missing.

        Args:
            block: its digest.
            answers: by column id, its text.
            progress: called with the number of tokens after each batch.
        """
        answers = {**answers, self._tokens: self._texts.tokens(self._tokens, block)}
        missing: dict[str, Recipe] = {}
        for signal, template in self._templates.items():
            recipe = recipe_for(template, block, answers)
            assert recipe is not None, "tokens are filled before signals"
            if self._store.answer(recipe) is None:
                missing[signal] = recipe
        if not missing:
            return
        documents = read_documents_of(self._store.part(answers[TEXT_ID].part))

        def advance(num_tokens: int) -> None:
            self.num_forward_tokens += num_tokens
            progress(num_tokens)

        tokens = read_tokens(self._store.part(answers[self._tokens].part))
        digests = [document.digest() for document in documents]
        given = self._config.given if self._policies else None
        scored = score_block(
            self.teacher,
            tokens,
            _digest_words(digests),
            self._request.windows,
            self._batch_tokens,
            self._measures,
            advance,
            given=None if given is None else given.source.block([digest.hex() for digest in digests], tokens),
        )
        self.num_scored_blocks += 1
        for signal, recipe in missing.items():
            self._commit(signal, recipe, scored)

    @property
    def teacher(self) -> Teacher:
        """The model, loaded now if it was not."""
        if self._teacher is None:
            self._teacher = Teacher.load(
                self._request.folder,
                dtype=self._config.resolved_dtype(self._device),
                device=self._device,
                allow_pickle=self._config.allow_pickle,
                trust_code=self._config.trust_remote_code,
            )
        return self._teacher

    @cached_property
    def _measures(self) -> Measures:
        config, tokenizer = self._config, self._request.tokenizer
        return Measures(
            policy=self._policies.get("sparse"),
            temperatures=config.temperatures,
            step_nats=config.logprob_step,
            tail_step_nats=config.tail_step,
            sampled_logprobs=config.sampled_logprobs,
            log_z=config.log_z,
            starts=start_masks(tokenizer.token_bytes, tokenizer.special_ids, self.teacher.vocabulary_size),
            projected={signal: Projected(self._project(signal), self._policies[signal]) for signal in self._maps},
        )

    def _project(self, signal: str) -> Projection:
        return Projection.of(self._maps[signal], self.teacher.vocabulary_size)

    def _stored_maps(self, student: Tokenizer) -> VocabularyMaps:
        maps = vocabulary_maps(self._store, student, self._request.tokenizer)
        self._store.put_asset(maps.to_asset())  # again, if they are old: a collection spares what is young
        return maps

    def _template(self, signal: str) -> dict[str, Any]:
        temperatures = PROJECTED_TEMPERATURES if signal in self._maps else self._config.temperatures
        template = {
            "kind": "signal",
            "signal": PROJECTED if signal in self._maps else signal,
            "temperatures": [decimal(temperature) for temperature in temperatures],
            **self._common_recipe(),
            **self._projection(signal),
        }
        if signal == "scalars":
            return template | {"step_nats": decimal(SCALAR_STEP_NATS), "log_z": self._config.log_z}
        policy = self._policies[signal]
        template |= {"step_nats": decimal(self._config.logprob_step), "selection": policy.to_json()}
        if self._config.tail_step is not None:
            template["tail_step_nats"] = decimal(self._config.tail_step)
        # Where nothing is sampled, the option changes nothing.
        if policy.draw_weight is not None:
            template["sampled_logprobs"] = self._config.sampled_logprobs
        return template

    def _projection(self, signal: str) -> dict[str, Any]:
        """What a recipe says of the classes that its rows are over; nothing of rows over tokens."""
        if signal not in self._maps:
            return {}
        maps = self._maps[signal]
        return {"projection": {"student": maps.student, "maps": maps.digest}}

    def _common_recipe(self) -> dict[str, Any]:
        return {
            "version": "2",
            "teacher": self._request.fingerprint,
            "tokens": self._tokens,
            "windows": self._request.windows.to_json(),
            "dtype": self._config.resolved_dtype(self._device),
            **execution(self._config, self._device, self._batch_tokens),
        }

    def _resolve_policy(self, plan: Plan, signal: str) -> Policy:
        selection = self._config.selection
        if not isinstance(selection, ThresholdBudget):
            return selection
        tokens = self._texts.tokens(self._tokens, plan.settings.calibration_block)
        recipe = {
            "kind": "theta",
            **self._common_recipe(),
            **self._projection(signal),
            "entries": decimal(selection.entries),
            "tokens_content": tokens.content,
        }
        answer = self._store.answer(recipe)
        if answer is None:
            block = read_tokens(self._store.part(tokens.part))
            theta = resolve_theta(
                self.teacher,
                block,
                self._request.windows,
                self._batch_tokens,
                selection.entries,
                self._project(signal).to(self.teacher.device).push_forward if signal in self._maps else None,
            )
            answer = self._store.commit_result(recipe, {"theta": decimal(theta)}, self._provenance())
        return selection.resolve(float(answer.result["theta"]))

    def _commit(self, signal: str, recipe: Recipe, scored: ScoredBlock) -> None:
        stats = {"num_rows": len(scored.scored), "num_scored": int(scored.scored.sum())}
        if signal == "scalars":
            part = stage_scalars(
                scored.scalars,
                scored.scored,
                self._config.temperatures,
                log_z=self._config.log_z,
                portable=self._config.portable,
            )
        else:
            rows = scored.projected.get(signal, scored.sparse)
            assert rows is not None, "a sparse signal has a selection"
            part = stage_sparse(rows, portable=self._config.portable)
            stats["num_entries"] = rows.rows.num_entries
        self._store.commit_part(recipe, part, stats, self._provenance())

    def _provenance(self) -> dict[str, str]:
        """Who made a part, for people; no recipe depends on it."""
        on_gpu = self._device.startswith("cuda")
        device = torch.cuda.get_device_name(self._device) if on_gpu else platform.machine()
        libraries = ("logitstore", "torch", "transformers", "zarr")
        return {"device": device, "attention": "sdpa", **{name: version(name) for name in libraries}}


def _digest_words(digests: list[bytes]) -> np.ndarray:
    """uint64 [D]: 64 bits of each document's digest."""
    return np.array([int.from_bytes(digest[16:24], "big") for digest in digests], np.uint64)
