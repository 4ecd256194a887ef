"""Plan a run: find the recipes that fit a memory budget, and estimate their cost and their loss of accuracy."""

from efficient_ft.methods.declarations import Exactness
from efficient_ft.planning.candidates import Candidate
from efficient_ft.planning.options import Excluded, Option
from efficient_ft.planning.plan import Examined, Limits, Plan
from efficient_ft.planning.planner import make_plan
from efficient_ft.planning.timing import Trial

__all__ = ["Candidate", "Exactness", "Examined", "Excluded", "Limits", "Option", "Plan", "Trial", "make_plan"]
