"""Trials of the promises in docs/promises.md.

``efficient-ft selftest`` runs the trials in a checkout, and ``pytest -m promises`` runs the same trials as tests. The
module `promises` lists the promises with their trials. The modules `runs` and `children` start, interrupt and compare
runs for the trials and for other tests. Most other modules contain the trials of one promise.
"""
