"""``make demo``: the whole job on this machine, offline, in minutes, with the commands that a user would type.

Trains two tokenizers and a small teacher on the standard library's documentation, keeps what the teacher says in a
store, and trains students from it: each with the teacher, and its twin, which differs in nothing but reading text
alone. All are measured on documents that neither they, nor their teacher, nor the tokenizers have seen, and that
nothing was tuned on.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

from commands import logitstore, logitstore_json
from demo_corpus import documents
from demo_report import write_report
from demo_tokenizers import train_bytelevel_tokenizer, train_metaspace_tokenizer
from small_models import save_initial_model

BUILD = Path("build/demo")
STORE, DATASET = str(BUILD / "store"), "docs"
SEQUENCE, BATCH = 256, 1024
STUDENT_STEPS = 300
TEACHER_STEPS = 750
# Chosen for the text-only twins, on training documents held aside, before anything was measured on the held-out ones.
TEACHER_LR, STUDENT_LR, CROSS_LR = 5e-3, 1e-2, 1.6e-2
DISTILLED = "kl:0.9,ce:0.1"


def main() -> None:
    began = time.monotonic()
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    with (BUILD / "corpus.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in documents())
    logitstore("plan", STORE, "--data", str(BUILD / "corpus.jsonl"), "--dataset", DATASET)
    make_tokenizers()
    make_initial_model("teacher-init", "teacher-tokenizer", hidden_size=128, intermediate_size=344, num_hidden_layers=4)
    make_initial_model("student-init", "teacher-tokenizer", hidden_size=64, intermediate_size=172, num_hidden_layers=2)
    make_initial_model("cross-init", "cross-tokenizer", hidden_size=64, intermediate_size=172, num_hidden_layers=2)
    teacher = train("teacher", "teacher-init", "ce", TEACHER_LR, TEACHER_STEPS)
    produced = logitstore_json(
        "produce", STORE, "--dataset", DATASET, "--teacher", f"teacher={BUILD / 'teacher'}",
        "--student-tokenizer", str(BUILD / "cross-tokenizer"), "--max-length", str(2 * SEQUENCE),
    )  # fmt: skip
    logitstore("verify", STORE)
    inspected = logitstore_json("inspect", STORE, "--dataset", DATASET)
    runs = {
        "student-ce": train("student-ce", "student-init", "ce", STUDENT_LR, STUDENT_STEPS),
        "student-kd": train("student-kd", "student-init", DISTILLED, STUDENT_LR, STUDENT_STEPS),
        "cross-ce": train("cross-ce", "cross-init", "ce", CROSS_LR, STUDENT_STEPS),
        "cross-kd": train("cross-kd", "cross-init", DISTILLED, CROSS_LR, STUDENT_STEPS),
    }
    summary = summarise(teacher, produced, inspected, runs) | {"seconds": round(time.monotonic() - began, 1)}
    (BUILD / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    write_report(BUILD, summary, inspected)
    print_table(summary)


def make_tokenizers() -> None:
    """Train both tokenizers on the training documents alone, and cut the corpus with them."""
    import logitstore as library
    from logitstore.columns import next_manifest
    from logitstore.plan import TRAIN
    from logitstore.text_columns import TextColumns
    from logitstore.text_parts import read_documents_of
    from logitstore.tokenizer import Tokenizer

    store = library.open(STORE)
    manifest = store.dataset(DATASET).manifest
    column = next(manifest.find("text"))
    train_blocks = [number for number, block in enumerate(manifest.plan.blocks) if block.split == TRAIN]
    texts = [d.text for number in train_blocks for d in read_documents_of(store.column_part(column, number))]
    train_bytelevel_tokenizer(BUILD / "teacher-tokenizer", texts, vocab_size=2048)
    train_metaspace_tokenizer(BUILD / "cross-tokenizer", texts, vocab_size=1536)
    columns = TextColumns(store, manifest.plan)
    for name in ("teacher", "cross"):
        columns.add_tokens(Tokenizer.from_folder(str(BUILD / f"{name}-tokenizer")), name)
    columns.fill()
    store.publish(DATASET, lambda current: next_manifest(store, current, manifest.plan_digest, columns.requested))


def make_initial_model(name: str, tokenizer: str, **sizes: int) -> None:
    """What twins begin from."""
    save_initial_model(BUILD / name, BUILD / tokenizer, seed=1, **sizes)


def train(name: str, initial: str, objective: str, lr: float, steps: int) -> dict[str, Any]:
    """One run; twins share their initial weights, their tokens and the order of these."""
    return logitstore_json(
        "train", STORE, "--dataset", DATASET, "--output", str(BUILD / name), "--student", str(BUILD / initial),
        "--objective", objective, "--lr", str(lr), "--max-steps", str(steps), "--warmup-steps", "20",
        "--batch-tokens", str(BATCH), "--seq-length", str(SEQUENCE), "--seed", "1",
        "--log-every", "20", "--evaluate-every", str(steps // 3), "--save-every", str(steps),
    )  # fmt: skip


def summarise(
    teacher: dict[str, Any], produced: dict[str, Any], inspected: dict[str, Any], runs: dict[str, dict[str, Any]]
) -> dict[str, float]:
    def bits(run: dict[str, Any]) -> float:
        return round(run["held_out"]["bits_per_byte"], 4)

    return {
        "teacher_bpb": bits(teacher),
        "student_ce_bpb": bits(runs["student-ce"]),
        "student_kd_bpb": bits(runs["student-kd"]),
        "cross_ce_bpb": bits(runs["cross-ce"]),
        "cross_kd_bpb": bits(runs["cross-kd"]),
        "store_bytes_per_token": round(inspected["bytes_per_token"]["total"], 2),
        "signal_bytes_per_token": round(inspected["bytes_per_token"]["signals"], 2),
        "produce_tokens_per_s": round(produced["num_forward_tokens"] / produced["seconds"], 1),
        "train_tokens_per_s_ce": round(runs["student-ce"]["tokens_per_s"], 1),
        "train_tokens_per_s_kd": round(runs["student-kd"]["tokens_per_s"], 1),
    }


def print_table(summary: dict[str, float]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("held-out bits per byte", "text alone", "distilled", "gain", title="logitstore demo")
    for label, key in (("student, the teacher's tokenizer", "student"), ("student, another tokenizer", "cross")):
        ce, kd = summary[f"{key}_ce_bpb"], summary[f"{key}_kd_bpb"]
        table.add_row(label, f"{ce:.4f}", f"{kd:.4f}", f"{ce - kd:+.4f}")
    table.add_row("the teacher itself", f"{summary['teacher_bpb']:.4f}", "", "")
    console = Console()
    console.print(table)
    console.print(
        f"store {summary['store_bytes_per_token']} bytes a token, of which the teacher's signals "
        f"{summary['signal_bytes_per_token']}; produce {summary['produce_tokens_per_s']:,.0f} tokens/s; training "
        f"{summary['train_tokens_per_s_ce']:,.0f} tokens/s on text alone, {summary['train_tokens_per_s_kd']:,.0f} "
        f"distilled; {summary['seconds']:.0f} s in all"
    )
    console.print(f"{BUILD}/summary.json, {BUILD}/report.html")


if __name__ == "__main__":
    main()
