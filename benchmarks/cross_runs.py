"""The runs of the study: one student for each objective and seed, each kept as a file of its own."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import Any

from commands import logitstore_json
from cross_setup import DATASET, OTHER, SAME, SEQUENCE, Study, initial_student


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What a student is trained on."""

    term: str
    """Of ``--objective``."""
    weights: str = "{}:0.9,ce:0.1"
    """Of the objective: a divergence of distributions replaces nine tenths of the text's share."""
    teacher: str | None = None
    selection: str = "threshold"
    """The stored rows that it reads."""

    @property
    def name(self) -> str:
        if self.teacher is None:
            return "text alone"
        return f"`{self.term}`, the student's tokenizer" if self.teacher == SAME else f"`{self.term}`"

    @property
    def objective(self) -> str:
        return self.weights.format(self.term)

    @property
    def slug(self) -> str:
        return "-".join(filter(None, (self.term, self.teacher, self.selection if self.teacher else "")))


TEXT = Arm(term="ce", weights="{}:1")
REFERENCE = Arm(term="kl", teacher=SAME)
CROSS = (
    Arm(term="projected_kl", teacher=OTHER),
    Arm(term="projected_kl", teacher=OTHER, selection="topk"),
    Arm(term="first_byte_kl", teacher=OTHER),
    # One number for a chunk, and no distribution, so that the text stays. (The term is multiplied by tau already.)
    Arm(term="chunk_likelihood", teacher=OTHER, weights="{}:1,ce:1"),
    Arm(term="gold", teacher=OTHER, selection="topk"),
    Arm(term="uld", teacher=OTHER, selection="topk", weights="{}:1.5,ce:1"),  # as its paper weighs them
    Arm(term="xtoken_pkl", teacher=OTHER, selection="topk"),
    Arm(term="xtoken_hkl", teacher=OTHER, selection="topk"),
)
ARMS = (TEXT, REFERENCE, *CROSS)


def is_known(arm: Arm) -> bool:
    """Whether this version of logitstore has the arm's objective."""
    from logitstore.consumer.objectives import TERMS

    return arm.term in TERMS


def run(study: Study, arm: Arm, seed: int) -> dict[str, Any]:
    """Held-out measures of a student; trained unless its file is there."""
    return study.once(f"student-{arm.slug}-{seed}", lambda: _train(study, arm, seed))


def _train(study: Study, arm: Arm, seed: int) -> dict[str, Any]:
    sizes = study.sizes
    output = study.path(f"runs/{arm.slug}-{seed}")
    shutil.rmtree(output, ignore_errors=True)  # of a run that was killed
    teacher = ["--teacher-weights", f"{arm.teacher}=1", "--selection", arm.selection] if arm.teacher else []
    report = logitstore_json(
        "train", study.store, "--dataset", DATASET, "--output", str(output),
        "--student", str(initial_student(study, seed)), "--objective", arm.objective, *teacher,
        "--lr", str(sizes.student_lr), "--max-steps", str(sizes.student_steps), "--warmup-steps", "20",
        "--batch-tokens", str(sizes.student_batch), "--seq-length", str(SEQUENCE), "--seed", str(seed),
        "--threads", "1", "--log-every", "50", "--save-every", "100000",
    )  # fmt: skip
    shutil.rmtree(output)
    return report
