"""Search for the best model within a memory budget and a time budget."""

from efficient_ft.search.state import Arm, SearchState, Slice

__all__ = ["Arm", "SearchState", "Slice"]
