"""What README.md and docs/ say about the code, where the code can be asked."""

from __future__ import annotations

import ast
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


def test_private_names_are_found() -> None:
    source = (
        "import a._b\nfrom c import _d\nfrom e._f import g\nself._h, h._i, j.__k__, m._n._o\nfrom __future__ import x\n"
    )
    assert sorted(private_names(source)) == ["_d", "_f", "a._b", "h._i", "m._n", "m._n._o"]


def test_readme_names_every_file_that_takes_private_names() -> None:
    (said,) = re.findall(r"The few private names that are needed stand in (.*?); tests", README, re.DOTALL)
    named = set(re.findall(r"`([^`]+\.py)`", said))
    takers = {path for path in (ROOT / "vime").rglob("*.py") if list(private_names(path.read_text()))}
    assert named == {str(path.relative_to(ROOT / "vime")) for path in takers}


def test_run_directories_are_named_as_the_code_names_them(tmp_path: Path) -> None:
    form = re.sub(r"\d", "0", new_run_dir(tmp_path).name)
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("scripts/*.sh")]
    named = [(page.name, name) for page in pages for name in re.findall(r"\bruns/(\d[\w-]*)", page.read_text())]
    assert ("README.md", "20261129-120500") in named
    assert [(page, name) for page, name in named if re.sub(r"\d", "0", name) != form] == []
