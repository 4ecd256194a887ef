"""Numbers with nouns and verbs, in the singular or plural."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """Return a number with a noun: ``1 text``, ``2,000 texts``, ``3 classes``."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith(('s', 'x')) else 's'}"


def verb(count: int, one: str = "has", several: str = "have") -> str:
    """Return the form of a verb that agrees with a number."""
    return one if count == 1 else several
