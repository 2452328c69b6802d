"""logitstore: run the teacher once, keep what it said, train students from the store.

This package reads and writes stores and needs neither torch nor transformers. ``logitstore.producer`` fills a store,
``logitstore.consumer`` trains from one; they never import each other.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from logitstore.store import Store

__all__ = ["__version__", "open"]

__version__ = version("logitstore")


def open(url: str) -> Store:
    """Open an existing store for reading and writing.

    Args:
        url: a local path or any fsspec URL (``s3://bucket/store``, ``gs://...``, ``memory://...``).

    Raises:
        StoreError: nothing is there, or the store is of a newer format.
    """
    from logitstore.store import Store

    return Store.open(url)
