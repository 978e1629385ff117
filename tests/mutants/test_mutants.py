"""Mutants are kept in step with the code: one whose text is not found tests nothing."""

from __future__ import annotations

import pytest

from tests.mutants.__main__ import Mutant, read_mutants


@pytest.mark.parametrize("mutant", read_mutants(), ids=lambda mutant: mutant.effect)
def test_the_text_of_a_mutant_occurs_once(mutant: Mutant):
    assert mutant.matches(), f"{mutant.file} does not hold once:\n{mutant.old}"
