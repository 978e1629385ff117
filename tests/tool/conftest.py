"""How `pinlater` is run."""

from tests.tool.program import run

__all__ = ["run"]
