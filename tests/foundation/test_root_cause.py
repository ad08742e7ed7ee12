"""The error at the bottom of a chain, in one line."""

from __future__ import annotations

from harness.foundation.root_cause import LONGEST, root_cause


def test_the_first_error_of_a_chain_is_told_in_one_line() -> None:
    try:
        try:
            raise KeyError("deep")
        except KeyError:
            raise OSError("one\n\n  two\nthree\nfour") from None
    except OSError as error:
        cut = error
    assert root_cause(cut) == "KeyError: 'deep'"  # `from None` hides an error in a traceback, not the cause
    above = RuntimeError("above")
    above.__cause__ = OSError("one\n\n  two\nthree\nfour")
    assert root_cause(above) == "OSError: one; two; three"
    assert root_cause(ValueError()) == "ValueError: " and len(root_cause(ValueError("x" * 999))) == 12 + LONGEST
