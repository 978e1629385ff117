"""Other releases of pinlaterd, as folders that hold a package of their own."""

from __future__ import annotations

import ast
import io
import subprocess
import tarfile
from pathlib import Path
from shutil import copytree, ignore_patterns

import pinlaterd
from pinlaterd.wire.envelope import WIRE_VERSION

_PACKAGE = Path(pinlaterd.__file__).parent
NEXT_VERSION = f"{pinlaterd.__version__}.next"
# What the next release says beyond this one: a field that this one does not know, in what servers
# tell each other and what they keep in files and in ZooKeeper.
_FIELD = 'of_the_next_release: str = "said by it alone"'
_EXTENDED = {
    "wire/envelope.py": ("Hello", "Welcome"),
    "wire/control.py": ("Report", "Snapshot", "ServerReport", "ServerGrant", "StatusQuestion"),
}


def release_of(commit: str, folder: Path) -> Path:
    """What that commit holds."""
    command = ["git", "archive", commit, "--", _PACKAGE.name, "thrift"]  # a link leads there
    done = subprocess.run(command, cwd=_PACKAGE.parent, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def next_release(folder: Path) -> Path:
    """One whose wire has another version, understands this one's, and says more."""
    package = folder / _PACKAGE.name
    copytree(_PACKAGE, package, ignore=ignore_patterns("__pycache__"))
    _replace(package / "__init__.py", f'"{pinlaterd.__version__}"', f'"{NEXT_VERSION}"')
    versions = "WIRE_VERSION, LEAST_WIRE_VERSION = "
    path = package / "wire/envelope.py"
    now = next(line for line in path.read_text().splitlines() if line.startswith(versions))
    _replace(path, now, f"{versions}{WIRE_VERSION + 1}, {WIRE_VERSION}")
    for name, structs in _EXTENDED.items():
        for struct in structs:
            _extend(package / name, struct)
    return folder


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{path}: {old}"
    path.write_text(text.replace(old, new))


def _extend(path: Path, struct: str) -> None:
    """Give it one more field, as its last."""
    text = path.read_text()
    node = next(n for n in ast.parse(text).body if getattr(n, "name", "") == struct)
    assert isinstance(node, ast.ClassDef)
    ends = [each.end_lineno for each in node.body if isinstance(each, ast.AnnAssign)]
    lines = text.splitlines()
    lines.insert(ends[-1] or 0, f"    {_FIELD}")
    path.write_text("\n".join(lines) + "\n")
