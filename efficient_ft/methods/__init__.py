"""Every method, by the name it has on the command line."""

from efficient_ft.methods.backprop.lbp_dct import LBPDCT
from efficient_ft.methods.backprop.lbp_wht import LBPWHT
from efficient_ft.methods.base import Applied, Method, apply_methods, in_order, plain_state_dict

METHODS: dict[str, type[Method]] = {m.name: m for m in (LBPWHT, LBPDCT)}

__all__ = ["LBPDCT", "LBPWHT", "METHODS", "Applied", "Method", "apply_methods", "in_order", "plain_state_dict"]
