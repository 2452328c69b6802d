"""The loss of a user's own loop: shares of one mean, whoever computes them, and never a model that it does not fit.

Run as a script, this file is one rank of the test with two processes.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from small_store import SEQUENCE_LENGTH, SmallStore, build_llama, llama_config, open_stream
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from logitstore.consumer import evaluation
from logitstore.consumer.batch_loss import BatchLoss
from logitstore.consumer.dataset import LogitStoreDataset
from logitstore.consumer.distillation_loss import DistillationLoss, StudentWithLoss
from logitstore.consumer.objectives import parse_objective
from logitstore.consumer.student import Student
from logitstore.errors import ConfigError, ModelError, TokenizerError

OBJECTIVE = "kl:0.9,ce:0.1"
STEPS = 4
SEQUENCES = 5
EXAMPLES = Path(__file__).parents[1] / "examples"


def make_dataset(url: str, tokenizer: Any, **options: Any) -> LogitStoreDataset:
    options = {"selection": "topk", "seq_length": SEQUENCE_LENGTH, **options}
    return LogitStoreDataset(url, "mixed", tokenizer=tokenizer, batch_tokens=SEQUENCES * SEQUENCE_LENGTH, **options)


def make_model(vocab_size: int = 352, **options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**llama_config(vocab_size), "initializer_range": 0.2, **options}))


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tokenizer", ["tokenizer", "other"])
@pytest.mark.parametrize(("world_size", "micro_batch_tokens"), [(1, None), (1, 64), (3, 64), (7, None)])
def test_shares_and_their_gradients_add_up_to_the_mean_of_the_batch(
    small: SmallStore, tokenizer: str, world_size: int, micro_batch_tokens: int | None, tied: bool
) -> None:
    model = make_model(440, tie_word_embeddings=tied)
    stream = open_stream(small, tokenizer, sequences=SEQUENCES)
    batch = stream.collate(next(iter(stream)))
    student = Student.of(model, make_dataset(small.url, getattr(small, tokenizer)).tokenizer)
    expected = BatchLoss(parse_objective(OBJECTIVE), stream.data.teachers, 1.0, student)(student, batch)
    (expected.total / batch.num_charged).backward()
    expected_gradients = gradients(model)
    model.zero_grad()
    total, terms = 0.0, dict.fromkeys(expected.terms, 0.0)
    for rank in range(world_size):
        options = {"micro_batch_tokens": micro_batch_tokens, "world_size": world_size, "rank": rank}
        dataset = make_dataset(small.url, getattr(small, tokenizer), **options)
        loss_of = DistillationLoss(model, dataset, objective=OBJECTIVE)
        for part in islice(dataset, dataset.micro_batches):
            loss = loss_of(model, part)
            loss.backward()
            total += loss.item()
            assert loss_of.last_terms["loss"].item() == loss.item()
            assert not any(value.requires_grad for value in loss_of.last_terms.values())
            terms = {name: value + loss_of.last_terms[name].item() for name, value in terms.items()}
    assert total == pytest.approx(expected.total.item() / batch.num_charged, rel=1e-5)
    torch.testing.assert_close(gradients(model), expected_gradients, rtol=1e-4, atol=1e-6)
    for name, value in terms.items():
        assert value == pytest.approx(expected.terms[name].item() / batch.num_charged, rel=1e-4)


def train(loss_of: DistillationLoss, model: nn.Module) -> None:
    """``model`` is the student itself, or what wraps it with its loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in islice(loss_of.dataset, STEPS * loss_of.dataset.micro_batches):
        is_wrapped = isinstance(model, nn.parallel.DistributedDataParallel)
        with nullcontext() if batch.is_last or not is_wrapped else model.no_sync():
            loss_of(model, batch).backward()
        if batch.is_last:
            optimizer.step()
            optimizer.zero_grad()


def test_two_processes_train_as_one_does(small: SmallStore, tmp_path: Path) -> None:
    """With DDP and with FSDP2; five sequences in six slices leave one rank without any at times."""
    model = make_model()
    before = weights(model)
    loss_of = DistillationLoss(model, make_dataset(small.url, small.tokenizer), objective=OBJECTIVE)
    train(loss_of, model)
    run_ranks(__file__, 2, tmp_path, [small.url, small.tokenizer, str(tmp_path)])
    for kind in ("ddp", "fsdp"):
        found = [torch.load(tmp_path / f"{kind}-{rank}.pt") for rank in range(2)]
        assert found[0]["weights"].equal(found[1]["weights"])
        assert found[0]["state"] == found[1]["state"] == loss_of.dataset.state_dict()
        assert (found[0]["weights"] - weights(model)).abs().max() < 1e-5
    assert (weights(model) - before).abs().max() > 1e-2


def run_ranks(script: str, world_size: int, folder: Path, arguments: list[str]) -> None:
    """One process a rank, on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    logs, processes = [], []
    for rank in range(world_size):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        logs.append(folder / f"rank-{rank}.log")
        with logs[-1].open("w") as log:
            command = [sys.executable, script, *arguments]
            processes.append(subprocess.Popen(command, env={**environment, **place}, stdout=log, stderr=log))
    try:
        deadline = time.monotonic() + 100
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if any(process.poll() for process in processes):
                break  # the others would wait for the one that failed
            time.sleep(0.1)
        assert [process.poll() for process in processes] == [0] * world_size, "\n".join(
            log.read_text()[-3000:] for log in logs
        )
    finally:
        for process in processes:
            process.kill()
            process.wait()


def one_rank(url: str, tokenizer: str, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.distributed.init_process_group("gloo")
    for kind in ("ddp", "fsdp"):
        dataset = make_dataset(url, tokenizer, micro_batch_tokens=SEQUENCE_LENGTH)
        assert dataset.micro_batches == 3
        model = make_model()
        loss_of = DistillationLoss(model, dataset, objective=OBJECTIVE)
        module: nn.Module = loss_of.module()
        if kind == "ddp":
            module = nn.parallel.DistributedDataParallel(module)
        else:
            mesh = init_device_mesh("cpu", (2,))
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(module, mesh=mesh)
            with pytest.raises(ConfigError, match="the head's weights are sharded here"):
                loss_of(model, next(iter(make_dataset(url, tokenizer))))
        train(loss_of, module)
        whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
        found = {"weights": torch.cat([p.detach().flatten() for p in whole]), "state": dataset.state_dict()}
        torch.save(found, Path(folder) / f"{kind}-{dataset.rank}.pt")
    torch.distributed.destroy_process_group()


def test_module_gives_the_mean_over_ranks_and_shares_the_models_weights(small: SmallStore) -> None:
    model = make_model()
    dataset = make_dataset(small.url, small.tokenizer, world_size=2, rank=0)
    loss_of = DistillationLoss(model, dataset)
    batch = next(iter(dataset))
    module = loss_of.module()
    assert isinstance(module, StudentWithLoss)
    assert module(batch).item() == loss_of(module, batch).item() == 2 * loss_of(model, batch).item()
    assert {id(p) for p in module.parameters()} == {id(p) for p in model.parameters()}


def test_loss_tells_the_dataset_what_is_consumed(small: SmallStore) -> None:
    dataset = make_dataset(small.url, small.tokenizer)
    model = make_model()
    loss_of = DistillationLoss(model, dataset)
    first, second = islice(dataset, 2)
    loss_of(model, first)
    assert dataset.state_dict() == first.state
    loss_of.terms(second)  # only looked at
    assert dataset.state_dict() == first.state


def test_wrapped_models_and_others_are_refused(small: SmallStore) -> None:
    dataset, model = make_dataset(small.url, small.tokenizer), make_model()
    loss_of, batch = DistillationLoss(model, dataset), next(iter(dataset))
    for other in (nn.DataParallel(model), torch.compile(model), make_model()):
        with pytest.raises(ConfigError, match=r"wrapper of loss\.module\(\)"):
            loss_of(other, batch)
    with pytest.raises(ConfigError, match=r"before the model is wrapped"):
        DistillationLoss(nn.DataParallel(model), dataset)  # type: ignore[arg-type]


def test_models_that_the_loss_does_not_fit_are_refused(small: SmallStore) -> None:
    dataset = make_dataset(small.url, small.tokenizer)

    class Louder(LlamaForCausalLM):
        def forward(self, *inputs: Any, **options: Any) -> Any:
            found = super().forward(*inputs, **options)
            found.logits = found.logits * 2
            return found

    with pytest.raises(ModelError, match="Louder: its head applied to its hidden states does not give its logits"):
        DistillationLoss(Louder(make_model().config), dataset)
    leaky = make_model()
    leaky.base_model.register_forward_pre_hook(
        lambda module, inputs, options: (inputs, {**options, "position_ids": None}), with_kwargs=True
    )
    with pytest.raises(ModelError, match="packed documents see each other"):
        DistillationLoss(leaky, dataset)
    with pytest.raises(TokenizerError, match="its tokenizer has 340 tokens, the student only 300"):
        DistillationLoss(make_model(300), dataset)
    with pytest.raises(ModelError, match="no head over a vocabulary"):
        DistillationLoss(make_model().base_model, dataset)
    with pytest.raises(ConfigError, match="--seq-length 64: the student has 32 positions"):
        DistillationLoss(make_model(max_position_embeddings=32), dataset)
    with pytest.raises(ConfigError, match="did you mean 'kl'"):
        DistillationLoss(make_model(), dataset, objective="kll:1")


def test_a_bfloat16_model_passes_the_check_and_trains(small: SmallStore) -> None:
    dataset, model = make_dataset(small.url, small.tokenizer), make_model().to(torch.bfloat16)
    loss_of = DistillationLoss(model, dataset)
    batch = next(iter(dataset))
    loss = loss_of(model, batch)
    loss.backward()
    expected = DistillationLoss(make_model(), dataset).terms(batch)["loss"]
    assert loss.item() == pytest.approx(expected.item(), rel=0.02)


def test_evaluation_is_the_trainers_and_the_objective(small: SmallStore) -> None:
    dataset, model = make_dataset(small.url, small.tokenizer), make_model()
    loss_of = DistillationLoss(model.train(), dataset, objective=OBJECTIVE)
    found = loss_of.evaluate()
    assert model.training
    expected = evaluation.evaluate(loss_of.student, dataset.stream, "cpu")
    assert {name: value for name, value in found.items() if name != "loss"} == pytest.approx(expected)
    kl = (expected["kl/big"] + expected["kl/small"]) / 2
    assert found["loss"] == pytest.approx(0.9 * kl + 0.1 * expected["cross_entropy"], rel=1e-5)


@pytest.mark.parametrize("name", ["own_loop", "hf_trainer"])
def test_examples_run(small: SmallStore, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = EXAMPLES / f"{name}.py"
    assert len(script.read_text().splitlines()) < 30
    student = build_llama(tmp_path / "student", small.tokenizer, vocab_size=352)
    output = tmp_path / "output"
    # The store has two signals of each teacher; the example's users have one.
    monkeypatch.setattr(LogitStoreDataset.__init__, "__kwdefaults__", {**DEFAULTS, "selection": "topk"})
    monkeypatch.setattr(sys, "argv", [str(script), small.url, "mixed", student, str(output), "2"])
    runpy.run_path(str(script), run_name="__main__")
    trained = AutoModelForCausalLM.from_pretrained(output)
    assert not weights(trained).equal(weights(AutoModelForCausalLM.from_pretrained(student)))
    assert len(AutoTokenizer.from_pretrained(output)) == len(AutoTokenizer.from_pretrained(small.tokenizer))


DEFAULTS: dict[str, Any] = dict(LogitStoreDataset.__init__.__kwdefaults__ or {})

if __name__ == "__main__":
    faulthandler.dump_traceback_later(80, exit=True)  # a rank that hangs says where
    one_rank(*sys.argv[1:])
