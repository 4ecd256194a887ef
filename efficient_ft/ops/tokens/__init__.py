"""Functions that score, drop, fuse and merge tokens, and the record of the remaining tokens.

Tokens are (B, N, C). The first P tokens are prefix tokens (class token, distillation token, registers), which are never
dropped. The other tokens are called patch tokens, even after fusion or merging.
"""

from efficient_ft.ops.tokens.dropping import class_attention, drop, num_kept, take
from efficient_ft.ops.tokens.merging import match, merge, unmerge
from efficient_ft.ops.tokens.record import (
    Tokens,
    attach_tokens,
    current_tokens,
    is_token_reduction_suspended,
    pop_tokens,
    token_context,
    token_reduction_suspended,
)

__all__ = [
    "Tokens",
    "attach_tokens",
    "class_attention",
    "current_tokens",
    "drop",
    "is_token_reduction_suspended",
    "match",
    "merge",
    "num_kept",
    "pop_tokens",
    "take",
    "token_context",
    "token_reduction_suspended",
    "unmerge",
]
