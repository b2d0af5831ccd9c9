"""Packages import only what the map allows. Files are read, nothing of them is executed."""

import ast
import functools
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "ferrodist"

FOUNDATION = {
    "errors",
    "config",
    "reduce_op",
    "buffer",
    "call",
    "message_status",
    "deadline",
    "version",
    "tracebacks",
    "profiler",
}
ALLOWED = {
    "arrays": {"_native"},
    "schedules": set(),
    "rendezvous": {"_native"},
    "backends": {"arrays", "schedules", "rendezvous", "_native", "work"},
    "collectives": {"arrays", "backends", "work", "_native"},
    "testing": {"", "arrays", "backends", "collectives", "schedules", "torch", "work"},
    "parallel": {"", "arrays", "backends"},
    "torch": {"", "backends", "rendezvous", "work"},
    "launch": {"", "backends", "rendezvous", "testing", "_native"},
}
FRAMEWORKS = {"torch", "jax", "cupy", "ml_dtypes", "mpi4py", "ray"}
# Engines, launchers and what ranks of others first hear of each other through, each in one file.
FILES_OF_FRAMEWORKS = {
    "rendezvous/exchange.py": {"torch", "mpi4py"},
    "rendezvous/torch_store.py": {"torch"},
    "backends/engines/mpi_calls.py": {"mpi4py"},
    "backends/engines/torch_calls.py": {"torch"},
    "launch/ray_actors.py": {"ray"},
}
COMMAND_LINE = {"click", "rich"}


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def imports(path: Path) -> set[str]:
    """List the modules a file imports, in full, wherever the import stands."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            found |= (
                {f"ferrodist.{a.name}" for a in node.names} if module == "ferrodist" else {module}
            )
    return found


def packages_of(modules: set[str]) -> set[str]:
    """Name the packages; a public name of the package itself is the package ''."""
    packages = set()
    for module in modules:
        first, _, rest = module.partition(".")
        if first == "ferrodist":
            package = rest.partition(".")[0]
            is_ours = (PACKAGE / package).is_dir() or (PACKAGE / f"{package}.py").exists()
            packages.add(package if is_ours or package == "_native" else "")
    return packages


@pytest.mark.parametrize("package", ALLOWED)
def test_package_imports_only_packages_below_it(package):
    for path in (PACKAGE / package).rglob("*.py"):
        extra = packages_of(imports(path)) - ALLOWED[package] - FOUNDATION - {package}
        assert not extra, f"{path.relative_to(PACKAGE)} imports {sorted(extra)}"


def test_foundation_imports_only_itself_and_native_code():
    for name in FOUNDATION | {"work"}:
        extra = packages_of(imports(PACKAGE / f"{name}.py")) - FOUNDATION - {"_native"}
        assert not extra, f"{name}.py imports {sorted(extra)}"


def test_every_package_is_on_the_map():
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages == ALLOWED.keys()


def test_only_arrays_and_the_codec_name_a_framework():
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name in ("arrays", "contract", "parallel", "torch"):
            continue
        allowed = FILES_OF_FRAMEWORKS.get(str(path.relative_to(PACKAGE)), set())
        named = {module.partition(".")[0] for module in imports(path)} & (FRAMEWORKS - allowed)
        assert not named, f"{path.relative_to(PACKAGE)} imports {sorted(named)}"


def test_only_the_command_line_imports_click_and_rich():
    for path in PACKAGE.rglob("*.py"):
        if "launch" not in path.relative_to(PACKAGE).parts:
            named = {module.partition(".")[0] for module in imports(path)} & COMMAND_LINE
            assert not named, f"{path.relative_to(PACKAGE)} imports {sorted(named)}"


def test_nothing_reads_code_from_data():
    allowed = {
        "collectives/codec.py": {"pickle.loads"},  # asked for by name: pickle=True
        # between a process and those it has started itself, through files only they have open
        "launch/spawn.py": {"pickle.loads"},
        "launch/worker.py": {"pickle.loads"},
    }
    for path in PACKAGE.rglob("*.py"):
        found = {ast.unparse(n.func) for n in nodes_of(path) if isinstance(n, ast.Call)}
        banned = found & {
            "pickle.loads",
            "pickle.load",
            "eval",
            "exec",
            "marshal.loads",
            "os.system",
        }
        assert banned == allowed.get(str(path.relative_to(PACKAGE)), set()), path


def test_only_config_reads_the_environment():
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        assert path.name == "config.py" or not ("os.environ" in text or "getenv" in text), path
