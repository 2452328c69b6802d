"""The demo's report: one HTML file with the table and the learning curves, drawn as SVG by hand."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

_RUNS = {
    "student-ce": ("text alone", "#888888"),
    "student-kd": ("distilled", "#1f77b4"),
    "cross-ce": ("other tokenizer, text alone", "#c9a15f"),
    "cross-kd": ("other tokenizer, distilled", "#d62728"),
}
_WIDTH, _HEIGHT, _MARGIN = 720, 380, 54

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>logitstore demo</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 760px; margin: 2em auto; padding: 0 1em; color: #222 }}
table {{ border-collapse: collapse; margin: 1em 0 }} td, th {{ padding: .3em .9em; border-bottom: 1px solid #ddd }}
td:not(:first-child), th:not(:first-child) {{ text-align: right }} svg text {{ font-size: 12px; fill: #444 }}
</style>
<h1>logitstore demo</h1>
<p>Students of {student_parameters} were trained on the documentation of Python's standard library, from the same
random weights, on the same tokens in the same order: on the text alone, and from the store of a teacher of
{teacher_parameters} that was run once. Bits per byte on held-out documents, which neither they nor the teacher have
seen; lower is better.</p>
{table}
<h2>Held-out bits per byte while training</h2>
{held_out}
<h2>Cross-entropy of the training text (nats a token)</h2>
<p>Different tokenizers cut different tokens, so only runs of one tokenizer compare here.</p>
{training}
<h2>The store</h2>
{store}
<p>{seconds} seconds in all; training ran at {ce_rate} tokens/s on text alone and {kd_rate} tokens/s distilled, the
teacher was run at {produce_rate} tokens/s.</p>
</html>
"""


def write_report(folder: Path, summary: dict[str, float], inspected: dict[str, Any]) -> None:
    """Write ``report.html`` into the demo's folder, from the runs' metrics."""
    metrics = {run: _read_metrics(folder / run / "metrics.jsonl") for run in _RUNS}
    held_out = {run: _series(records, "held_out", "bits_per_byte") for run, records in metrics.items()}
    training = {run: _series(records, "train", "ce") for run, records in metrics.items()}
    page = _PAGE.format(
        student_parameters=_parameters(folder / "student-kd"),
        teacher_parameters=_parameters(folder / "teacher"),
        table=_results(summary),
        held_out=_chart(held_out, baseline=("teacher", summary["teacher_bpb"])),
        training=_chart(training),
        store=_store_table(inspected),
        seconds=f"{summary['seconds']:.0f}",
        ce_rate=f"{summary['train_tokens_per_s_ce']:,.0f}",
        kd_rate=f"{summary['train_tokens_per_s_kd']:,.0f}",
        produce_rate=f"{summary['produce_tokens_per_s']:,.0f}",
    )
    (folder / "report.html").write_text(page, encoding="utf-8")


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _series(records: list[dict[str, Any]], split: str, name: str) -> list[tuple[float, float]]:
    return [(record["step"], record[name]) for record in records if record["split"] == split and name in record]


def _parameters(folder: Path) -> str:
    with (folder / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    count = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            size = 1
            for length in tensor["shape"]:
                size *= length
            count += size
    return f"{count / 1e6:.2f} M parameters"


def _results(summary: dict[str, float]) -> str:
    rows = [("the teacher itself", "", f"{summary['teacher_bpb']:.4f}", "")]
    for label, key in (("student, the teacher's tokenizer", "student"), ("student, another tokenizer", "cross")):
        ce, kd = summary[f"{key}_ce_bpb"], summary[f"{key}_kd_bpb"]
        rows.append((label, f"{ce:.4f}", f"{kd:.4f}", f"{ce - kd:+.4f}"))
    return _table(("", "text alone", "distilled", "gain"), rows)


def _store_table(inspected: dict[str, Any]) -> str:
    rows = [(name, f"{value:.2f}") for name, value in inspected["bytes_per_token"].items()]
    return _table(("part", "bytes a token"), rows)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    cells = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{body}</table>"


def _chart(series: dict[str, list[tuple[float, float]]], baseline: tuple[str, float] | None = None) -> str:
    """Lines over steps; axes from the data."""
    points = [point for line in series.values() for point in line]
    values = [y for _, y in points] + ([baseline[1]] if baseline else [])
    right, low, high = max(x for x, _ in points), min(values), max(values)
    low, high = low - 0.05 * (high - low), high + 0.05 * (high - low)

    def place(x: float, y: float) -> str:
        across = _MARGIN + x / right * (_WIDTH - 2 * _MARGIN)
        down = _HEIGHT - _MARGIN - (y - low) / (high - low) * (_HEIGHT - 2 * _MARGIN)
        return f"{across:.1f},{down:.1f}"

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">']
    for tick in range(5):
        y = low + (high - low) * tick / 4
        down = place(0, y).split(",")[1]
        parts.append(f'<line x1="{_MARGIN}" x2="{_WIDTH - _MARGIN}" y1="{down}" y2="{down}" stroke="#e5e5e5"/>')
        parts.append(f'<text x="{_MARGIN - 6}" y="{down}" text-anchor="end" dy="4">{y:.2f}</text>')
        x = right * tick / 4
        across = place(x, low).split(",")[0]
        parts.append(f'<text x="{across}" y="{_HEIGHT - _MARGIN + 18}" text-anchor="middle">{x:.0f}</text>')
    if baseline:
        ends = " ".join(place(x, baseline[1]) for x in (0, right))
        parts.append(f'<polyline points="{ends}" fill="none" stroke="#2ca02c" stroke-dasharray="5 4"/>')
    for run, line in series.items():
        ends = " ".join(place(*point) for point in line)
        parts.append(f'<polyline points="{ends}" fill="none" stroke="{_RUNS[run][1]}" stroke-width="2"/>')
    legend = [*_RUNS.values(), *([(baseline[0], "#2ca02c")] if baseline else [])]
    for number, (label, colour) in enumerate(legend):
        across, down = _WIDTH - _MARGIN - 190, _MARGIN + 16 * number
        parts.append(f'<rect x="{across}" y="{down - 9}" width="12" height="3" fill="{colour}"/>')
        parts.append(f'<text x="{across + 18}" y="{down - 4}">{html.escape(label)}</text>')
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 12}" text-anchor="middle">step</text></svg>')
    return "".join(parts)
