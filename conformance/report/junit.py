"""JUnit XML, for continuous-integration servers."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from servespec.conformance.report.result import Report

__all__ = ["junit"]


def junit(report: Report) -> bytes:
    """Return a run as JUnit XML: a test suite a suite, a test case a failure, one for the rest.

    Parameters
    ----------
    report : Report

    Returns
    -------
    bytes
    """
    root = ET.Element("testsuites", name=f"servespec {report.implementation}")
    for suite in report.suites:
        failures = [f for f in report.failures if f.suite == suite.name]
        element = ET.SubElement(
            root,
            "testsuite",
            name=suite.name,
            tests=str(len(failures) + 1),
            failures=str(len(failures)),
            time=f"{suite.seconds:.3f}",
        )
        ET.SubElement(
            element,
            "testcase",
            classname=f"servespec.{suite.name}",
            name=f"{suite.cases} cases, {suite.tokens} tokens",
            time=f"{suite.seconds:.3f}",
        )
        for failure in failures:
            case = ET.SubElement(
                element,
                "testcase",
                classname=f"servespec.{suite.name}",
                name=_printable(failure.case_file or failure.field),
            )
            node = ET.SubElement(case, "failure", message=_printable(str(failure)))
            node.text = _printable("\n".join(failure.last_lines))
    for name, why in report.skipped.items():
        element = ET.SubElement(root, "testsuite", name=name, tests="1", skipped="1")
        case = ET.SubElement(element, "testcase", classname=f"servespec.{name}", name=name)
        ET.SubElement(case, "skipped", message=why)
    return bytes(ET.tostring(root, encoding="utf-8", xml_declaration=True))


def _printable(text: str) -> str:
    """Replace what XML cannot hold; the text comes from a foreign implementation."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)
