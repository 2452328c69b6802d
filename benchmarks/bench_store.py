"""``make bench-store``: bytes against distortion of stored teacher signals, and speed, next to what others do.

Trains the teachers unless build/bench-store has them (``--minutes``, each on one core), has them score documents, both
at once, and then measures, one thing at a time. Writes benchmarks/RESULTS-store.md; ``bench_read.py``, run last, adds
the read path. ``--quick`` trains for seconds, scores little and writes to build/bench-store/quick.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from store_corpus import VOCABULARIES, load_tokenizer
from store_measures import measure_all
from store_report import NOTES, describe, goals_of, table_of
from store_rows import ensure_rows
from store_teachers import BUILD, teacher_history

RESULTS = Path("benchmarks/RESULTS-store.md")


def prepare(vocabulary: str, num_rows: int, minutes: float, build: Path) -> None:
    """Leave a teacher and its rows in ``build``, where they are not there yet."""
    torch.set_num_threads(1)
    ensure_rows(vocabulary, num_rows, minutes, build)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke test: figures mean nothing")
    parser.add_argument("--rows", type=int, default=60_000, help="rows of each teacher")
    parser.add_argument("--minutes", type=float, default=30, help="to train each teacher for, where there is none")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, minutes, build = (arguments.rows, arguments.minutes, BUILD)
    if arguments.quick:
        rows, minutes, build = 500, 0.1, BUILD / "quick"
    sections, vocabularies = [], VOCABULARIES[:1] if arguments.quick else VOCABULARIES
    with ProcessPoolExecutor(len(vocabularies), get_context("spawn")) as processes:
        list(processes.map(partial(prepare, num_rows=rows, minutes=minutes, build=build), vocabularies))
    for vocabulary in vocabularies:
        teacher, lines = ensure_rows(vocabulary, rows, minutes, build), []
        for line in measure_all(teacher, vocabulary):
            print(f"{vocabulary}  {line.name:40s} {line.num_bytes:8.2f} B/token", flush=True)
            lines.append(line)
        _, size = load_tokenizer(vocabulary)
        sections += [f"## V = {size:,}", describe(teacher, teacher_history(vocabulary, build)), table_of(lines)]
        sections += ["\n".join(goals_of(vocabulary, lines))]
    began = (
        f"Written by `make bench-store` on {datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, {os.cpu_count()} cores."
    )
    results = build / RESULTS.name if arguments.quick else RESULTS
    written = "\n\n".join(["# What a stored signal costs", began, NOTES, *sections])
    results.write_text(written + "\n")  # now, so that a failure to follow loses nothing
    read_path = [sys.executable, str(Path(__file__).with_name("bench_read.py")), *(["--quick"] * arguments.quick)]
    figures = subprocess.run(read_path, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    results.write_text(f"{written}\n\n## Read path\n\n{figures}\n")
    print(f"wrote {results}")


if __name__ == "__main__":
    main()
