"""Meaning of PTX instructions: one module per class, each a table of handlers that emit Python.

A handler takes its instruction's modifiers one by one (`Modifiers`); what is left over is refused by name.
"""

from . import bulk, control, convert, floating, integer, memory, move, sync, tcgen05, warp, wgmma  # noqa: F401
from .registry import HANDLERS, Modifiers, Rule

__all__ = ["HANDLERS", "Modifiers", "Rule"]
