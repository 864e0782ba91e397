"""Why is communication slow here? Checks of files, environment, driver and logs, each with its remedy."""

from commopt.doctor.checks.diagnosis import diagnose
from commopt.doctor.facts.machine import Machine
from commopt.doctor.finding import Finding, Severity
from commopt.doctor.observe import observe

__all__ = ["Finding", "Machine", "Severity", "diagnose", "observe"]
