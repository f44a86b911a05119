"""Experiments with nbflash: ``python -m experiments --help``.

Every command checks its results against the float64 reference before it times anything, and
refuses to print a number for a result outside the error budget. CONTRIBUTING.md says what is where.
"""
