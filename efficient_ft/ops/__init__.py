"""Operations on tensors: projections, storage formats, tokens and recomputation. They are independent of any model."""
