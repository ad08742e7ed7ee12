"""The colours of every figure: Okabe and Ito's palette, which people with colour blindness tell apart, and greys.
VIOLET, BROWN and OLIVE are for figures that need more.

INK draws controls and VERMILION what is not corrected. A grey is named for its use, or for its lightness in percent.
Left out: which method or format has which colour (`style`, `harness.published.figures.marks`).
"""

from __future__ import annotations

INK = "#202020"
BLUE = "#0072B2"
VERMILION = "#D55E00"
GREEN = "#009E73"
PINK = "#CC79A7"
ORANGE = "#E69F00"
SKY = "#56B4E9"
VIOLET = "#7A5195"
BROWN = "#8C564B"
OLIVE = "#999933"
GREY = "#808080"

REFERENCE = "#707070"
"""Lines that data are read against: zero, one, the control, the start."""
NOTE = "#606060"
"""Small print."""
STRIPE = "#F3F3F3"
"""The background of every second group of rows."""
GREY_25 = "#404040"
GREY_56 = "#909090"
GREY_63 = "#A0A0A0"
GREY_69 = "#B0B0B0"
GREY_85 = "#D9D9D9"
GREY_89 = "#E4E4E4"
GREY_93 = "#EDEDED"
GREY_97 = "#F7F7F7"
