"""The audit: compares what clients received with the ideal computed from the sources."""

from holdfast.verify.audit.check import audit
from holdfast.verify.audit.compare import Comparison, Delay, compare
from holdfast.verify.audit.report import OutputReport, Report, SourceReport, Verdict

__all__ = [
    "Comparison",
    "Delay",
    "OutputReport",
    "Report",
    "SourceReport",
    "Verdict",
    "audit",
    "compare",
]
