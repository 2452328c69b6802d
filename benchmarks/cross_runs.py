"""The runs of the study: one student for each objective and seed, each kept as a file of its own."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import Any

from commands import logitstore_json
from cross_setup import DATASET, OTHER, SAME, SEQUENCE, Study

WEIGHTS = "{}:0.9,ce:0.1"
"""Every objective replaces nine tenths of the text's share, as the demo's."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What a student is trained on."""

    name: str
    term: str
    """Of ``--objective``."""
    teacher: str | None = None
    selection: str = "threshold"
    """The stored rows that it reads."""

    @property
    def objective(self) -> str:
        return "ce" if self.teacher is None else WEIGHTS.format(self.term)

    @property
    def slug(self) -> str:
        return "-".join(filter(None, (self.term, self.teacher, self.selection if self.teacher else "")))


TEXT = Arm(name="text alone", term="ce")
REFERENCE = Arm(name="`kl`, the student's tokenizer", term="kl", teacher=SAME)
CROSS = (
    Arm(name="`kl`", term="kl", teacher=OTHER),
    Arm(name="`projected_kl`", term="projected_kl", teacher=OTHER),
    Arm(name="`projected_kl`, top-k", term="projected_kl", teacher=OTHER, selection="topk"),
    Arm(name="`first_byte_kl`", term="first_byte_kl", teacher=OTHER),
    Arm(name="`chunk_likelihood`", term="chunk_likelihood", teacher=OTHER),
    Arm(name="`gold`", term="gold", teacher=OTHER, selection="topk"),
    Arm(name="`uld`", term="uld", teacher=OTHER, selection="topk"),
    Arm(name="`xtoken_pkl`", term="xtoken_pkl", teacher=OTHER, selection="topk"),
    Arm(name="`xtoken_hkl`", term="xtoken_hkl", teacher=OTHER, selection="topk"),
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
        "--student", str(study.path(f"student-init-{seed}")), "--objective", arm.objective, *teacher,
        "--lr", str(sizes.student_lr), "--max-steps", str(sizes.student_steps), "--warmup-steps", "20",
        "--batch-tokens", str(sizes.student_batch), "--seq-length", str(SEQUENCE), "--seed", str(seed),
        "--threads", "1", "--log-every", "50", "--save-every", "100000",
    )  # fmt: skip
    shutil.rmtree(output)
    return report
