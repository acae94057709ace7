"""The rules on the arguments of ms-swift."""

from topoplan.trainers.swift.rules.swift import findings
from topoplan.trainers.swift.rules.table import RULES

__all__ = ["RULES", "findings"]
