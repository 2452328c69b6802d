"""Scalars of made-up rows against float64, and how they are stored."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from logitstore.parts import Part
from logitstore.producer.scalars import scalars_of
from logitstore.signals import (
    START_CLASSES,
    STARTS_FLOOR_NATS,
    read_scalars,
    scalar_columns,
    stage_scalars,
)
from logitstore.staging import upload
from logitstore.storage import open_storage
from logitstore.token_starts import start_masks

_BYTES: list[bytes | None] = [
    *(b" the", b"\n", b"\t\t", b"\xc2\xa0", b".", b"(x", b"_y", b"9", b"Z", b"\x00", b"\x7f", b"caf\xc3"),
    *(b"", None, None),
]
_SPECIAL = frozenset({13})
_CLASSES = {"space": [0, 1, 2], "punctuation": [4, 5, 9, 10], "end": [13]}
V = 17  # the head is wider than the tokenizer


def _columns(
    logits_RV: torch.Tensor, realised_R: torch.Tensor, temperatures: tuple[float, ...]
) -> dict[str, np.ndarray]:
    probs_RV = torch.softmax(logits_RV, -1, dtype=torch.float32)
    starts_VC = torch.from_numpy(start_masks(_BYTES, _SPECIAL, V))
    log_z_R = logits_RV.float().logsumexp(-1)
    found = scalars_of(
        logits_RV, probs_RV, log_z_R, logits_RV.argmax(-1), realised_R, starts_VC, temperatures, log_z=True
    )
    return dict(zip(scalar_columns(temperatures, log_z=True), found.numpy().T, strict=True))


def test_start_masks_cut_tokens_by_their_first_byte() -> None:
    masks_VC = start_masks(_BYTES, _SPECIAL, V)
    assert masks_VC.shape == (V, len(START_CLASSES))
    for number, name in enumerate(START_CLASSES):
        assert np.flatnonzero(masks_VC[:, number]).tolist() == _CLASSES[name]
    assert set(np.unique(masks_VC)) == {0.0, 1.0}


@pytest.mark.parametrize("scale", [0.5, 3.0, 12.0])
def test_columns_match_float64(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits_RV = scale * torch.randn(300, V, generator=generator)
    realised_R = torch.randint(0, V, (300,), generator=generator)
    columns = _columns(logits_RV, realised_R, (1.0, 0.5, 2.0))
    double = logits_RV.double().numpy()
    log_z = np.log(np.exp(double).sum(-1))
    logprobs = double - log_z[:, None]
    realised = logprobs[np.arange(300), realised_R.numpy()]
    expected = {
        "logprob": realised,
        "rank": (logprobs > realised[:, None]).sum(-1),
        "argmax_id": logprobs.argmax(-1),
        "argmax_logprob": logprobs.max(-1),
        "entropy": -(np.exp(logprobs) * logprobs).sum(-1),
        **{f"starts@{name}": np.log(np.exp(logprobs[:, ids]).sum(-1)) for name, ids in _CLASSES.items()},
        **{f"log_z_ratio@{t:g}": np.log(np.exp(logprobs / t).sum(-1)) for t in (0.5, 2.0)},
        "log_z": log_z,
    }
    assert list(expected) == list(columns)
    for name, values in expected.items():
        np.testing.assert_allclose(columns[name], values, rtol=1e-5, atol=2e-5, err_msg=name)


def test_classes_that_hold_next_to_nothing_stand_at_the_floor() -> None:
    logits_RV = torch.zeros(1, V)
    logits_RV[0, _CLASSES["space"]] = -500.0
    logits_RV[0, _CLASSES["end"]] = -60.0
    columns = _columns(logits_RV, torch.zeros(1, dtype=torch.int64), (1.0,))
    assert columns["starts@space"] == STARTS_FLOOR_NATS
    # A little mass is summed by itself, not what others leave over.
    np.testing.assert_allclose(columns["starts@end"], -60.0 - np.log(V - 4), rtol=1e-6)


def test_stored_columns_are_whole_steps_and_say_so(tmp_path) -> None:
    rng = np.random.default_rng(0)
    names = scalar_columns((1.0, 2.0), log_z=True)
    values = (20 * rng.normal(size=(500, len(names)))).astype(np.float32)
    values[:, 1:3] = rng.integers(0, 2**24, (500, 2))
    scored = rng.random(500) < 0.9
    staged = stage_scalars(values, scored, (1.0, 2.0), log_z=True)
    storage = open_storage(str(tmp_path / "store"))
    upload(storage, staged)
    part = Part(storage, staged.digest)
    columns, found_scored = read_scalars(part)
    attributes = part.attributes("scalars")
    step = np.float32(attributes["step_nats"])
    assert list(columns) == names
    np.testing.assert_array_equal(found_scored, scored)
    for number, (name, column) in enumerate(columns.items()):
        assert np.isnan(column[~scored]).all()
        kept = column[scored]
        if name in attributes["whole_numbers"]:
            np.testing.assert_array_equal(kept, values[scored, number])
            continue
        np.testing.assert_array_equal(kept, np.rint(kept / step) * step)
        assert np.abs(kept - values[scored, number]).max() <= attributes["error_nats"] + 1e-5
    assert attributes["starts_floor_nats"] == STARTS_FLOOR_NATS
