"""What refers to what: from dataset versions, pins and live plans to the objects that must not be lost.

Objects go by their *target*: ``parts/<digest>`` (a folder), ``plans/<digest>``, ``assets/<digest>``,
``manifests/<digest>``, ``pages/<digest>``, or the name of a recipe's record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from logitstore.columns import inputs_of, recipe_for
from logitstore.digests import digest_json
from logitstore.errors import DamageError
from logitstore.manifest import Manifest
from logitstore.plan import Plan
from logitstore.recipes import Answer, recipe_path
from logitstore.records import open_record

_DERIVATION_ORDER = ("text", "tokens", "signal", "alignment", "theta")
KNOWN_KINDS = (*_DERIVATION_ORDER, "plan", "vocabulary_maps")
"""Of recipes. Nobody here knows what leads to those of another kind, so they are kept."""

_FOLDERS = {"part": "parts", "plan": "plans", "maps": "assets"}
"""Where an answer's object is, by the field of the result that names it."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A recipe's record, reduced to what it refers to and what refers to it.

    Attributes:
        name: of the record.
        inputs: contents of the parts that the recipe builds on; of a text its block, of vocabulary maps the tokenizers.
        target: what the answer is; the record itself for an answer that is no object.
        content: digest of the part's values; empty if the answer is no part.
        assets: digests of what the recipe names.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    target: str
    content: str
    assets: tuple[str, ...]


def read_answered(data: bytes, name: str, where: str) -> Answered:
    """Reduce a recipe's record.

    Raises:
        DamageError: it does not match its digest, or stands under another recipe's name.
    """
    record = open_record(data, where)
    recipe, result = record["recipe"], record["result"]
    if f"recipes/{digest_json(recipe)}.json" != name:
        raise DamageError(f"{where}: answers another recipe than its name; run `logitstore verify --repair`")
    named = next((field for field in _FOLDERS if field in result), None)
    target = name if named is None else f"{_FOLDERS[named]}/{result[named]}"
    return Answered(name, recipe["kind"], _inputs(recipe), target, result.get("content", ""), tuple(_assets(recipe)))


def _inputs(recipe: Mapping[str, Any]) -> tuple[str, ...]:
    match recipe["kind"]:
        case "text":
            return (recipe["block"],)
        case "theta":
            return (recipe["tokens_content"],)
        case "tokens" | "signal" | "alignment":
            return tuple(recipe[field] for field in inputs_of(recipe))
        case "vocabulary_maps":
            return (recipe["student"], recipe["teacher"])
    return ()


def _assets(template: Mapping[str, Any]) -> Iterator[str]:
    if template["kind"] == "tokens":
        yield template["tokenizer"]
        if template["rendering"]["template"]:
            yield template["rendering"]["template"]
    if "projection" in template:
        yield template["projection"]["maps"]


def blocks_of(plan: Plan) -> set[str]:
    """Digests of a plan's blocks and of the one that its thresholds are settled on, which it may have no more."""
    return {block.digest for block in plan.blocks} | {plan.settings.calibration_block}


def derived(answers: Iterable[Answered], blocks: set[str]) -> set[str]:
    """Names of the records that any worker on these blocks may find: their texts, and what builds on those."""
    by_kind: dict[str, list[Answered]] = {}
    for answer in answers:
        by_kind.setdefault(answer.kind, []).append(answer)
    known, found = set(blocks), set()
    for kind in _DERIVATION_ORDER:
        for answer in by_kind.get(kind, ()):
            if all(wanted in known for wanted in answer.inputs):
                found.add(answer.name)
                known.add(answer.content)
    return found


def targets_of(digest: str, manifest: Manifest) -> Iterator[str]:
    """What a manifest refers to, itself included, but for the records of its recipes."""
    yield f"manifests/{digest}"
    yield f"plans/{manifest.plan_digest}"
    for column in manifest.columns:
        yield from (f"assets/{asset}" for asset in _assets(column.template))
        yield from (f"pages/{page}" for page in column.page_digests())
        yield from (f"parts/{part}" for part in column.part_digests())


def recipes_of(manifest: Manifest) -> Iterator[tuple[str, str, str]]:
    """Name of the record, part and content of each answer in a manifest.

    Without its record a part is scored again by the next run, and nobody can tell what it is.
    """
    for number, block in enumerate(manifest.plan.blocks):
        cells = {column.id: column.cells[number] for column in manifest.columns}
        answers = {
            column_id: Answer({"part": cell.part, "content": cell.content}, {})
            for column_id, cell in cells.items()
            if cell is not None
        }
        for column in manifest.columns:
            recipe = recipe_for(column.template, block.digest, answers)
            if recipe is not None and column.id in answers:
                yield recipe_path(recipe), answers[column.id].part, answers[column.id].content
