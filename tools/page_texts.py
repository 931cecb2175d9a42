"""Texts for synthetic pages: words, figures and strings without sense.

Half of the lines have no sense, so a reader has to look at the page instead of guessing.
"""

from __future__ import annotations

import numpy as np

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
DIGITS = "0123456789"
PUNCTUATION = ".,:-/#()+&%"
ALPHABET = LETTERS + DIGITS + PUNCTUATION

WORDS = """
    INVOICE TOTAL DATE PAGE ORDER PAID DUE TAX NET GROSS UNIT PRICE ITEM CUSTOMER NAME STREET
    CITY BANK ACCOUNT REPORT MEMO TO FROM SUBJECT NOTE NOTES LETTER MARCH APRIL MAY JUNE JULY
    AUGUST SAMPLE DRAFT COPY FINAL SIGNED OFFICE PHONE FAX BOX ROOM FLOOR WEST EAST NORTH
    SOUTH RECEIPT CASH CARD CHANGE THANK YOU QUANTITY WEIGHT HEIGHT WIDTH SHIP PARCEL STOCK
    ZONE JOB QUERY VALUE INDEX FIGURE TABLE CHAPTER APPENDIX
""".split()  # noqa: SIM905 - a list of strings would be a page long


def page_lines(rng: np.random.Generator, count: int, min_chars: int, max_chars: int) -> list[str]:
    """`count` lines of at most `max_chars` characters, without spaces at an end or side by side."""
    return [_line(rng, int(rng.integers(min_chars, max_chars + 1))) for _ in range(count)]


def _line(rng: np.random.Generator, length: int) -> str:
    draw = rng.random()
    if draw < 0.5:
        line = _senseless(rng, length)
    elif draw < 0.75:
        line = _words(rng, length)
    else:
        line = _figures(rng, length)
    return " ".join(line[:length].split()) or _pick(rng, ALPHABET)


def _pick(rng: np.random.Generator, choices: str | list[str]) -> str:
    return choices[rng.integers(len(choices))]


def _senseless(rng: np.random.Generator, length: int) -> str:
    pool = (LETTERS, LETTERS + DIGITS, ALPHABET, ALPHABET + PUNCTUATION)[rng.integers(4)]
    return "".join(" " if rng.random() < 0.12 else _pick(rng, pool) for _ in range(length))


def _words(rng: np.random.Generator, length: int) -> str:
    words = ""
    while len(words) < length:
        words += (_pick(rng, WORDS) if rng.random() < 0.7 else str(rng.integers(10000))) + " "
    return words


def _figures(rng: np.random.Generator, length: int) -> str:
    shapes = (
        "##.##",
        "####-##-##",
        "##:##",
        "#,###.##",
        "##%",
        "(###)",
        "@@-####",
        "##/##",
        "+## ####",
        "#@@ ##",
        "& @@@",
        "@. @@@@",
    )
    text = ""
    while len(text) < length:
        shape = shapes[rng.integers(len(shapes))]
        text += (
            "".join({"#": _pick(rng, DIGITS), "@": _pick(rng, LETTERS)}.get(c, c) for c in shape)
            + " "
        )
    return text
