"""Hypothesis draws its examples without a time limit for each: a busy machine fails no test."""

from hypothesis import settings

settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
