"""Operations on tensors that do not depend on a model: projections, storage formats, tokens and recomputation."""
