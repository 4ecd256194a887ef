"""Hypothesis settings without a time limit per example, so that a busy machine does not cause failures."""

from hypothesis import settings

settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
