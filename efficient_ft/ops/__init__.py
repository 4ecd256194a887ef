"""Operations on tensors: projections, packed tensors and operations, tokens, recomputation. They know no model."""
