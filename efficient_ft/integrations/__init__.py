"""Use methods in training loops: `MethodSession` for any training loop, and callbacks for Lightning and `transformers`.

The libraries are imported only by the modules `lightning` and `transformers` of this package.
"""

from efficient_ft.integrations.session import MethodSession

__all__ = ["MethodSession"]
