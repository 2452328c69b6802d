"""What all tests share. One thread: small tensors are slower on two, and much slower on a busy machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cross_store import CrossStore
    from small_store import SmallStore

# Numba compiles within the first example, so no example has a deadline.
settings.register_profile("logitstore", deadline=None)
settings.load_profile("logitstore")


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallStore:
    """The store that the tests of consumer and command line share; they must not change it."""
    from small_store import build_small_store  # torch only where it is needed

    return build_small_store(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def cross(tmp_path_factory: pytest.TempPathFactory) -> CrossStore:
    """The store whose tokenizers disagree; tests must not change it, either."""
    from cross_store import build_cross_store

    return build_cross_store(tmp_path_factory.mktemp("cross"))


@pytest.fixture
def settings_of_torch() -> Iterator[None]:
    """Puts back what ``logitstore train`` sets for its process; left alone, later tests are many times slower."""
    import torch

    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
