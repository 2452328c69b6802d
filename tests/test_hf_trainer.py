"""Distillation in a Hugging Face Trainer comes to what a plain loop comes to, however it is cut, run or resumed.

Run as a script, this file is one rank of the test with two processes.
"""

from __future__ import annotations

import copy
import faulthandler
import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from small_store import SmallStore, llama_config, make_student
from test_distillation_loss import OBJECTIVE, SEQUENCES, gradients, make_dataset, make_model, run_ranks, weights
from transformers import (
    AutoModelForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from logitstore.consumer import stream as stream_module
from logitstore.consumer.data import TrainingData
from logitstore.consumer.distillation_loss import DistillationLoss
from logitstore.consumer.hf_trainer import DistillationMixin, model_inputs
from logitstore.errors import ConfigError, TrainingError

STEPS = 4


class DistillationTrainer(DistillationMixin, Trainer):
    """What a user writes."""


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "_GROUP_BYTES", 2 * 2048)


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    values: dict[str, Any] = {
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        **options,
    }
    return TrainingArguments(str(folder), **values)


def make_trainer(
    small: SmallStore,
    folder: Path,
    *,
    model: PreTrainedModel | None = None,
    dataset: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    **options: Any,
) -> DistillationTrainer:
    data = make_dataset(small.url, small.tokenizer, **(dataset or {}))
    model = make_model() if model is None else model
    extra = {"objective": OBJECTIVE, **(trainer or {})}
    return DistillationTrainer(model=model, args=arguments(folder, **options), train_dataset=data, **extra)


def trained(small: SmallStore, folder: Path, **options: Any) -> DistillationTrainer:
    found = make_trainer(small, folder, **options)
    found.train()
    return found


def losses(trainer: Trainer) -> list[float]:
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def own_loop(small: SmallStore, steps: int = STEPS) -> tuple[list[float], torch.Tensor]:
    model = make_model()
    dataset = make_dataset(small.url, small.tokenizer)
    loss_of = DistillationLoss(model, dataset, objective=OBJECTIVE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    found = []
    for batch in islice(dataset, steps):
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, weights(model)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="whole batches"),
        pytest.param({"gradient_accumulation_steps": 3}, id="accumulation"),
        pytest.param({"gradient_accumulation_steps": 7}, id="more steps than sequences"),
        pytest.param({"dataset": {"micro_batch_tokens": 128}}, id="micro-batches of the dataset"),
        pytest.param({"dataloader_num_workers": 2}, id="workers"),
        pytest.param({"average_tokens_across_devices": False, "remove_unused_columns": True}, id="other defaults"),
        pytest.param({"per_device_train_batch_size": 1}, id="batch size that does not matter"),
    ],
)
def test_trainer_comes_to_what_an_own_loop_comes_to(small: SmallStore, tmp_path: Path, options: dict[str, Any]) -> None:
    expected, expected_weights = own_loop(small)
    trainer = trained(small, tmp_path, **options)
    assert losses(trainer) == pytest.approx(expected, rel=1e-4)
    assert (weights(trainer.model) - expected_weights).abs().max() < 2e-4
    assert expected[-1] < expected[0]


def test_two_processes_train_as_one_does(small: SmallStore, tmp_path: Path) -> None:
    options = {"optim": "sgd", "learning_rate": 0.5, "gradient_accumulation_steps": 3}
    one = trained(small, tmp_path / "one", **options)
    run_ranks(__file__, 2, tmp_path, [small.url, small.tokenizer, str(tmp_path), json.dumps(options)])
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert found[0]["weights"].equal(found[1]["weights"])
    assert (found[0]["weights"] - weights(one.model)).abs().max() < 1e-5
    assert found[0]["losses"] == pytest.approx(losses(one), abs=2e-4)  # rounded for the log
    assert found[0]["targets"] + found[1]["targets"] == one_rank_targets(one)
    assert (weights(one.model) - weights(make_model())).abs().max() > 1e-2


def one_rank_targets(trainer: Any) -> int:
    source = trainer.train_dataset
    source.load_state_dict({**source.state_dict(), "epoch": 0, "group": 0, "batch": 0})
    return sum(batch.num_charged for batch in islice(source, STEPS))


def one_rank(url: str, tokenizer: str, folder: str, options: str) -> None:
    stream_module._GROUP_BYTES = 2 * 2048
    args = arguments(Path(folder), ddp_backend="gloo", **json.loads(options))
    dataset = make_dataset(url, tokenizer)
    trainer = DistillationTrainer(model=make_model(), args=args, train_dataset=dataset, objective=OBJECTIVE)
    seen = []
    share = trainer.distillation_loss.share
    trainer.distillation_loss.share = lambda batch: (seen.append(batch.num_charged), share(batch))[1]  # type: ignore
    trainer.train()
    assert isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    found = {"weights": weights(trainer.model), "losses": losses(trainer), "targets": sum(seen)}
    torch.save(found, Path(folder) / f"{args.process_index}.pt")
    torch.distributed.destroy_process_group()


class KilledError(Exception):
    """Stands for the end of a process."""


class Killer(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        if state.global_step == self.step:
            raise KilledError


def with_dropout() -> PhiForCausalLM:
    torch.manual_seed(0)
    config = {**llama_config(352), "model_type": "phi", "num_key_value_heads": 2, "resid_pdrop": 0.2}
    return PhiForCausalLM(PhiConfig(**config))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(("killed_at", "saved_at"), [(5, 4), (12, 12), (15, 12)])
def test_resumed_run_ends_with_bitwise_the_same_weights_and_reads_nothing_again(
    small: SmallStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    killed_at: int,
    saved_at: int,
    num_workers: int,
) -> None:
    """Epochs are of 13 or so batches: also resumed close to their border, and with dropout."""
    options = {
        "max_steps": 17,
        "save_strategy": "steps",
        "save_steps": 4,
        "gradient_accumulation_steps": 2,
        "lr_scheduler_type": "cosine",
        "dataloader_num_workers": num_workers,
    }
    whole = trained(small, tmp_path / "whole", model=with_dropout(), **options)
    assert whole.train_dataset.num_batches(0) in range(9, 17)
    folder = tmp_path / "killed"
    killed = make_trainer(small, folder, model=with_dropout(), trainer={"callbacks": [Killer(killed_at)]}, **options)
    with pytest.raises(KilledError):
        killed.train()
    checkpoint = folder / f"checkpoint-{saved_at}"
    resumed = make_trainer(small, folder, model=with_dropout(), **options)
    loaded: list[int] = []
    load = TrainingData.load
    monkeypatch.setattr(TrainingData, "load", lambda data, block: loaded.append(block) or load(data, block))
    monkeypatch.setattr("transformers.trainer.skip_first_batches", None)
    taken = count_taken(resumed)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.state.global_step == 17
    assert weights(resumed.model).equal(weights(whole.model))
    assert len(taken) == 2 * (17 - saved_at)
    assert losses(resumed)[-(17 - saved_at) :] == losses(whole)[saved_at:]
    assert resumed.state.epoch == whole.state.epoch == 17 / whole.train_dataset.num_batches(0)


def count_taken(trainer: Any) -> list[Any]:
    taken: list[Any] = []
    compute = trainer.compute_loss

    def counted(model: Any, inputs: Any, **options: Any) -> Any:
        taken.append(inputs)
        return compute(model, inputs, **options)

    trainer.compute_loss = counted
    return taken


def test_a_second_training_begins_where_the_first_began(small: SmallStore, tmp_path: Path) -> None:
    trainer = make_trainer(small, tmp_path, learning_rate=0.0)
    trainer.train()
    first = losses(trainer)
    trainer.train()
    assert losses(trainer) == first


def test_checkpoint_of_another_trainer_is_refused(small: SmallStore, tmp_path: Path) -> None:
    trained(small, tmp_path, save_strategy="steps", save_steps=2)
    file = tmp_path / "checkpoint-2" / "trainer_state.json"
    state = json.loads(file.read_text())
    del state["stateful_callbacks"]["logitstore"]
    file.write_text(json.dumps(state))
    with pytest.raises(TrainingError, match="step 2 does not say where its stream stood"):
        make_trainer(small, tmp_path).train(resume_from_checkpoint=str(file.parent))


def test_steps_are_those_of_the_epochs_whose_lengths_differ(small: SmallStore, tmp_path: Path) -> None:
    for dataset, options, epochs in (({}, {"num_train_epochs": 2}, 2), ({"epochs": 3}, {}, 3)):
        trainer = make_trainer(small, tmp_path, dataset=dataset, max_steps=-1, **options)
        expected = sum(trainer.source.num_batches(epoch) for epoch in range(epochs))
        assert trainer.args.max_steps == expected
    half = make_trainer(small, tmp_path, max_steps=-1, num_train_epochs=0.5)
    taken = count_taken(half)
    half.train()
    assert half.state.global_step == len(taken) == -(-half.source.num_batches(0) // 2)


def test_every_token_of_an_epoch_is_charged_once(small: SmallStore, tmp_path: Path) -> None:
    trainer = make_trainer(small, tmp_path, max_steps=-1, num_train_epochs=2, eval_strategy="epoch")
    taken = count_taken(trainer)
    trainer.train()
    data = trainer.train_dataset.stream.data
    charged = sum(int(data.load(block).charged.sum()) for block in data.train_blocks)
    assert sum(inputs["batch_slice"].num_charged for inputs in taken) == 2 * charged
    assert sum("eval_loss" in record for record in trainer.state.log_history) == 2


def test_evaluation_has_the_objective_and_the_held_out_measures(small: SmallStore, tmp_path: Path) -> None:
    trainer = trained(small, tmp_path, eval_strategy="steps", eval_steps=2)
    records = [record for record in trainer.state.log_history if "eval_loss" in record]
    assert [record["step"] for record in records] == [2, 4]
    found = trainer.evaluate()
    expected = DistillationLoss(trainer.model, trainer.train_dataset, objective=OBJECTIVE).evaluate()
    assert found.pop("epoch") == trainer.state.epoch
    assert found == {f"eval_{name}": value for name, value in expected.items()}
    assert found.keys() >= {"eval_loss", "eval_cross_entropy", "eval_kl/big", "eval_bits_per_byte"}
    warm = make_dataset(small.url, small.tokenizer, temperature=2.0)
    assert trainer.evaluate(warm, metric_key_prefix="warm")["warm_loss"] != found["eval_loss"]


def test_best_model_is_found_by_what_is_measured(small: SmallStore, tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "kl/big", "greater_is_better": False}
    trainer = trained(small, tmp_path, **options, **best)
    measured = [record["eval_kl/big"] for record in trainer.state.log_history if "eval_kl/big" in record]
    assert trainer.state.best_metric == min(measured)


def test_saved_folder_is_an_ordinary_model(small: SmallStore, tmp_path: Path) -> None:
    student = make_student(small, tmp_path)
    trainer = trained(small, tmp_path / "run", model=student.model)
    trainer.save_model()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    ids = torch.arange(3, 20)[None]
    expected = trainer.model.eval()(input_ids=ids).logits  # the forward that everyone knows still works
    torch.testing.assert_close(loaded(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_copy_of_the_model_uses_its_own_weights(small: SmallStore, tmp_path: Path) -> None:
    model = make_trainer(small, tmp_path).model
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.lm_head.weight.zero_()
    ids = torch.arange(3, 20)[None]
    assert not copied(input_ids=ids).logits.any()
    assert model(input_ids=ids).logits.any()


def test_bf16_trains_float32_weights(small: SmallStore, tmp_path: Path) -> None:
    expected, _ = own_loop(small)
    trainer = trained(small, tmp_path, bf16=True, save_strategy="steps", save_steps=2)
    assert losses(trainer) == pytest.approx(expected, rel=2e-2)
    assert losses(trainer) != pytest.approx(expected, rel=1e-5)
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}


def test_counts_of_transformers_are_those_of_the_labels(small: SmallStore) -> None:
    batch = next(iter(make_dataset(small.url, small.tokenizer)))
    inputs = model_inputs(batch)
    assert int(inputs["shift_labels"].ne(-100).sum()) == batch.num_charged
    # transformers' own loss on them is our cross-entropy.
    model = make_model()
    options = {name: inputs[name] for name in ("input_ids", "position_ids", "labels", "shift_labels")}
    theirs = model(**options, use_cache=False).loss
    ours = DistillationLoss(model, make_dataset(small.url, small.tokenizer), objective="ce")(model, batch)
    assert theirs.item() == pytest.approx(ours.item(), rel=1e-5)
    # Shifted back, all but what the last output of a sequence predicts.
    lost = int((inputs["shift_labels"][:, -1] != -100).sum())
    assert int(inputs["labels"][:, 1:].ne(-100).sum()) == batch.num_charged - lost


def test_gradients_reach_every_weight(small: SmallStore, tmp_path: Path) -> None:
    trainer = make_trainer(small, tmp_path)
    inputs = model_inputs(next(iter(trainer.train_dataset)))
    loss, outputs = trainer.compute_loss(trainer.model, inputs, return_outputs=True)
    loss.backward()
    assert len(gradients(trainer.model)) == len(weights(trainer.model))
    assert outputs.keys() >= {"loss", "ce", "kl/big", "kl/small"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"trainer": {"compute_loss_func": print}}, "compute_loss_func: cannot go with DistillationMixin"),
        ({"trainer": {"data_collator": list}}, "batches come collated"),
        ({"trainer": {"distillation_dataset": [1]}}, "got a list, expected a LogitStoreDataset"),
        ({"dataset": {"micro_batch_tokens": 64}, "gradient_accumulation_steps": 2}, "=2, but micro_batch_tokens=64"),
        ({"dataset": {"rank": 0, "world_size": 2}}, "cut for 2 ranks, the Trainer has 1"),
    ],
)
def test_what_would_change_the_loss_is_refused(
    small: SmallStore, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trainer(small, tmp_path, **options)


def test_arguments_of_the_caller_are_left_alone(small: SmallStore, tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=-1)
    dataset = make_dataset(small.url, small.tokenizer)
    DistillationTrainer(model=make_model(), args=args, distillation_dataset=dataset)
    assert (args.max_steps, args.ignore_data_skip) == (-1, False)
    assert dataset.stream.config.batch_sequences == SEQUENCES


if __name__ == "__main__":
    faulthandler.dump_traceback_later(80, exit=True)  # a rank that hangs says where
    one_rank(*sys.argv[1:])
