"""Fixtures that every layer may use, and what tests report at the end."""

from typing import Any

from megamcp.testing import *  # noqa: F403


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints what a test recorded as its property `report`, also from the processes of xdist."""
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if getattr(report, "when", "") == "teardown":
            for name, text in report.user_properties:
                if name == "report":
                    terminalreporter.section(report.nodeid)
                    terminalreporter.line(text)
