"""Which objective learns most from a teacher of another tokenizer: one student under each, five paired seeds.

    python benchmarks/cross_tokenizer.py [--quick] [--processes 2]

Writes benchmarks/RESULTS-cross-tokenizer.md from build/cross-tokenizer, where each run is kept: those that are
there are not made again, so an objective that is new costs its own runs only. ``--quick`` trains for seconds, and
writes to build/cross-tokenizer/quick.
"""

from __future__ import annotations

import argparse
import os
import platform
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path

# Two processes of one thread each; set before torch is imported, here and in them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from cross_report import report
from cross_runs import ARMS, REFERENCE, TEXT, Arm, is_known, run
from cross_setup import OTHER, SAME, Sizes, Study, prepare_teacher, prepare_text

BUILD = Path("build/cross-tokenizer")
RESULTS = Path("benchmarks/RESULTS-cross-tokenizer.md")
_QUICK = Sizes(
    num_documents=300, student_vocabulary=512, teacher_vocabulary=640, student_width=32, teacher_width=32,
    teacher_tokens=4096, student_steps=4, num_seeds=2,
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke test: figures mean nothing")
    parser.add_argument("--processes", type=int, default=2, help="runs at once, of one thread each")
    parser.add_argument("--seeds", type=int, help="how many")
    parser.add_argument(
        "--only", nargs="*", metavar="TERM", help="besides text alone and the same tokenizer, these alone"
    )
    arguments = parser.parse_args()
    sizes = _QUICK if arguments.quick else Sizes()
    study = Study(
        BUILD / "quick" if arguments.quick else BUILD, replace(sizes, num_seeds=arguments.seeds or sizes.num_seeds)
    )
    known = [arm for arm in ARMS if is_known(arm)]
    for name in sorted({arm.term for arm in ARMS if arm not in known}):
        print(f"{name}: this version of logitstore does not have it: left out")
    always = (TEXT, REFERENCE)
    asked = [arm for arm in known if not arguments.only or arm in always or arm.term in arguments.only]
    with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as processes:
        processes.submit(prepare_text, study).result()
        teachers = {name: processes.submit(prepare_teacher, study, name) for name in (SAME, OTHER)}
        runs: dict[Arm, list[Future[float]]] = {arm: [] for arm in asked}
        for needed in ((None, SAME), (OTHER,)):  # the first teacher's students train beside the second teacher
            teachers[needed[-1]].result()
            for seed in range(1, study.sizes.num_seeds + 1):
                for arm in (arm for arm in asked if arm.teacher in needed):
                    runs[arm].append(processes.submit(_bits, study, arm, seed))
        bits = {arm: [each.result() for each in found] for arm, found in runs.items()}
        teacher_bits = {name: each.result()["bits_per_byte"] for name, each in teachers.items()}
    began = f"Written by `benchmarks/cross_tokenizer.py` on {datetime.now(UTC):%Y-%m-%d}, {platform.machine()}."
    results = study.build / RESULTS.name if arguments.quick else RESULTS
    text = report(study, bits, teacher_bits)
    results.write_text(f"# Learning from a teacher of another tokenizer\n\n{began}\n\n{text}\n")
    print(text)
    print(f"wrote {results}")


def _bits(study: Study, arm: Arm, seed: int) -> float:
    return run(study, arm, seed)["held_out"]["bits_per_byte"]


if __name__ == "__main__":
    main()
