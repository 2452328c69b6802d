"""What all tests share. One thread: small tensors are slower on two, and much slower on a busy machine."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from hypothesis import settings

# Numba compiles within the first example, so no example has a deadline.
settings.register_profile("logitstore", deadline=None)
settings.load_profile("logitstore")
