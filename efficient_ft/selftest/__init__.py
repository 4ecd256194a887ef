"""Trials of the promises in docs/promises.md, for any machine: ``efficient-ft selftest``.

`command` is the command, `promises` lists the promises with their trials, and each other module has the trials of one.
"""
