"""The rules of `tests/test_tidy.py`, one file per kind; `test_rules.py` plants violations of each."""
