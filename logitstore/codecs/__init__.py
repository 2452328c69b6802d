"""Zarr v3 codecs of the store, registered through the ``zarr.codecs`` entry point.

Their modules import Numba, which takes a second and 70 MB: who only looks at what is stored does without.
"""

SPARSE_ROWS = "logitstore.sparse_rows"
QUANTISED = "logitstore.quantised"
