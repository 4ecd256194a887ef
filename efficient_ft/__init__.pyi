"""Types of the names that `efficient_ft` loads when they are first used."""

from efficient_ft.cli.commands.auto import auto as auto
from efficient_ft.cli.commands.plan import plan as plan
from efficient_ft.integrations.session import MethodSession as MethodSession

__version__: str
