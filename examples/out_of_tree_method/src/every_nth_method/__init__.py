"""A method for efficient-ft: every n-th block and the head train."""

from every_nth_method.method import EveryNth

__all__ = ["EveryNth"]
