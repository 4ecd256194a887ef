"""Methods in a training loop: `MethodSession` for any loop, and the callbacks `lightning` and `transformers`.

The callbacks' modules import their libraries; nothing here does.
"""

from efficient_ft.integrations.session import MethodSession

__all__ = ["MethodSession"]
