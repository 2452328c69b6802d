"""Counter-based random numbers: equal to a reference in plain integers, keyed by all they are for, and uniform."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from logitstore.counter_random import uniform_words

WORDS = st.integers(0, 2**64 - 1)


def reference(seed: int, digest: int, position: int) -> int:
    """The definition, in Python's integers."""

    def mix(word: int) -> int:
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
        return word ^ (word >> 31)

    golden = 0x9E3779B97F4A7C15
    state = mix((seed + golden) % 2**64)
    state = mix(state ^ digest)
    return mix((state + (position + 1) * golden) % 2**64)


def words_of(seed: int, keys: list[tuple[int, int]]) -> np.ndarray:
    digests = np.array([digest for digest, _ in keys], np.uint64)
    return uniform_words(seed, digests, np.array([position for _, position in keys], np.int64))


@settings(max_examples=60)
@given(WORDS, st.lists(st.tuples(WORDS, st.integers(0, 2**40)), max_size=8))
def test_uniform_words_equal_the_reference(seed, keys):
    assert words_of(seed, keys).tolist() == [reference(seed, *key) for key in keys]


def test_uniform_words_of_known_keys_are_pinned():
    """What was sampled once must be sampled again, on any machine and in any release."""
    found = words_of(7, [(0, 0), (0, 1), (2**64 - 1, 12345)])
    assert [f"{word:016x}" for word in found.tolist()] == ["f33dc6bd55ffa86b", "e1332a7db412c5a9", "ae9dd4ea25fc0dac"]


def test_uniform_words_do_not_depend_on_order_or_company():
    rng = np.random.default_rng(0)
    digests, positions = rng.integers(0, 2**64, 500, np.uint64), rng.integers(0, 10**6, 500)
    words = uniform_words(3, digests, positions)
    order = rng.permutation(500)
    assert (uniform_words(3, digests[order], positions[order]) == words[order]).all()
    assert (
        np.concatenate([uniform_words(3, digests[n : n + 1], positions[n : n + 1]) for n in range(500)]) == words
    ).all()


def test_uniform_words_differ_by_seed_document_and_position():
    positions = np.arange(1000)
    rows = [
        uniform_words(seed, np.full(1000, digest, np.uint64), positions)
        for seed, digest in [(0, 0), (1, 0), (0, 1), (1, 1), (2**64 - 1, 0)]
    ]
    assert len(np.unique(rows)) == 5000


def test_uniform_words_are_uniform_and_independent_between_neighbours():
    words = uniform_words(11, np.full(1 << 16, 42, np.uint64), np.arange(1 << 16))
    for shift in (56, 28, 0):  # high, middle and low byte
        counts = np.bincount((words >> np.uint64(shift)).astype(np.uint8), minlength=256)
        chi_squared = ((counts - 256) ** 2 / 256).sum()
        assert 255 - 5 * np.sqrt(510) < chi_squared < 255 + 5 * np.sqrt(510)
    units = words / 2.0**64
    assert abs(np.corrcoef(units[:-1], units[1:])[0, 1]) < 5 / np.sqrt(len(units))
    bits = np.unpackbits((words[1:] ^ words[:-1]).view(np.uint8)).mean()
    assert abs(bits - 0.5) < 5 * 0.5 / np.sqrt(64 * len(words))
