"""Tables that many threads read at once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from logitstore.tables import StoredTable, write_table


def test_a_table_is_read_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """pyarrow's reader crashes otherwise, now and then."""
    table = StoredTable(write_table({"n": pa.array([1, 2, 3])}, {}))
    file, active, most = table._file, [0], [0]

    class Watched:
        def read(self, *arguments: Any, **options: Any) -> pa.Table:
            active[0] += 1
            most[0] = max(most[0], active[0])
            time.sleep(0.01)  # lets the others in, if they can
            active[0] -= 1
            return file.read(*arguments, **options)

    monkeypatch.setattr(table, "_file", Watched())
    with ThreadPoolExecutor(4) as pool:
        for values in pool.map(lambda _: table.values("n"), range(8)):
            np.testing.assert_array_equal(values, [1, 2, 3])
    assert most[0] == 1
