"""Signal parts: what a teacher said about each token of a tokens part.

Signal ``scalars``:

    scalars    float32 [T, S]   columns by name, see ``scalar_columns``; NaN where not scored
    scored     bool [T]

Signal ``sparse``:

    sparse     uint64 [T, K]    entries as ``logitstore.sparse`` packs them; a row without entries was not scored
    rest       float32 [T, S]   per temperature: log of the sum of p^(1/T) over all tokens outside the row

Signal ``projected``: the arrays of ``sparse``, whose ids are classes that the teacher's vocabulary shares with another
(``VocabularyMaps.classes``, then one class for all tokens that are in none), at temperature 1.

Row t speaks of token t given its document's tokens before t. Log-probs are over the whole vocabulary, in nats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from logitstore.digests import decimal
from logitstore.parts import Part
from logitstore.sparse import DEFAULT_STEP_NATS, SparseRows
from logitstore.staging import ArrayToStore, StagedPart, stage

SIGNALS = ("scalars", "sparse")
PROJECTED = "projected"
"""A signal over the classes that the teacher's vocabulary shares with a student's."""
PROJECTED_TEMPERATURES = (1.0,)
"""Masses of classes say what they are at temperature 1 only: at another a class is no power of what it was."""
START_CLASSES = ("space", "punctuation", "end")
"""What a token can start with at a boundary: ASCII whitespace; other ASCII that is no letter, digit or ``_``; or it is
a special token, without bytes, that ends a text or a turn."""
SCALAR_COLUMNS = (
    *("logprob", "rank", "argmax_id", "argmax_logprob", "entropy"),
    *(f"starts@{name}" for name in START_CLASSES),
)
"""Log-prob and rank (0: most likely; ties by id) of the realised token, likeliest token, its log-prob, entropy; log of
the sum of p over all tokens that start at a boundary, by class."""
STARTS_FLOOR_NATS = -70.0
"""Least value of a ``starts@`` column, that of an empty class too: below it, float32 probabilities underflow."""

WHOLE_NUMBERS = frozenset({"rank", "argmax_id"})
"""Scalar columns that are stored as they are; all others are nats, in steps of ``SCALAR_STEP_NATS``."""
SCALAR_STEP_NATS = DEFAULT_STEP_NATS


@dataclass(frozen=True)
class SparseSignal:
    """What a teacher said about the T tokens of a block, at S temperatures.

    Attributes:
        rows: T rows.
        rest: float32 [T, S], nats, log of the sum of p^(1/T) over all tokens outside the row; one column a temperature.
        temperatures: S temperatures, in the order of the columns.
        draw_weight: weight of one draw of a sampled entry: theta of ``threshold``, 1 / N of ``sample``; else None.
        tail_step_nats: to what log-probs of unlikely tokens were rounded, see ``coarse_quanta``; None: like all others.
        projection: digest of the vocabulary maps whose classes the ids are; None where they are tokens.
    """

    rows: SparseRows
    rest: np.ndarray
    temperatures: tuple[float, ...]
    draw_weight: float | None
    tail_step_nats: float | None = None
    projection: str | None = None


def scalar_columns(temperatures: tuple[float, ...], *, log_z: bool = False) -> list[str]:
    """Names of the columns, in their order.

    ``log_z_ratio@T`` is the log of the sum of p^(1/T) over the vocabulary, nats; ``log_z``, the last if asked for, that
    of exp(logit).
    """
    ratios = [f"log_z_ratio@{temperature:g}" for temperature in temperatures if temperature != 1.0]
    return [*SCALAR_COLUMNS, *ratios, *(["log_z"] if log_z else [])]


def stage_scalars(
    values: np.ndarray,
    scored: np.ndarray,
    temperatures: tuple[float, ...],
    *,
    log_z: bool = False,
    portable: bool = False,
) -> StagedPart:
    """A part of scalars, rounded; NaN where not scored.

    Args:
        values: float32 [T, S] in the order of ``scalar_columns``.
        scored: bool [T].
        temperatures: 1.0 first.
        log_z: whether the last column is ``log_z``.
        portable: see ``staging.stage``.
    """
    attributes: dict[str, Any] = {
        "columns": scalar_columns(temperatures, log_z=log_z),
        "unit": "nat",
        "step_nats": decimal(SCALAR_STEP_NATS),
        "error_nats": SCALAR_STEP_NATS / 2,
        "whole_numbers": sorted(WHOLE_NUMBERS),
        "starts_floor_nats": STARTS_FLOOR_NATS,
    }
    rounded = quantise_nats(values, SCALAR_STEP_NATS)
    for number, column in enumerate(attributes["columns"]):
        if column in WHOLE_NUMBERS:
            rounded[:, number] = values[:, number]
    rounded[~scored] = np.nan
    steps = tuple("1" if name in WHOLE_NUMBERS else attributes["step_nats"] for name in attributes["columns"])
    arrays = {"scalars": ArrayToStore(rounded, attributes, steps), "scored": ArrayToStore(scored)}
    return stage("signal", arrays, {"signal": "scalars"}, portable=portable)


def stage_sparse(signal: SparseSignal, *, portable: bool = False) -> StagedPart:
    """A part of sparse rows and the rounded mass outside them; for ``portable`` see ``staging.stage``."""
    step_nats = signal.rows.step_nats
    entry = (
        "bits 0-31 token id, 32-47 -log p / step_nats (65535: not stored), 48-63 draws (0: certain, weight p; n: "
        "weight n * draw_weight); all ones: fill; column 0: the realised token"
    )
    attributes: dict[str, Any] = {
        "entry": entry,
        "unit": "nat",
        "step_nats": decimal(step_nats),
        "tail_step_nats": None if signal.tail_step_nats is None else decimal(signal.tail_step_nats),
        "error_nats": step_nats / 2 if signal.tail_step_nats is None else (step_nats + signal.tail_step_nats) / 2,
        "draw_weight": None if signal.draw_weight is None else decimal(signal.draw_weight),
    }
    if signal.projection is not None:
        attributes |= {"entry": entry.replace("token id", "class"), "projection": signal.projection}
    rest_attributes = {
        "columns": [f"log_rest@{temperature:g}" for temperature in signal.temperatures],
        "temperatures": list(signal.temperatures),
        "unit": "nat",
        "step_nats": decimal(step_nats),
        "error_nats": step_nats / 2,
    }
    steps = (decimal(step_nats),) * len(signal.temperatures)
    arrays = {
        "sparse": ArrayToStore(signal.rows, attributes),
        "rest": ArrayToStore(quantise_nats(signal.rest, step_nats), rest_attributes, steps),
    }
    name = "sparse" if signal.projection is None else PROJECTED
    return stage("signal", arrays, {"signal": name}, portable=portable)


def read_sparse(part: Part) -> SparseSignal:
    """The signal that ``stage_sparse`` wrote.

    Raises:
        DamageError: see ``Part.array``.
    """
    attributes = part.attributes("sparse")
    weight, tail = attributes["draw_weight"], attributes.get("tail_step_nats")
    return SparseSignal(
        part.sparse(),
        part.array("rest"),
        tuple(part.attributes("rest")["temperatures"]),
        None if weight is None else float(weight),
        None if tail is None else float(tail),
        attributes.get("projection"),
    )


def read_scalars(part: Part) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The scalar columns by name, each float32 [T], and ``scored`` bool [T]."""
    values, columns = part.array("scalars"), part.attributes("scalars")["columns"]
    return {name: values[:, number] for number, name in enumerate(columns)}, part.array("scored")


def quantise_nats(values: np.ndarray, step_nats: float) -> np.ndarray:
    """float32, rounded to multiples of ``step_nats``: a whole number times it, in float32."""
    whole = np.rint(values / step_nats).astype(np.float32) + np.float32(0)  # there is no -0
    return whole * np.float32(step_nats)
