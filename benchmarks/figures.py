"""How large the code is and how it hangs together, beside limits that it may not outgrow.

    tools/figures            each figure, and its limit in pyproject.toml; exit 1 if one is above
    tools/figures --where    also where in the code each figure comes from
    tools/figures --calls    also the way of a call, which takes a running service (ten seconds)

A limit is lowered by whoever brings a figure down. May rely on the standard library, grimp (which
the layers step installs) and `benchmarks.call_trace`.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import grimp

from benchmarks import call_trace
from pinlaterd.model import Method

ROOT = Path(__file__).parent.parent
PACKAGE = "pinlaterd"
SMALL_MODULE_LINES = 80
ENGINES = ("sqlite", "mysql", "redis")
# The method and the ack rule whose spread over files stands for that of others.
METHOD_NAME = re.compile("checkpoint", re.IGNORECASE)
ACK_NAME = re.compile("^Ack(Info|Request|Op)?$")
# Where nodes of the syntax tree have names: of variables, attributes, parameters, definitions,
# imports, patterns, `global`.
_NAME_FIELDS = frozenset(
    ("id", "attr", "arg", "name", "asname", "module", "kwd_attrs", "rest", "names")
)
# A docstring that begins with one of these has a clause or a phrase where its verb should be: "What
# a shard holds.", "Of the claims: the oldest first." Articles are left out, since with them begins
# what a class or a value is ("The claims of one queue."), although as a function's first word they
# are no better.
FRAGMENT = re.compile(
    r"(all|as|how|of|that|those|what|whatever|where|which|who|whoever|whom|whose|why)\b",
    re.IGNORECASE,
)
# A function's docstring does not begin with a verb in the imperative if its first word is one of
# these, is in capitals, ends with one "s" (a plural, or "Returns"), or is no word.
NO_VERB = re.compile(
    r"\W|[A-Z_]{2,}\b|\w*[^\Ws]s\b"
    r"|(?i:a|about|after|all|also|an|another|any|around|at|before|behind|below|beside|between|both"
    r"|during|each|every|for|from|how|if|in|it|itself|like|more|most|mostly|no|nobody|none|not"
    r"|nothing|of|on|once|one|only|other|several|so|something|that|the|there|these|this|those|to"
    r"|until|up|what|when|where|whether|which|while|who|why|with|within|without)\b"
)
_ATTRIBUTES = {"property", "cached_property"}  # whose docstrings may name what they are
# In Thrift's binary protocol each header of a field has a zero byte, as most lengths have, and each
# header of a message its version, 0x8001; in a pattern they are written as escapes.
_THRIFT_BYTES = re.compile(rb"\0|\\x00|\\0|\x80\x01|\\x80\\x01")
_METHODS = frozenset(method.encode() for method in Method)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Figure(NamedTuple):
    """`key` names its limit in pyproject.toml; `where`: what the figure is about, or adds up."""

    key: str
    value: int
    where: str = ""


class Module:
    """One source file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = path.read_text(encoding="utf-8")
        self.lines = self.text.count("\n")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def name(self) -> str:
        """Relative to the repository."""
        return str(self.path.relative_to(ROOT))

    @property
    def dotted(self) -> str:
        return ".".join(self.path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")

    def classes(self) -> Iterator[tuple[int, str]]:
        """The lines and the name of each."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef):
                yield (node.end_lineno or node.lineno) - node.lineno + 1, node.name

    def public_classes(self) -> Iterator[str]:
        """List the names of those that other modules can import."""
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name

    def docstrings(self) -> Iterator[str]:
        """List those of the module, its classes and its functions, nested ones included."""
        for node in ast.walk(self.tree):
            if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
                yield text

    def docstrings_of_functions(self) -> Iterator[str]:
        """List those of functions and methods; leave out properties, and what "Raises" alone."""
        for node in ast.walk(self.tree):
            if (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                and (text := ast.get_docstring(node))
                and not text.startswith("Raises ")
                and _ATTRIBUTES.isdisjoint(map(ast.unparse, node.decorator_list))
            ):
                yield text

    def byte_literals(self) -> Iterator[tuple[int, bytes]]:
        """List each with its line."""
        for node in ast.walk(self.tree):
            match node:
                case ast.Constant(value=bytes(literal)):
                    yield node.lineno, literal

    def names(self) -> Iterator[tuple[int, str]]:
        """Every name in the code, with its line: those of imported modules and of patterns, too;
        neither comments nor docstrings."""
        for node in ast.walk(self.tree):
            for field, value in ast.iter_fields(node):
                if field in _NAME_FIELDS:
                    line = getattr(node, "lineno", 0)
                    names = value if isinstance(value, list) else [value]
                    yield from ((line, name) for name in names if isinstance(name, str))

    def strings(self) -> Iterator[tuple[int, str]]:
        """Every constant text, docstrings left out."""
        nodes = list(ast.walk(self.tree))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            match node:
                case ast.Constant(value=str(text)) if id(node) not in docstrings:
                    yield node.lineno, text


def modules_under(folder: str) -> list[Module]:
    return [Module(path) for path in sorted((ROOT / folder).rglob("*.py"))]


# --- size -----------------------------------------------------------------------------------


def size(modules: Sequence[Module], settings: Mapping[str, object]) -> Iterator[Figure]:
    yield _lines("lines", modules)
    by_folder = Counter(_folder(module) for module in modules if module.lines)
    yield Figure("modules", by_folder.total(), _most_first(by_folder))
    lines, name = max((module.lines, module.name) for module in modules)
    yield Figure("longest_module", lines, name)
    lines, name = max(found for module in modules for found in module.classes())
    yield Figure("longest_class", lines, name)
    yield _lines("test_lines", modules_under("tests"))
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    small = sorted(_small_with_one_importer(modules, graph, settings))
    yield Figure("small_modules_of_one_importer", len(small), " ".join(small))
    cycles = sorted(_cycles(graph))
    yield Figure("package_cycles", len(cycles), " ".join(cycles))
    yield Figure("layer_exceptions", _layer_exceptions())


def _lines(key: str, modules: Iterable[Module]) -> Figure:
    by_folder: Counter[str] = Counter()
    for module in modules:
        by_folder[_folder(module)] += module.lines
    return Figure(key, by_folder.total(), _most_first(by_folder))


def _folder(module: Module) -> str:
    return str(module.path.parent.relative_to(ROOT))


def _most_first(counts: Mapping[str, int]) -> str:
    items = sorted(counts.items(), key=lambda item: -item[1])
    return " ".join(f"{name}:{count}" for name, count in items)


def _small_with_one_importer(
    modules: Iterable[Module], graph: grimp.ImportGraph, settings: Mapping[str, object]
) -> Iterator[str]:
    seams = settings.get("seams", [])
    assert isinstance(seams, list)
    for module in modules:
        if module.path.name in {"__init__.py", "__main__.py"} or module.dotted in seams:
            continue
        importers = graph.find_modules_that_directly_import(module.dotted)
        if module.lines < SMALL_MODULE_LINES and len(importers) == 1:
            yield module.dotted.removeprefix(f"{PACKAGE}.")


def _cycles(graph: grimp.ImportGraph) -> Iterator[str]:
    """Pairs of packages that import each other, directly or not."""
    packages = sorted(graph.find_children(PACKAGE))
    for one in packages:
        for other in packages:
            if one < other and all(
                graph.chain_exists(importer=a, imported=b, as_packages=True)
                for a, b in ((one, other), (other, one))
            ):
                yield f"{one}-{other}"


def _layer_exceptions() -> int:
    contracts = _pyproject()["tool"]["importlinter"]["contracts"]
    return sum(len(contract.get("ignore_imports", [])) for contract in contracts)


# --- change ---------------------------------------------------------------------------------


def spread(modules: Sequence[Module]) -> Iterator[Figure]:
    """In how many files a change of one kind has to be made, as far as names tell."""
    for key, pattern in (("method_files", METHOD_NAME), ("ack_files", ACK_NAME)):
        found = [
            module
            for module in modules
            if any(pattern.search(name) for _line, name in module.names())
        ]
        yield Figure(key, len(found), " ".join(module.path.stem for module in found))
    for engine in ENGINES:
        places = [
            (module.path.stem, line)
            for module in modules
            if f"/engines/{engine}/" not in module.name
            for line in sorted({n for n, text in _texts(module) if engine in text.lower()})
        ]
        where = (f"{name}:{len(list(lines))}" for name, lines in groupby(places, lambda at: at[0]))
        yield Figure(f"{engine}_lines_elsewhere", len(places), " ".join(where))


def _texts(module: Module) -> Iterator[tuple[int, str]]:
    yield from module.names()
    yield from module.strings()


# --- words ----------------------------------------------------------------------------------


def words(settings: Mapping[str, object]) -> Iterator[Figure]:
    """How often code, messages and pages use a word that has a plainer or a standard one."""
    avoided = settings["avoided_words"]
    assert isinstance(avoided, list)
    pattern = re.compile(rf"\b({'|'.join(map(str, avoided))})\b", re.IGNORECASE)
    counts: dict[str, int] = {}
    for path in _prose():
        for found in pattern.findall(path.read_text(encoding="utf-8").replace("_", " ")):
            counts[found.lower()] = counts.get(found.lower(), 0) + 1
    yield Figure("avoided_words", sum(counts.values()), _most_first(counts))


def _prose() -> Iterator[Path]:
    for folder in (PACKAGE, "docs", "thrift", "examples", "etc"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".py", ".md", ".thrift", ".yaml", ".sql", ".lua"}:
                yield path
    yield ROOT / "README.md"


def fragments(modules: Iterable[Module]) -> dict[str, int]:
    """Count in each module the docstrings that begin with a fragment; leave out those with none."""
    counts = {
        module.name: sum(1 for text in module.docstrings() if FRAGMENT.match(text))
        for module in modules
    }
    return {name: count for name, count in counts.items() if count}


def without_verb(modules: Iterable[Module]) -> dict[str, int]:
    """Count in each module the functions whose docstring begins with no verb; leave out 0."""
    counts = {
        module.name: sum(1 for text in module.docstrings_of_functions() if NO_VERB.match(text))
        for module in modules
    }
    return {name: count for name, count in counts.items() if count}


def shared_class_names(modules: Iterable[Module]) -> dict[str, list[str]]:
    """Find the names under which several modules have a public class; return those modules."""
    found: dict[str, list[str]] = {}
    for module in modules:
        for name in module.public_classes():
            found.setdefault(name, []).append(module.name)
    return {name: places for name, places in found.items() if len(places) > 1}


# --- layers ---------------------------------------------------------------------------------


def thrift_bytes(modules: Iterable[Module]) -> list[str]:
    """Find byte literals of Thrift's protocol outside `rpc`, each as FILE:LINE.

    They are parts of headers, and names of methods as they stand in a message.
    """
    return [
        f"{module.name}:{line}"
        for module in modules
        if f"{PACKAGE}/rpc/" not in module.name
        for line, literal in module.byte_literals()
        if _THRIFT_BYTES.search(literal) or literal in _METHODS
    ]


def house(modules: Sequence[Module]) -> Iterator[Figure]:
    """Count words, names and bytes in places that no import contract sees."""
    counts = fragments(modules)
    yield Figure("docstring_fragments", sum(counts.values()), _most_first(counts))
    counts = without_verb(modules)
    yield Figure("docstrings_without_verb", sum(counts.values()), _most_first(counts))
    shared = shared_class_names(modules)
    where = " ".join(f"{name}({', '.join(places)})" for name, places in sorted(shared.items()))
    yield Figure("shared_class_names", len(shared), where)
    outside = thrift_bytes(modules)
    yield Figure("thrift_bytes_outside_rpc", len(outside), " ".join(outside))


# --- limits ---------------------------------------------------------------------------------


def _pyproject() -> dict[str, dict[str, dict[str, list[dict[str, list[str]]]]]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--calls", action="store_true", help="also the way of a call")
    parser.add_argument("--where", action="store_true", help="also where it comes from")
    options = parser.parse_args()
    settings: Mapping[str, object] = _pyproject()["tool"]["pinlaterd-figures"]
    limits = settings["limits"]
    assert isinstance(limits, dict)
    modules = modules_under(PACKAGE)
    figures = [*size(modules, settings), *spread(modules), *words(settings), *house(modules)]
    if options.calls:
        for kind, way in call_trace.trace().items():
            figures.append(Figure(f"calls_of_{kind}", len(way)))
            figures.append(Figure(f"files_of_{kind}", len({call.file for call in way})))
    above = [figure.key for figure in figures if figure.value > limits.get(figure.key, 0)]
    for key, value, where in figures:
        mark = "ABOVE" if key in above else ""
        print(f"{key:32}{value:8,} of {limits.get(key, 0):7,} {mark}".rstrip())
        if where and (options.where or mark):
            print(f"    {where}")
    if above:
        print(f"above its limit in pyproject.toml: {', '.join(above)}", file=sys.stderr)
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
