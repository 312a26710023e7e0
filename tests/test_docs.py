"""What README and the pages under docs name is there: files, functions, tests, make targets, bench rows, links."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FILE = r"(?:[a-z_]+/)+[a-z_0-9.]+\.(?:py|yaml|md|json)"

pages = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)


@cache
def names_in(path: Path) -> frozenset[str]:
    """Functions, classes and `Class.method` that a module defines."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [n.name for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
            found.update(f"{node.name}.{name}" for name in methods)
    return frozenset(found)


@cache
def known_tests() -> frozenset[str]:
    found = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                found.add(node.name)
    return frozenset(found)


@pages
def test_files_that_a_page_names_exist(page: Path):
    named = set(re.findall(rf"`(?:[A-Za-z./]+ )*({FILE})[:` ]", page.read_text()))
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


@pages
def test_functions_that_a_page_names_exist(page: Path):
    named = re.findall(rf"`({FILE}):([A-Za-z_.]+)`", page.read_text())
    assert sorted(f"{file}:{name}" for file, name in named if name not in names_in(ROOT / file)) == []


@pages
def test_tests_that_a_page_names_exist(page: Path):
    named = set(re.findall(r"`(test_[a-z0-9_]+)`", page.read_text()))
    families = set(re.findall(r"`(test_[a-z]\d+_)\*`", page.read_text()))
    absent = named - known_tests() | {f for f in families if not any(name.startswith(f) for name in known_tests())}
    assert sorted(absent) == []


@pages
def test_links_between_pages_lead_somewhere(page: Path):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
        path = (page.parent / target) if target else page
        assert path.exists(), target
        headings = [re.sub(r"[^a-z0-9 -]", "", line.lower()).strip().replace(" ", "-")
                    for line in path.read_text().splitlines() if line.startswith("#")]  # fmt: skip
        assert not anchor or anchor in headings, f"{target}#{anchor}"


@pages
def test_commands_of_a_page_exist(page: Path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.MULTILINE)) <= targets
    commands = names_in(ROOT / "cluster/cli.py")
    assert set(re.findall(r"(?:^|`|bin/)tailrace ([a-z]+)\b", page.read_text(), re.MULTILINE)) <= commands


@pages
def test_bench_rows_of_a_page_are_measured(page: Path):
    benches = "".join(path.read_text() for path in (ROOT / "bench").glob("*.py"))
    rows = re.findall(r"^\| `([a-z]+\.[a-z0-9.]+)` \|", page.read_text(), re.MULTILINE)
    assert [row for row in rows if f'"{row}"' not in benches] == []


@pages
def test_a_page_names_no_path_of_a_machine(page: Path):
    assert re.findall(r"/tmp/|/work/|/root/|\.\./shared", page.read_text()) == []


def test_every_page_is_reached_from_the_readme():
    linked = set(re.findall(r"\]\((docs/[a-z_]+\.md)\)", PAGES[0].read_text()))
    assert linked == {str(page.relative_to(ROOT)) for page in PAGES[1:]}


def test_the_curl_line_of_the_readme_is_the_one_that_serve_prints():
    from tailrace.cluster.config import load_config, read_args, read_yaml
    from tailrace.cluster.local_serve import QUESTION, Plan, curl_line

    file = ROOT / "manifests/serve/local.yaml"
    args, http = read_args(file), read_yaml(file)["http_options"]
    printed = curl_line(Plan(args, load_config(args), http["host"], http["port"]))
    text = re.sub(r"\\\n\s*", "", PAGES[0].read_text())
    assert QUESTION in printed and printed in text
