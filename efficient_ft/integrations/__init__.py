"""Methods in training loops: `MethodSession` for any loop, and callbacks for Lightning and transformers.

The modules `lightning` and `transformers` import these libraries. The other modules of this folder do not.
"""

from efficient_ft.integrations.session import MethodSession

__all__ = ["MethodSession"]
