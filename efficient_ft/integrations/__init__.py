"""Integrations with training loops: `MethodSession` for any loop, and callbacks for Lightning and `transformers`.

Only the modules `lightning` and `transformers` of this package import the libraries of the same name.
"""

from efficient_ft.integrations.session import MethodSession

__all__ = ["MethodSession"]
