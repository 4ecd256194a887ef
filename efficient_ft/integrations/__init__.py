"""Callbacks that carry methods in the training loops of other libraries: `lightning` and `transformers`.

Each module imports its library; nothing here does.
"""
