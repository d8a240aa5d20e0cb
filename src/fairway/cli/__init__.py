"""The command line: one file per verb family.

Everything heavy is imported inside the verbs, so that `fairway --help` answers at once. Exit status: 0 ok, 1 failed,
2 usage, 3 unreachable, 4 found damage or imbalance.
"""
