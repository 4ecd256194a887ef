"""Which parameters train."""

from efficient_ft.methods.selection.static import BitFit, Blocks, Full, HeadOnly, LastStage, NormLast, Selection

__all__ = ["BitFit", "Blocks", "Full", "HeadOnly", "LastStage", "NormLast", "Selection"]
