"""The shape of the code base: which folders are packages, who may import whom, and what a reader never loads."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("logitstore", "producer", "consumer", "cli")
HEAVY = {"torch", "transformers", "safetensors", "tensorboard", "accelerate", "ray"}
MAY_IMPORT = {
    "logitstore": set(),
    "producer": {"logitstore"},
    "consumer": {"logitstore"},
    "cli": {"logitstore", "producer", "consumer"},
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# What the extras s3 and gcs bring: the storage asks for it within functions, when it is given such a URL.
OF_EXTRAS = {"aiohttp", "gcsfs", "obstore"}


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Dotted names of all modules that a file imports, anywhere in it, but for type checkers alone."""
    tree = ast.parse(path.read_text())
    unused = {id(node) for guard in ast.walk(tree) if is_type_checking(guard) for node in ast.walk(guard)}
    for node in ast.walk(tree):
        if id(node) in unused:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_at_the_top(path: Path) -> Iterator[str]:
    """Those that importing the file runs, less those within conditions."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def folder_of(module: str) -> str | None:
    """The folder that a module of ours lies in."""
    first, _, rest = module.partition(".")
    if first != "logitstore":
        return None
    second = rest.partition(".")[0]
    return second if second in FOLDERS else "logitstore"


def test_package_list_is_the_folders_there_are():
    setuptools = PROJECT["tool"]["setuptools"]
    found = {
        path.parent.relative_to(ROOT).as_posix().replace("/", ".")
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("__init__.py")
    }
    expected = {name if name.split(".")[0] == "logitstore" else f"logitstore.{name}" for name in found}
    assert set(setuptools["packages"]) == expected
    assert setuptools["package-dir"] == {"logitstore": "logitstore"} | {f"logitstore.{f}": f for f in FOLDERS[1:]}


def test_every_folder_with_code_is_a_package():
    folders = {path.parent for folder in FOLDERS for path in sources(folder)}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_point_down_only(folder):
    for path in sources(folder):
        for module in imports(path):
            target = folder_of(module)
            assert target in MAY_IMPORT[folder] | {folder, None}, f"{path.relative_to(ROOT)} imports {module}"
            assert module.partition(".")[0] not in {"producer", "consumer", "cli"}, f"{path}: short name {module}"


def test_library_imports_nothing_heavy_anywhere():
    for path in sources("logitstore"):
        assert not {module.partition(".")[0] for module in imports(path)} & HEAVY, path


def test_library_imports_only_its_dependencies():
    """Whatever a reader needs is installed with it; the rest are imports within functions that say what is missing."""
    names = {line.split(">")[0].split("[")[0].replace("-", "_") for line in PROJECT["project"]["dependencies"]}
    known = names | {"yaml", "google_crc32c", "logitstore", "huggingface_hub"} | set(sys.stdlib_module_names)
    for path in sources("logitstore"):
        found = {module.partition(".")[0] for module in imports(path)}
        assert found <= known | (OF_EXTRAS if path.parent.name == "storage" else set()), path
        assert not OF_EXTRAS & {module.partition(".")[0] for module in imports_at_the_top(path)}, path


@pytest.mark.parametrize("name", FOLDERS[1:])
def test_short_name_is_refused(name):
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nimport {name}"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode != 0
    assert f"ImportError: import logitstore.{name}, not {name}" in result.stderr


def test_opening_a_store_loads_no_torch(tmp_path):
    script = (
        "import sys, logitstore\n"
        "from logitstore.store import Store\n"
        "from logitstore.verification import verify\n"
        "from logitstore.inspection import describe_store\n"
        "Store.open_or_create(sys.argv[1])\n"
        "store = logitstore.open(sys.argv[1])\n"
        "assert verify(store).faults == () and describe_store(store)['datasets'] == {}\n"
        f"print(sorted({HEAVY!r} & {{name.partition('.')[0] for name in sys.modules}}))"
    )
    result = subprocess.run([sys.executable, "-c", script, str(tmp_path / "s")], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_importing_the_package_alone_is_cheap():
    script = "import sys, logitstore; print(sorted({'zarr', 'numpy', 'pyarrow', 'numba', 'torch'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout == "[]\n"


@pytest.mark.parametrize("codec", ["sparse_rows", "quantised"])
def test_codecs_are_registered_for_those_who_only_have_zarr(codec):
    entry = PROJECT["project"]["entry-points"]["zarr.codecs"][f"logitstore.{codec}"]
    assert entry.startswith(f"logitstore.codecs.{codec}:")
    script = f"from zarr.registry import get_codec_class; print(get_codec_class('logitstore.{codec}').__module__)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout == f"logitstore.codecs.{codec}\n"


def test_all_extra_holds_every_other():
    extras = PROJECT["project"]["optional-dependencies"]
    (all_extras,) = extras["all"]
    assert set(all_extras.partition("[")[2].rstrip("]").split(",")) == set(extras) - {"all", "dev"}
