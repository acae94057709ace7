"""The rules on ms-swift's arguments."""

from topoplan.trainers.swift.rules.swift import findings
from topoplan.trainers.swift.rules.table import RULES

__all__ = ["RULES", "findings"]
