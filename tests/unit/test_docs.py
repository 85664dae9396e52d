"""What README.md and docs/ say about the code, where the code can be asked."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from vime.observe.tracker import new_run_dir

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def private_names(source: str) -> Iterator[str]:
    """Names with one underscore in front that a module takes from elsewhere: imported, or of an object other than its
    own. Ours never do that to each other."""

    def is_private(name: str) -> bool:
        return name.startswith("_") and not name.startswith("__")

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from (part for part in parts if is_private(part))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if any(map(is_private, alias.name.split("."))))


def private_overrides(source: str) -> Iterator[str]:
    """Private methods of a class of another package that a class derived from it replaces: where that package calls
    them by another name, they are called no more."""
    tree = ast.parse(source)
    modules = {
        alias.asname or alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for base in (ast.unparse(base) for base in node.bases):
                if not modules.get(base, "vime").startswith("vime"):
                    yield from private_methods(node) & inherited(modules[base].split("."), base)


def private_methods(node: ast.ClassDef) -> set[str]:
    names = {method.name for method in node.body if isinstance(method, ast.FunctionDef)}
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def inherited(module: list[str], name: str) -> set[str]:
    """Private methods of a class of an installed package, read from its source: importing Megatron changes torch."""
    found = importlib.util.find_spec(module[0])
    if found is None or not found.submodule_search_locations:
        return set()
    place = Path(found.submodule_search_locations[0], *module[1:])
    files = [*place.glob("*.py")] if place.is_dir() else [place.with_suffix(".py")]
    classes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    return {m for c in classes if isinstance(c, ast.ClassDef) and c.name == name for m in private_methods(c)}


def test_private_overrides_are_found() -> None:
    source = "from email.message import Message\n"
    body = "    def _get_params_preserve(self): ...\n    def _own(self): ...\n"
    assert list(private_overrides(f"{source}class One(Message):\n{body}")) == ["_get_params_preserve"]


def test_private_names_are_found() -> None:
    source = (
        "import a._b\nfrom c import _d\nfrom e._f import g\nself._h, h._i, j.__k__, m._n._o\nfrom __future__ import x\n"
    )
    assert sorted(private_names(source)) == ["_d", "_f", "a._b", "h._i", "m._n", "m._n._o"]


def test_readme_names_every_file_that_takes_private_names() -> None:
    (said,) = re.findall(r"The few private names that are needed stand in (.*?); tests", README, re.DOTALL)
    of_megatron, rest = said.split(" of `backends/megatron_utils/`")
    named = {f"backends/megatron_utils/{name}" for name in re.findall(r"`([^`]+\.py)`", of_megatron)}
    named |= set(re.findall(r"`([^`]+\.py)`", rest))
    takers = {
        path
        for path in (ROOT / "vime").rglob("*.py")
        if [*private_names(path.read_text()), *private_overrides(path.read_text())]
    }
    assert named == {str(path.relative_to(ROOT / "vime")) for path in takers}


def test_run_directories_are_named_as_the_code_names_them(tmp_path: Path) -> None:
    form = re.sub(r"\d", "0", new_run_dir(tmp_path).name)
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("scripts/*.sh")]
    named = [(page.name, name) for page in pages for name in re.findall(r"\bruns/(\d[\w-]*)", page.read_text())]
    assert ("README.md", "20261129-120500") in named
    assert [(page, name) for page, name in named if re.sub(r"\d", "0", name) != form] == []
