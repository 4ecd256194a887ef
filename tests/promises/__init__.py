"""Trials of the promises in docs/promises.md.

``efficient-ft selftest`` runs them in a checkout, and ``pytest -m promises`` runs the same trials as tests. `promises`
lists the promises with their trials; each other module contains the trials of one promise. `runs` and `children` start,
interrupt and compare runs, for these trials and for the other tests.
"""
