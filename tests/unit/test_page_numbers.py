"""The numbers of README's tables against the demo's, where this machine has run it."""

import pytest

from support.page_numbers import ADAPTED, README, SYSTEMS, Printed, numbers, printed

SAMPLE = README.parent / "results" / "sample"
# What the processor changes of a mean perplexity, beside the rounding of the page.
SPREAD = 0.0005


def test_the_page_tells_of_the_demo_that_ran_here() -> None:
    """Nothing is compared where no `make demo` has ended."""
    if not (SAMPLE / "report" / "index.html").exists():
        return
    for one in numbers(SAMPLE):
        digits = len(one.text.partition(".")[2])
        printed, rounding = float(one.text.replace(",", "")), 0.5 * 10**-digits
        assert printed == pytest.approx(one.value, abs=rounding + SPREAD * one.value), one


def test_each_row_of_the_page_is_found() -> None:
    counts = {label: len(texts) for label, texts in printed(README).items()}
    assert counts == dict.fromkeys(SYSTEMS, 2) | dict.fromkeys(ADAPTED, 5)


def test_a_number_is_rounded_once() -> None:
    assert Printed("Dense", "246.9", 246.9498).rounded == "246.9"
    assert Printed("bytes", "4,608,512", 4608512.0).rounded == "4,608,512"
