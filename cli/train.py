"""``logitstore train``: train a student from a store."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from logitstore.cli.config_file import config_option
from logitstore.cli.option_groups import option_group
from logitstore.cli.progress import TrainBar, hide_model_bars
from logitstore.errors import ConfigError

if TYPE_CHECKING:
    from logitstore.consumer.student import Student
    from logitstore.consumer.trainer import Trainer, TrainReport
    from logitstore.store import DatasetVersion, Store

_DEFAULT_SEQUENCE = 1024

student_options = option_group(
    click.option("--student", metavar="MODEL[@REVISION]", help="Folder or hub id of the student."),
    click.option("--student-config", metavar="FILE", help="config.json of a student to begin from at random instead."),
    click.option(
        "--student-tokenizer", metavar="TOKENIZER", help="With --student-config; the first teacher's if not given."
    ),
    click.option(
        "--chat-template", type=click.Path(exists=True, dir_okay=False), help="Jinja file, as given to `produce`."
    ),
    click.option("--trust-remote-code", is_flag=True, help="Run the student's own modelling code."),
)

objective_options = option_group(
    click.option(
        "--objective",
        default="kl:0.9,ce:0.1",
        show_default=True,
        help="Terms with weights: kl, ce; across tokenizers also projected_kl (what kl is there), first_byte_kl, "
        "chunk_likelihood, gold, uld, xtoken_pkl, xtoken_hkl.",
    ),
    click.option("--temperature", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True),
    click.option("--teacher-weights", metavar="NAME=W,...", help="Their shares; equal if not given."),
    click.option(
        "--teacher-weighting",
        type=click.Choice(["static", "ce", "entropy", "max_prob", "select"]),
        default="static",
        show_default=True,
        help="How teachers share a token: as --teacher-weights says, or more to whoever is surer there.",
    ),
    click.option(
        "--teacher-alpha",
        type=click.FloatRange(0),
        default=1.0,
        show_default=True,
        help="How much surer counts, in ce, entropy and max_prob.",
    ),
    click.option(
        "--tau", type=click.FloatRange(0, min_open=True), default=100.0, show_default=True, help="Of chunk_likelihood."
    ),
    click.option(
        "--debias/--no-debias",
        default=True,
        show_default=True,
        help="Whether chunk_likelihood minds where a tokenizer can stop.",
    ),
    click.option(
        "--selection", metavar="POLICY[:N]", help="Where a teacher has several signals: topk, topk:64, threshold."
    ),
    click.option(
        "--loss-on",
        type=click.Choice(["all", "answers"]),
        default="all",
        show_default=True,
        help="Which tokens are trained on; answers: completions and assistant turns.",
    ),
)

loop_options = option_group(
    click.option("--max-steps", type=click.IntRange(1), help="Updates, through as many epochs as that takes."),
    click.option(
        "--epochs", type=click.IntRange(1), default=1, show_default=True, help="Passes, where --max-steps is not given."
    ),
    click.option(
        "--batch-tokens", type=click.IntRange(1), default=16384, show_default=True, help="Tokens of an update."
    ),
    click.option(
        "--micro-batch-tokens", type=click.IntRange(1), help="Tokens of one forward pass; the whole batch if not given."
    ),
    click.option(
        "--seq-length",
        type=click.IntRange(2),
        help=f"Tokens of a packed sequence; the student's positions, {_DEFAULT_SEQUENCE} at most, if not given.",
    ),
    click.option("--lr", type=click.FloatRange(min=0, min_open=True), default=3e-4, show_default=True),
    click.option(
        "--schedule", type=click.Choice(["constant", "linear", "cosine", "wsd"]), default="cosine", show_default=True
    ),
    click.option("--warmup-steps", type=click.IntRange(0), default=0, show_default=True),
    click.option("--weight-decay", type=click.FloatRange(0), default=0.1, show_default=True),
    click.option("--beta1", type=click.FloatRange(0, 1), default=0.9, show_default=True),
    click.option("--beta2", type=click.FloatRange(0, 1), default=0.95, show_default=True),
    click.option(
        "--clip", type=click.FloatRange(0), default=1.0, show_default=True, help="Norm of the gradient; 0: none."
    ),
    click.option(
        "--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the data order and of random weights."
    ),
    click.option("--bf16/--no-bf16", default=None, help="Mixed precision; the default on a GPU."),
    click.option("--device", default="auto", show_default=True),
    click.option("--threads", type=click.IntRange(1), help="CPU threads of torch; all if not given."),
)

record_options = option_group(
    click.option("--log-every", type=click.IntRange(1), default=10, show_default=True, help="Steps."),
    click.option(
        "--evaluate-every", type=click.IntRange(0), default=0, show_default=True, help="Steps; 0: at the end only."
    ),
    click.option(
        "--save-every", type=click.IntRange(1), default=200, show_default=True, help="Steps between checkpoints."
    ),
)

# These change how a run is watched or where it runs, not what it comes to. What is in the data, its manifest says.
_NOT_OF_THE_RESULT = ("store", "dataset", "dataset_version", "pin", "output", "resume", "as_json", "log_every",
                      "evaluate_every", "save_every", "device", "threads")  # fmt: skip


@click.command()
@click.argument("store")
@click.option("--dataset", required=True, metavar="NAME")
@click.option("--dataset-version", type=click.IntRange(1), help="The newest if not given.")
@click.option("--pin", metavar="DIGEST", help="The manifest digest that the version must have, or its beginning.")
@click.option("--output", required=True, metavar="DIR", help="Folder of the run and, in the end, of the model.")
@student_options
@objective_options
@loop_options
@record_options
@click.option("--resume", is_flag=True, help="Go on with the run in --output even if options differ.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@config_option()
@click.pass_context
def train(
    context: click.Context,
    store: str,
    dataset: str,
    dataset_version: int | None,
    pin: str | None,
    output: str,
    **options: Any,
) -> None:
    """Train a student from the teachers' signals in STORE.

    The folder of --output becomes an ordinary model folder with its tokenizer. A killed run goes on when the same
    command is given again.
    """
    from logitstore.consumer.data import TrainingData
    from logitstore.consumer.objectives import parse_objective
    from logitstore.consumer.run_folder import DATASET, enter_run_folder
    from logitstore.consumer.stream import Stream, StreamConfig
    from logitstore.consumer.trainer import Trainer, TrainerConfig
    from logitstore.store import Store

    shaping = {name: options[name] for name in ("tau", "debias", "teacher_weighting", "teacher_alpha")}
    objective = parse_objective(options["objective"], **shaping)
    weights = _weights(options["teacher_weights"])
    if (options["student"] is None) == (options["student_config"] is None):
        raise ConfigError("name either --student MODEL or --student-config FILE")
    opened = Store.open(store)
    version = opened.dataset(dataset, dataset_version, pin=pin)
    device = _prepare_torch(options)
    student = _student(opened, version, options)
    data = TrainingData.open(
        opened,
        version,
        student.tokenizer,
        teacher_weights=weights if objective.teacher_terms else {},
        selection=options["selection"],
        projected=False if objective.needs_teacher_tokens or options["temperature"] != 1.0 else None,
        loss_on=options["loss_on"],
    )
    batch_tokens = options["batch_tokens"]
    length = options["seq_length"] or min(_DEFAULT_SEQUENCE, student.num_positions, batch_tokens)
    config = StreamConfig(sequence_length=length, batch_tokens=batch_tokens, seed=options["seed"])
    stream = Stream(data, config, options["temperature"])
    kept = {name: value for name, value in context.params.items() if name not in _NOT_OF_THE_RESULT}
    folder = Path(output)
    checkpoint = enter_run_folder(folder, {**kept, DATASET: version.manifest.identity}, resume=options["resume"])
    names = TrainerConfig.__dataclass_fields__
    trainer_config = TrainerConfig(**{name: value for name, value in options.items() if name in names})
    with TrainBar(quiet=options["as_json"]) as bar:
        trainer = Trainer(student, stream, objective, trainer_config, folder, device, bar)
        if checkpoint is not None:
            trainer.resume(checkpoint)
            click.echo(f"{folder}: going on after step {trainer.step}", err=True)
        if data.num_holes:
            click.echo(f"{data.num_holes} blocks are not scored yet and are left out", err=True)
        with _stop_at_signals(trainer):
            report = trainer.run()
    _print(report, folder, options["as_json"])


@contextmanager
def _stop_at_signals(trainer: Trainer) -> Iterator[None]:
    """The first SIGTERM or Ctrl-C ends the run after its step, with a checkpoint; the second one at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        for each, handler in before.items():
            signal.signal(each, handler)
        trainer.request_stop()

    before = {each: signal.signal(each, stop) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _prepare_torch(options: dict[str, Any]) -> str:
    """Set threads and determinism; returns the device. Fills in what depends on it."""
    import os

    import torch

    device = options["device"]
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {device}: not usable here: {str(error).splitlines()[0]}") from error
    if options["bf16"] is None:
        options["bf16"] = device != "cpu"
    if device == "cpu":
        torch.set_num_threads(options["threads"] or len(os.sched_getaffinity(0)))
        torch.use_deterministic_algorithms(True)
    return device


def _student(store: Store, version: DatasetVersion, options: dict[str, Any]) -> Student:
    from logitstore.consumer.student import Student
    from logitstore.hub import resolve_folder, split_model
    from logitstore.inspection import stored_tokenizer
    from logitstore.tokenizer import Tokenizer

    template = Path(options["chat_template"]).read_text(encoding="utf-8") if options["chat_template"] else None
    if options["student"] is not None:
        if options["student_tokenizer"] is not None:
            raise ConfigError("--student-tokenizer goes with --student-config: a pretrained student has its own")
        folder = resolve_folder(*split_model(options["student"]))
        hide_model_bars()  # what the hub downloads is worth a bar, what is read from a disk is not
        return Student.load(str(folder), trust_code=options["trust_remote_code"], chat_template=template)
    hide_model_bars()
    if options["student_tokenizer"] is not None:
        name, revision = split_model(options["student_tokenizer"])
        folder = resolve_folder(name, revision, tokenizer_only=True)
        tokenizer = Tokenizer.from_folder(str(folder), template)
        home = folder if folder.is_dir() else folder.parent
        return Student.initialise(options["student_config"], tokenizer, home, options["seed"], template)
    column = next(version.manifest.find("signal"), None)
    if column is None:
        raise ConfigError(
            "--student-config: the dataset has no teacher yet to take the tokenizer of; name --student-tokenizer"
        )
    tokenizer = stored_tokenizer(store, version.manifest, column.template["tokens"])
    return Student.initialise(options["student_config"], tokenizer, None, options["seed"])


def _weights(text: str | None) -> dict[str, float] | None:
    if text is None:
        return None
    weights = {}
    for part in text.split(","):
        name, _, number = (piece.strip() for piece in part.rpartition("="))
        if name in weights:
            raise ConfigError(f"--teacher-weights: teacher {name!r} is there twice in {text!r}")
        try:
            weights[name] = float(number)
        except ValueError:
            raise ConfigError(f"--teacher-weights {part!r}: expected NAME=WEIGHT, as in a=0.7,b=0.3") from None
    return weights


def _print(report: TrainReport, folder: Path, as_json: bool) -> None:
    rate = report.num_tokens / report.seconds if report.num_tokens else 0.0
    if as_json:
        values = {"output": str(folder), "step": report.step, "tokens_per_s": rate, "held_out": report.held_out}
        click.echo(json.dumps(values, indent=1))
        return
    done = (
        f"{report.num_tokens:,} tokens in {report.seconds:.1f} s ({rate:,.0f} tokens/s)" if rate else "already finished"
    )
    click.echo(f"step {report.step}: {done}")
    for name, value in report.held_out.items():
        click.echo(f"  held-out {name} {value:.4f}")
    if not report.held_out:
        click.echo("  nothing is held out in this dataset: no validation")
    click.echo(f"saved {folder}")
