"""What the plots share."""

from __future__ import annotations

#: Colours of series, distinguishable on light and dark backgrounds.
COLOURS = ("#2f7fc1", "#d9822b", "#3a9d6e", "#b1519e", "#8a8a2c", "#c4504b", "#5b6ec9", "#4d9aa5")
