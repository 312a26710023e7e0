"""The laws of the house: who may import whom, how it is packaged, and that no test is left out of every make target."""

import ast
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("kernels", "model", "kv_cache", "transfer", "engine", "ctx_worker", "gen_worker", "router", "cluster")
FOLDERS = (*ROOMS, "manifests", "tests", "bench", "docs")

# kernels <- model <- kv_cache <- {transfer, engine} <- {ctx_worker, gen_worker, router} <- cluster
RANK = {
    "kernels": 0, "model": 1, "kv_cache": 2, "transfer": 3, "engine": 3,
    "ctx_worker": 4, "gen_worker": 4, "router": 4, "cluster": 5,
}  # fmt: skip
HEAVY = {"torch", "triton", "numba", "transformers", "nixl", "ray"}
# Parts of lower rooms that a torch-free process may use, and our own torch-free processes' roots.
TORCH_FREE_ROOTS = [
    "router", "cluster/config.py", "cluster/config_rules.py", "cluster/schema.py", "cluster/sizes.py",
    "cluster/discovery.py", "cluster/supervisor.py", "cluster/log.py", "transfer/messages.py", "transfer/frames.py",
    "transfer/links.py", "transfer/request_state.py", "transfer/faults.py", "transfer/metrics.py",
    "transfer/gen_core.py", "transfer/ctx_core.py", "kv_cache/layout.py", "kv_cache/block_hash.py",
    "kv_cache/index.py", "model/state_groups.py", "model/config.py", "model/source.py", "model/tokenizer.py",
]  # fmt: skip


def sources() -> list[Path]:
    return [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")) if "__pycache__" not in path.parts]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("tailrace", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(imported module, is it imported when the file itself is), `from a import b` giving both a and a.b."""
    tree = ast.parse(path.read_text())
    lazy = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for inner in ast.walk(node)}  # fmt: skip
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        eager = id(node) not in lazy and id(node) not in typing_only
        if isinstance(node, ast.Import):
            yield from ((alias.name, eager) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module, eager
            yield from ((f"{node.module}.{alias.name}", eager) for alias in node.names)


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "tailrace" and len(parts) > 1 and parts[1] in RANK else None


def test_rooms_import_one_way_only():
    wrong = []
    for path in sources():
        home = path.relative_to(ROOT).parts[0]
        for module, _ in imports(path):
            other = room_of(module)
            if other is not None and other != home and RANK[other] >= RANK[home]:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert wrong == []


def test_no_bare_import_of_our_folder_names():
    wrong = []
    for path in [*sources(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "bench").rglob("*.py")]:
        for module, _ in imports(path):
            if module.split(".")[0] in (*ROOMS, "manifests"):
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert wrong == []


def test_top_level_folders_carry_no_init_file():
    assert [name for name in FOLDERS if (ROOT / name / "__init__.py").exists()] == []
    assert not list(ROOT.glob("*/utils")) and not list(ROOT.glob("*/utils.py"))


def heavy_reach(root: str) -> list[str]:
    """Chains of eager imports from the module(s) at `root` to a heavy package."""
    by_name = {module_of(path): path for path in sources()}
    start = [p for p in sources() if str(p.relative_to(ROOT)) == root or p.relative_to(ROOT).parts[0] == root]
    assert start, f"{root} is not there"
    found, seen = [], set()
    queue = [(module_of(path), module_of(path)) for path in start]
    while queue:
        name, chain = queue.pop()
        if name in seen or name not in by_name:
            continue
        seen.add(name)
        for module, eager in imports(by_name[name]):
            if eager and module.split(".")[0] in HEAVY:
                found.append(f"{chain} -> {module}")
            elif eager:
                queue.append((module, f"{chain} -> {module}"))
    return found


@pytest.mark.parametrize("root", TORCH_FREE_ROOTS)
def test_a_torch_free_module_reaches_no_heavy_package(root):
    assert heavy_reach(root) == []


def test_importing_the_whole_router_loads_no_torch():
    names = [module_of(path) for path in sources() if path.relative_to(ROOT).parts[0] == "router"]
    code = f"import importlib, sys\nfor n in {names!r}: importlib.import_module(n)\nprint('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "False", result.stderr


def test_no_environment_variable_of_ours_and_no_path_of_a_machine():
    wrong = []
    for path in sources():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(r"TAILRACE_[A-Z]|/tmp/|/work/|/root/|\bTODO\b|\bFIXME\b", line):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert wrong == []


def test_files_and_functions_stay_short():
    long = []
    for path in sources():
        text = path.read_text()
        if text.count("\n") >= 600:
            long.append(f"{path.relative_to(ROOT)}: {text.count(chr(10))} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length >= 90:
                    long.append(f"{path.relative_to(ROOT)}: {node.name} has {length} lines")
    assert long == []


def test_every_module_says_what_it_is_for():
    assert [str(p.relative_to(ROOT)) for p in sources() if not ast.get_docstring(ast.parse(p.read_text()))] == []


# ------------------------------------------------------------------------------------------------------- packaging

IMPORT_ALL = """
import importlib, pathlib, sys
target, site, optional = sys.argv[1], sys.argv[2], set(sys.argv[3].split(","))
sys.path[:0] = [target]
sys.path.append(site)  # no .pth file is read, so an editable install of this project is out of sight
names = []
for path in sorted(pathlib.Path(target, "tailrace").rglob("*.py")):
    names.append(".".join(path.relative_to(target).with_suffix("").parts).removesuffix(".__init__"))
for name in names:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in optional:
            raise
    else:
        assert module.__file__.startswith(target), module.__file__
print(len(names))
"""


@pytest.fixture(scope="module")
def wheel_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel, built from a copy of the checkout, is installed alone."""
    copy, dist, site = (tmp_path_factory.mktemp(name) for name in ("copy", "dist", "site"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    for room in (*ROOMS, "manifests"):
        shutil.copytree(ROOT / room, copy / room, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", dist, copy], check=True, timeout=240)
    (wheel,) = dist.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True, timeout=120)
    return site


def test_every_module_imports_from_the_wheel_alone(wheel_site: Path, tmp_path: Path):
    command = [sys.executable, "-I", "-S", "-c", IMPORT_ALL, wheel_site, sysconfig.get_path("purelib")]
    result = subprocess.run(
        [*command, "nixl,triton,ucxx,cutlass,transformers,numba,llvmlite"],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) == len(sources())


def test_the_wheel_carries_manifests_and_the_command(wheel_site: Path):
    for name in ("config.schema.json", "serve/local.yaml", "serve/full.yaml"):
        assert (wheel_site / "tailrace/manifests" / name).read_bytes() == (ROOT / "manifests" / name).read_bytes()
    (entry,) = wheel_site.glob("tailrace-*.dist-info/entry_points.txt")
    assert "tailrace = tailrace.cluster.cli:main" in entry.read_text()


def test_the_wheel_owns_no_top_level_name_but_ours(wheel_site: Path):
    top = {p.name for p in wheel_site.iterdir() if not p.name.endswith(".dist-info") and p.name != "bin"}
    assert top == {"tailrace"}


# ---------------------------------------------------------------------------------------------- nothing is left out


def test_every_test_is_run_by_a_make_target(collected: dict[str, set[str]]):
    files = {str(p.relative_to(ROOT)) for p in (ROOT / "tests").rglob("test_*.py")}
    found = {node.split("::")[0] for node in collected}
    if len(found) < len(files) / 2:
        pytest.skip("only some of the tests were asked for")
    assert found == files
    makefile = (ROOT / "Makefile").read_text()
    (here,) = re.findall(r"^HERE := (.+)$", makefile, re.MULTILINE)
    commands = makefile.replace("$(HERE)", here)
    targets = re.findall(r'\$\(PYTEST\) (?:-n .*)?-m "?([a-z_ ]+?)"?(?: -| tests|\n)', commands)
    assert len(targets) == 6
    chosen = [Expression.compile(text) for text in targets]
    skipped = [node for node, marks in collected.items() if not any(e.evaluate(lambda m: m in marks) for e in chosen)]  # noqa: B023
    assert skipped == []


def test_ci_runs_the_tests():
    text = (ROOT / ".ci/run").read_text()
    assert "make test" in text
    assert (ROOT / ".ci/run").stat().st_mode & 0o111
