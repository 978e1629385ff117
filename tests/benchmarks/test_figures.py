"""What tools/figures counts beyond sizes: words, names and bytes in places that no linter sees."""

from __future__ import annotations

import pytest

from benchmarks import figures

SOURCE = '''"""What a shard keeps."""
class Store:
    """The jobs of one shard."""
    async def claim(self):
        """As many jobs as it may."""
        def nested():
            """Whatever is left is not a fragment, but its first word is on the list."""
class _Private: "How it works."
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Return a function that writes a module to a path, and reads it as figures do."""
    monkeypatch.setattr(figures, "ROOT", tmp_path)

    def write(name: str, text: str) -> figures.Module:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return figures.Module(path)

    return write


def test_docstrings_that_begin_with_a_fragment_are_counted_by_module(module):
    modules = [module("a.py", SOURCE), module("b.py", '"""Send jobs."""\nx = "What?"\n')]

    assert figures.fragments(modules) == {"a.py": 4}


@pytest.mark.parametrize(
    ("docstring", "count"),
    [
        ("Return the jobs.", 0),
        ("Process a job.", 0),
        ("Pass it on.", 0),
        ("Raises ValueError.", 0),
        ("The jobs of one shard.", 1),
        ("Jobs that wait.", 1),
        ("Returns the jobs.", 1),
        ("PENDING becomes FAILED.", 1),
        ("`queue`: whose jobs.", 1),
    ],
)
def test_docstrings_of_functions_that_begin_with_no_verb_are_counted(module, docstring, count):
    text = '"""The jobs."""\nclass Jobs:\n    """The jobs."""\n'
    text += f'    def of(self):\n        """{docstring}"""\n'
    text += '    @property\n    def queue(self):\n        """The queue of the jobs."""\n'

    assert sum(figures.without_verb([module("a.py", text)]).values()) == count


def test_a_public_class_name_of_several_modules_is_named_with_them(module):
    modules = [module(f"{name}.py", SOURCE) for name in "ab"]

    assert figures.shared_class_names(modules) == {"Store": ["a.py", "b.py"]}


@pytest.mark.parametrize(
    "literal",
    [r'b"\x0b\x00\x01"', r'rb"\x08\x00\x06(.{4})"', r'b"\0"', r'b"\x80\x01"', 'b"ackDequeuedJobs"'],
)
def test_thrift_bytes_count_outside_rpc_alone(module, literal):
    text = f"# a line\nX = {literal}\n"
    modules = [module(f"pinlaterd/{name}/x.py", text) for name in ("router", "rpc")]

    assert figures.thrift_bytes(modules) == ["pinlaterd/router/x.py:2"]


@pytest.mark.parametrize("literal", [r'b"\n"', r'b"\xef\xbb\xbf"', r'"\0"', 'b"OWNED"'])
def test_other_literals_are_no_thrift_bytes(module, literal):
    assert figures.thrift_bytes([module("pinlaterd/shard/x.py", f"X = {literal}\n")]) == []
