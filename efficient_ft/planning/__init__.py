"""Plans: which recipes of a run fit a memory budget, what they cost, and what they lose."""

from efficient_ft.methods.declarations import Exactness
from efficient_ft.planning.candidates import Candidate
from efficient_ft.planning.options import Excluded, Option
from efficient_ft.planning.planner import Examined, Plan, make_plan
from efficient_ft.planning.timing import Trial

__all__ = ["Candidate", "Exactness", "Examined", "Excluded", "Option", "Plan", "Trial", "make_plan"]
