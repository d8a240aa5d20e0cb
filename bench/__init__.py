"""Runnable comparisons. Each prints ratios from one run on one machine, and the machine."""
