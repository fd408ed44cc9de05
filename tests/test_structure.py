"""Holds the layout: which part may import which, what starts fast, how long things are, and that all have tests.

Imports go one way: errors, units <- recipe <- memory <- model, data <- training, export, report <- train <- commands
<- cli. Each row of the table below stands on those above it.
Everything is read from the source with `ast`; nothing is imported, so a heavy library costs nothing here.
"""

from __future__ import annotations

import ast
import fnmatch
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "lowmem_ft"

# The import table. A part may import parts of the rows above its own, and itself. `__init__` holds the public helpers.
TABLE = [
    ["errors", "units"],
    ["recipe"],
    ["memory"],
    ["model", "data"],
    ["training", "export", "report"],
    ["train"],
    ["commands"],
    ["cli"],
    ["__init__"],
]
ROW = {part: row for row, parts in enumerate(TABLE) for part in parts}

# The mechanisms of memory/ are each usable alone on any model. These four are not mechanisms and may use the others.
MEMORY_ABOVE_MECHANISMS = {"measure", "estimate", "plan", "recover"}

# What most mechanisms ask: where the blocks of a model are, so that each can be applied to any model by one call; in
# which type the processor multiplies; and what a linear layer consists of. The last three are parts of recompute.
MEMORY_BELOW_MECHANISMS = {"blocks", "products", "linears", "plain_attention", "replay", "segments", "selective"}

# `plan` and `check` must start fast, and a recipe error must end the program before torch is imported.
STARTS_FAST = ["__init__", "cli", "commands", "train", "errors", "units", "recipe"]
HEAVY = {"accelerate", "bitsandbytes", "datasets", "peft", "torch", "transformers"}

MOST_MODULE_LINES = 400
MOST_FUNCTION_LINES = 60
NOT_A_NAME = {"utils", "util", "common", "misc", "helpers"}

# Modules with no test file of their own, and why.
WITHOUT_TEST: dict[str, str] = {}

FEWEST_MODULES = 60


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name below `lowmem_ft`; a package is named without its `__init__`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
        if parts[-1] == "__init__" and len(parts) > 1:
            parts.pop()
        found[".".join(parts)] = path
    return found


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text("utf-8"))


def part_of(module: str) -> str:
    return module.split(".")[0]


def statements(body: list[ast.stmt], *, at_import_only: bool) -> Iterator[ast.stmt]:
    """All statements below `body`; with `at_import_only`, without functions and `if TYPE_CHECKING:` blocks."""
    for statement in body:
        yield statement
        if at_import_only and isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if at_import_only and isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            yield from statements(statement.orelse, at_import_only=True)
            continue
        for child in ast.iter_child_nodes(statement):
            if isinstance(child, ast.stmt):
                yield from statements([child], at_import_only=at_import_only)
            elif isinstance(child, ast.ExceptHandler | ast.match_case):
                yield from statements(child.body, at_import_only=at_import_only)


def imports(module: str, *, at_import_only: bool = False) -> set[str]:
    """Full names of what a module imports: `torch.nn`, and of its own package the module meant, `lowmem_ft.units`."""
    package = ["lowmem_ft", *module.split(".")]
    if modules()[module].name != "__init__.py" or module == "__init__":
        package.pop()
    found = set()
    for statement in statements(tree(module).body, at_import_only=at_import_only):
        if isinstance(statement, ast.Import):
            found |= {name.name for name in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            above = package[: len(package) - statement.level + 1] if statement.level else []
            base = ".".join([*above, *([statement.module] if statement.module else [])])
            for name in statement.names:
                if (base, name.name) == ("lowmem_ft", "__version__"):
                    continue  # a text, not a part
                whole = f"{base}.{name.name}"
                found.add(whole if whole.removeprefix("lowmem_ft.") in modules() else base)
    return found


def own_imports(module: str, *, at_import_only: bool = False) -> set[str]:
    """The modules of lowmem_ft that a module imports."""
    names = imports(module, at_import_only=at_import_only)
    own = {name.removeprefix("lowmem_ft.") for name in names if name.startswith("lowmem_ft.")}
    return own | ({"__init__"} if "lowmem_ft" in names else set())


def none_of(wrong: list[str]) -> None:
    """Fails with all that is wrong, one a line; pytest would shorten the list."""
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)


def test_enough_modules_are_seen() -> None:
    assert len(modules()) >= FEWEST_MODULES, sorted(modules())


def test_every_module_has_a_place_in_the_import_table() -> None:
    none_of([module for module in modules() if part_of(module) not in ROW])


def test_imports_go_one_way() -> None:
    wrong = []
    for module in modules():
        here = part_of(module)
        for target in own_imports(module):
            there = part_of(target)
            if here != there and not ROW.get(there, -1) < ROW.get(here, len(TABLE)):
                wrong.append(f"{module} imports {target}: {there} is not below {here}")
    none_of(wrong)


def test_own_imports_name_modules_that_exist() -> None:
    wrong = [
        f"{module} imports {target}"
        for module in modules()
        for target in own_imports(module)
        if target not in modules()
    ]
    none_of(wrong)


def test_memory_mechanisms_stand_alone() -> None:
    wrong = []
    for module in modules():
        if part_of(module) != "memory" or module == "memory":
            continue
        for target in own_imports(module):
            if part_of(target) == "recipe":
                wrong.append(f"{module} imports {target}: give it plain numbers")
            elif (
                part_of(target) == "memory"
                and module.split(".")[1] not in MEMORY_ABOVE_MECHANISMS
                and target.split(".")[1] not in MEMORY_BELOW_MECHANISMS
            ):
                wrong.append(f"{module} imports {target}: mechanisms do not know each other")
    none_of(wrong)


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {module: own_imports(module, at_import_only=True) for module in modules()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        none_of(["circle: " + " <- ".join(error.args[1])])


def test_heavy_libraries_are_not_imported_before_they_are_needed() -> None:
    """Follows the imports that run at import time, the packages on the way included."""
    ways = {module: module for module in modules() if part_of(module) in STARTS_FAST}
    waiting, wrong = list(ways), []
    while waiting:
        module = waiting.pop()
        heavy = {name.split(".")[0] for name in imports(module, at_import_only=True)} & HEAVY
        wrong += [f"{ways[module]} -> {name}" for name in sorted(heavy)]
        for target in sorted(own_imports(module, at_import_only=True)):
            for step in (part_of(target), target):  # importing memory.loss runs memory/__init__.py first
                if step in modules() and step not in ways:
                    ways[step] = f"{ways[module]} -> {step}"
                    waiting.append(step)
    none_of(wrong)


def test_modules_are_short() -> None:
    lengths = {module: len(path.read_text("utf-8").splitlines()) for module, path in modules().items()}
    none_of([f"{module} has {lines} lines" for module, lines in lengths.items() if lines > MOST_MODULE_LINES])


def test_functions_are_short() -> None:
    """Counted from `def` to the last line, docstring included."""
    seen, long = 0, []
    for module in modules():
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                seen += 1
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > MOST_FUNCTION_LINES:
                    long.append(f"{module}.{node.name} has {lines} lines")
    assert seen >= FEWEST_MODULES
    none_of(long)


def test_names_say_what_a_module_is_for() -> None:
    none_of([module for module in modules() if set(module.split(".")) & NOT_A_NAME])


def test_every_module_has_a_test_file_that_mirrors_it() -> None:
    missing = []
    for module, path in modules().items():
        if path.name == "__init__.py":
            continue
        below = path.relative_to(PACKAGE)
        mirror = ROOT / "tests" / below.parent / f"test_{below.name}"
        if module in WITHOUT_TEST:
            assert not mirror.exists(), f"{module} has a test file now: take it out of WITHOUT_TEST"
        elif not mirror.exists():
            missing.append(f"{module} needs {mirror.relative_to(ROOT)}, or a line with the reason in WITHOUT_TEST")
    none_of(missing)
    none_of(
        [f"{module} is in WITHOUT_TEST and not in the package" for module in WITHOUT_TEST if module not in modules()]
    )


def test_every_folder_and_file_of_the_package_is_installed() -> None:
    """A folder without `__init__.py` or a file that pyproject.toml does not list works here, and a wheel lacks it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    listed = settings.get("package-data", {})
    wrong = []
    for path in PACKAGE.rglob("*"):
        if "__pycache__" in path.parts or path.is_dir():
            continue
        if not (path.parent / "__init__.py").exists():
            wrong.append(f"{path.parent.relative_to(ROOT)} has no __init__.py")
        patterns = [
            pattern
            for package in ("*", *(".".join(path.relative_to(ROOT).parts[:-1]),))
            for pattern in listed.get(package, [])
        ]
        if path.suffix != ".py" and not any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns):
            wrong.append(f"{path.relative_to(ROOT)} is not in [tool.setuptools.package-data]")
    none_of(sorted(set(wrong)))


@pytest.mark.parametrize(
    ("source", "everywhere", "at_import"),
    [
        ("import torch.nn", {"torch.nn"}, {"torch.nn"}),
        ("def f():\n    import torch", {"torch"}, set()),
        ("if TYPE_CHECKING:\n    import torch\nelse:\n    import json", {"torch", "json"}, {"json"}),
        (
            "try:\n    import a\nexcept ImportError:\n    import b\nfinally:\n    import c",
            {"a", "b", "c"},
            {"a", "b", "c"},
        ),
        ("class C:\n    import a\n    def f(self):\n        import b", {"a", "b"}, {"a"}),
        ("with x:\n    from a.b import c", {"a.b"}, {"a.b"}),
        (
            "from lowmem_ft import units, nothing_there",
            {"lowmem_ft.units", "lowmem_ft"},
            {"lowmem_ft.units", "lowmem_ft"},
        ),
        ("from . import units\nfrom .errors import Problem", {"lowmem_ft.units", "lowmem_ft.errors"}, None),
    ],
)
def test_reading_of_imports(
    source: str, everywhere: set[str], at_import: set[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "tree", lambda module: ast.parse(source))
    assert imports("errors") == everywhere
    assert imports("errors", at_import_only=True) == (everywhere if at_import is None else at_import)
