#!/usr/bin/env bash
# Checks and times everything that needs a GPU, and prints a table last. `--dry-run` does the same on a CPU with tiny
# sizes. Set PYTHON to choose an interpreter; nothing is installed: what is missing is named.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then PYTHON=python3; [ -x .venv/bin/python ] && PYTHON=.venv/bin/python; fi

"$PYTHON" - <<'PY'
import importlib.util, sys
needed = (
    *("blake3", "fsspec", "google_crc32c", "jinja2", "numba", "numcodecs", "numpy", "pyarrow", "rich", "safetensors"),
    *("tokenizers", "torch", "transformers", "zarr"),
)
missing = [name for name in needed if importlib.util.find_spec(name) is None]
sys.exit(f"missing Python packages: {', '.join(missing)}" if missing else 0)
PY

# Where logitstore is not installed, lay it out as it is imported.
if ! "$PYTHON" -c 'import logitstore' 2>/dev/null; then
  tree=build/gpu-tree && rm -rf $tree && mkdir -p $tree/logitstore $tree/logitstore-0.1.0.dist-info
  ln -s "$PWD"/logitstore/* "$PWD"/producer "$PWD"/consumer "$PWD"/cli $tree/logitstore/
  printf 'Metadata-Version: 2.1\nName: logitstore\nVersion: 0.1.0\n' > $tree/logitstore-0.1.0.dist-info/METADATA
  export PYTHONPATH="$PWD/$tree${PYTHONPATH:+:$PYTHONPATH}"
fi

if [ "${1:-}" = --dry-run ]; then
  exec "$PYTHON" benchmarks/throughput.py --dry-run --device cpu
fi
"$PYTHON" -c 'import torch, sys; sys.exit(None if torch.cuda.is_available() else "no CUDA device; --dry-run runs on a CPU")'
"$PYTHON" benchmarks/throughput.py --size 1b
"$PYTHON" benchmarks/throughput.py --size 8b --repeats 3
